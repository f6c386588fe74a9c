"""Which type of a repository's GGUF files is pulled: a person is asked, a script gets the list and the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgepipe.cli import models
from edgepipe.cli.views import copies_view
from edgepipe.cli.wizard import asking, type_choice
from edgepipe.cli.wizard.asking import AskedChoice, Back, Defaults
from edgepipe.cli.wizard.model_choice import choose_model
from edgepipe.cli.wizard.type_choice import Memory, Room, ask_to_fetch, ask_type, memory_at_hand, recommended
from edgepipe.errors import ModelUnknown
from edgepipe.files.progress import PlannedFile
from edgepipe.store.gguf_names import GgufChoice, gguf_choices
from edgepipe.store.hub import HubSource
from tests.support.models.fake_hub import FakeHub, running
from tests.support.processes.command_line import Run, make_status

GB = 1_000_000_000
REPO = "org/Big-GGUF"
SOURCE = HubSource(repo=REPO)
SIZES = {"Q2_K": 26, "Q4_0": 40, "Q4_K_M": 42, "Q6_K": 58, "Q8_0": 75, "F16": 141}


def choices(*types: str) -> list[GgufChoice]:
    return gguf_choices(PlannedFile(name=f"Big-{kind}.gguf", num_bytes=SIZES[kind] * GB) for kind in types)


def gpus(*sizes_gb: int) -> Memory:
    rooms = tuple(Room(free_bytes=size * GB, packing="torch-cuda") for size in sizes_gb)
    return Memory(owner="this cluster", rooms=rooms)


@pytest.mark.parametrize(
    ("memory", "best"),
    [(gpus(24, 24), "Q4_K_M"), (gpus(100, 100), "Q4_K_M"), (gpus(21, 22), "Q4_0"), (gpus(24), None), (gpus(), None)],
)
def test_q4_k_m_is_recommended_and_else_the_largest_that_fits(memory: Memory, best: str | None) -> None:
    found = recommended(choices(*SIZES), memory)
    assert (found and found.label) == best


def test_without_q4_k_m_the_largest_that_fits_is_recommended() -> None:
    found = recommended(choices("Q2_K", "Q6_K", "Q8_0", "F16"), gpus(48, 32))
    assert found is not None
    assert found.label == "Q8_0"


def test_a_type_that_edgepipe_does_not_know_is_shown_as_such_and_never_recommended() -> None:
    names = ["IQ5_KS", "Q4_0_4_4", "Q3_K_L", "UD-Q8_K_XL"]
    found = gguf_choices(PlannedFile(name=f"x-{name}.gguf", num_bytes=GB * (9 - i)) for i, name in enumerate(names))
    noting = Noting()
    assert ask_type(noting, SOURCE, found, gpus(24)) == f"{REPO}:Q3_K_L"
    verdicts = [" ".join(line.split()[3:]) for line in noting.lines]
    assert verdicts == ["not supported", "not supported", "fits, recommended", "fits"]
    assert ask_type(noting, SOURCE, found, gpus(2)) == f"{REPO}:UD-Q8_K_XL", "the smallest of a known type"


@pytest.mark.parametrize("kind", ["Q2_K", "IQ3_M"])
def test_what_a_backend_keeps_in_8_bits_needs_more_than_its_file(kind: str) -> None:
    (choice,) = gguf_choices([PlannedFile(name=f"x-{kind}.gguf", num_bytes=20 * GB)])
    room = Room(free_bytes=25 * GB, packing="torch-cpu")
    assert not Memory(owner="this cluster", rooms=(room,)).fits(choice)
    assert Memory(owner="this cluster", rooms=(room,) * 6).fits(choice)


def test_a_backend_that_widens_needs_16_bits_for_each_weight() -> None:
    (choice,) = choices("Q8_0")
    widened = Room(free_bytes=100 * GB, packing="")
    assert gpus(100).fits(choice)
    assert not Memory(owner="this cluster", rooms=(widened,)).fits(choice)


def test_memory_is_that_of_the_cluster_or_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone = memory_at_hand(tmp_path)
    assert (alone.owner, len(alone.rooms)) == ("this machine", 1)
    monkeypatch.setattr(copies_view, "members_of", lambda data_dir: make_status().members)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    cluster = memory_at_hand(tmp_path)
    assert cluster.owner == "this cluster"
    assert [room.free_bytes for room in cluster.rooms] == [1_000_000_000, 25_300_000_000]


class Noting(Defaults):
    """Takes the default, and remembers the question. Types the given models, one after the other."""

    def __init__(self, *models: str, back: bool = False, answer: bool = True) -> None:
        self.lines: list[str] = []
        self.asked: list[str] = []
        self._models = list(models)
        self._back = back
        self._answer = answer

    def choose(self, question: str, choices: Sequence[AskedChoice], *, default: str) -> str:
        """The default, or the entry for another model."""
        if self._back:
            raise Back
        self.asked.append(question)
        self.lines = [choice.text for choice in choices]
        return "other" if self._models and question == "Which model?" else default

    def text(
        self, question: str, *, default: str = "", check: Callable[[str], str] = lambda _: "", flags: str = ""
    ) -> str:
        """The name of another model; of the first for which ``check`` has no complaint."""
        return next(model for model in iter(lambda: self._models.pop(0), None) if not self._note(check(model)))

    def confirm(self, question: str, *, default: bool) -> bool:
        """The given answer."""
        self.asked.append(question)
        return self._answer

    def _note(self, complaint: str) -> str:
        self.lines += [complaint] if complaint else []
        return complaint


def test_a_person_sees_sizes_and_what_fits() -> None:
    noting = Noting()
    assert ask_type(noting, SOURCE, choices(*SIZES), gpus(24, 24)) == f"{REPO}:Q4_K_M"
    assert [" ".join(line.split()) for line in noting.lines] == [
        "F16 141.0 GB too large",
        "Q8_0 75.0 GB too large",
        "Q6_K 58.0 GB too large",
        "Q4_K_M 42.0 GB fits, recommended",
        "Q4_0 40.0 GB fits",
        "Q2_K 26.0 GB too large",
    ]


def test_where_nothing_fits_the_smallest_is_preselected_and_the_revision_is_kept() -> None:
    source = HubSource(repo=REPO, revision="v2")
    assert ask_type(Noting(), source, choices(*SIZES), gpus(8)) == f"{REPO}:Q2_K@v2"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    files = {name: bytes(10) for name in ("mmproj-F16.gguf", "x-Q4_K_M.gguf", "imatrix_x.gguf", "config.json")}
    files |= {f"Q8_0/x-Q8_0-0000{part}-of-00002.gguf": bytes(10) for part in (1, 2)}
    with running(FakeHub(repo=REPO, files=files)) as served:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.endpoint)
        yield served


def test_a_script_gets_the_list_and_the_command(run: Run, hub: FakeHub) -> None:
    result = run("models", "pull", REPO)
    assert result.code == 2
    assert [line.split()[:2] for line in result.out.splitlines()] == [
        ["TYPE", "SIZE"],
        ["Q8_0", "20"],
        ["Q4_K_M", "10"],
    ]
    assert f"try: edgepipe models pull {REPO}:Q4_K_M" in result.err
    assert hub.asked == []


def test_a_script_gets_the_list_as_json(run: Run, hub: FakeHub) -> None:
    result = run("models", "pull", f"hf:{REPO}@v2", "--json")
    assert result.code == 2
    found = json.loads(result.out)
    assert found["model"] == REPO
    assert [(row["type"], row["size_bytes"], row["files"], row["recommended"]) for row in found["types"]] == [
        ("Q8_0", 20, 2, False),
        ("Q4_K_M", 10, 1, True),
    ]
    assert found["types"][0]["command"] == f"edgepipe models pull {REPO}:Q8_0@v2"


@pytest.mark.parametrize("back", [False, True])
def test_a_person_is_asked(monkeypatch: pytest.MonkeyPatch, run: Run, hub: FakeHub, back: bool) -> None:
    pulled: list[str] = []

    def pull(root: Path, model: str, **_: object) -> SimpleNamespace:
        pulled.append(model)
        return SimpleNamespace(model_id=model, already_here=False, path=root, dry_run=False, total_bytes=10, files=[])

    monkeypatch.setattr(models, "pull_model", pull)
    monkeypatch.setattr(models, "_template_note", lambda path: "")  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(asking, "Terminal", lambda: Noting(back=back))
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    result = run("models", "pull", REPO)
    assert pulled == ([] if back else [f"{REPO}:Q4_K_M"])
    assert result.code == int(back)


def test_the_wizard_asks_for_the_type_of_another_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: FakeHub
) -> None:
    monkeypatch.setattr("edgepipe.cli.wizard.model_choice.status_with_devices", lambda data_dir: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    monkeypatch.setattr(type_choice, "_own_memory", lambda: gpus(1, 2))
    assert choose_model(Noting(REPO), data_dir=tmp_path, models_dir=tmp_path) == f"{REPO}:Q4_K_M"
    assert choose_model(Noting("demo"), data_dir=tmp_path, models_dir=tmp_path) == "demo"


def test_the_wizard_asks_again_after_a_name_that_means_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgepipe.cli.wizard.model_choice.status_with_devices", lambda data_dir: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    noting = Noting("gpt-9", "org/none", "https://huggingface.co/org/Big-GGUF/blob/main/x-Q4_K_M.gguf")
    found = choose_model(noting, data_dir=tmp_path, models_dir=tmp_path)
    assert found == "https://huggingface.co/org/Big-GGUF/blob/main/x-Q4_K_M.gguf"
    assert noting.lines[-1:] == [
        "no model is called 'gpt-9'; nearest known names: gpt-oss-20b, gpt-oss-120b, granite-3.3-8b"
    ]
    assert "the hub has no model 'org/none'" in capsys.readouterr().out


def test_chat_asks_one_question_with_sizes_and_what_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(type_choice, "_own_memory", lambda: gpus(1, 2))
    noting = Noting()
    assert ask_to_fetch(noting, f"hf.co/{REPO}", tmp_path) == f"{REPO}:Q4_K_M"
    assert noting.asked == ["Fetch which type?"]
    shown = [" ".join(line.split()) for line in noting.lines]
    assert shown == ["Q8_0 20 B fits", "Q4_K_M 10 B fits, recommended", "none now"]
    asking = Noting()
    assert ask_to_fetch(asking, f"{REPO}:q8_0", tmp_path) == f"{REPO}:q8_0"
    assert asking.asked == ["Fetch it?"]
    assert "org/Big-GGUF:q8_0 has 20 B; free memory of this cluster: 3.0 GB: it fits" in capsys.readouterr().out
    assert ask_to_fetch(Noting(answer=False), f"{REPO}:q8_0", tmp_path) == ""
    with pytest.raises(ModelUnknown, match="no model is called"):
        ask_to_fetch(Noting(), "gpt-9", tmp_path)


KNOWN = {f"Qwen3-8B-{kind}.gguf": bytes(size) for kind, size in (("Q4_K_M", 11), ("Q8_0", 20), ("UD-Q4_K_XL", 12))}


@pytest.mark.parametrize(
    ("typed", "file"),
    [
        ("qwen3:8b", "Qwen3-8B-Q4_K_M.gguf"),
        ("Qwen3 8B Q8", "Qwen3-8B-Q8_0.gguf"),
        ("qwen3-8b:ud-q4_k_xl", "Qwen3-8B-UD-Q4_K_XL.gguf"),
        ("https://huggingface.co/Qwen/Qwen3-8B-GGUF/blob/main/Qwen3-8B-Q8_0.gguf", "Qwen3-8B-Q8_0.gguf"),
        ("https://huggingface.co/Qwen/Qwen3-8B-GGUF/blob/main/sub/small-Q8_0.gguf", "sub/small-Q8_0.gguf"),
    ],
)
def test_a_pull_of_a_name_as_typed_fetches_one_type_without_a_question(
    run: Run, monkeypatch: pytest.MonkeyPatch, typed: str, file: str
) -> None:
    files = dict(KNOWN) | ({"sub/small-Q8_0.gguf": bytes(5)} if "small" in typed else {})
    with running(FakeHub(repo="Qwen/Qwen3-8B-GGUF", files=files)) as served:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.endpoint)
        result = run("models", "pull", typed, "--dry-run", "--json")
    assert result.code == 0
    assert [entry["name"] for entry in json.loads(result.out)["files"]] == [file]
