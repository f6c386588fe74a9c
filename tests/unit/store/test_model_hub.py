"""Pulling from a hub: a fake one on loopback that breaks off, lies and is not there."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgepipe.errors import ArchitectureUnsupported, ModelDownloadFailed, ModelInvalid, ModelUnknown
from edgepipe.files.progress import PullProgress
from edgepipe.spec.config import hf_config
from edgepipe.store import install
from edgepipe.store.hub import HubSource, list_hub, parse_pinned
from edgepipe.store.pull import Puller, PullResult, hub_source
from edgepipe.store.store import ModelStore
from edgepipe.text.conversations.known_traits import TRAITS_FILE
from edgepipe.weights.weights import open_weights
from tests.support.models.fake_hub import COMMIT, FakeHub, running, virtual_pauses
from tests.support.models.family_files import write_family_gguf
from tests.support.models.files import (
    TOKENS,
    gguf_bytes,
    gguf_row,
    hf_values,
    random_tensors,
    write_gguf,
    write_hf_folder,
    write_split_gguf,
)
from tests.support.models.quantised_folders import write_quantised_folder

REPO = "org/tiny"
FIRST, BIG = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def repository(folder: Path, **changes: Any) -> dict[str, bytes]:
    """A sharded model's files and some that nobody should fetch."""
    write_hf_folder(folder, hf_values(**changes), shards=2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {"pytorch_model.bin": b"x" * 100, "modeling_tiny.py": b"raise SystemExit", "README.md": b"hello"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with running(FakeHub(repo=REPO, files=repository(tmp_path / "source"))) as served:
        yield served


def pull(hub: FakeHub, root: Path, source: str = REPO, **options: Any) -> PullResult:
    events = options.pop("events", [])
    puller = Puller(root, endpoint=hub.endpoint, pauses=options.pop("pauses", virtual_pauses([])))
    return puller.pull(source, events.append, dry_run=options.pop("dry_run", False))


def test_a_repository_is_pulled_without_what_is_no_data(hub: FakeHub, tmp_path: Path) -> None:
    events: list[PullProgress] = []
    result = pull(hub, tmp_path / "store", events=events)
    model = ModelStore(tmp_path / "store").resolve(REPO)
    assert {path.name for path in result.path.iterdir()} == {
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        BIG,
        "edgepipe.json",
        "manifest.json",
    }
    assert model.open_weights().config.num_layers == 3
    download = [progress for progress in events if progress.phase == "download"]
    assert download[-1].done_bytes == download[-1].total_bytes == result.total_bytes
    assert parse_pinned(model.manifest.source) == HubSource(repo=REPO, revision=COMMIT)


@pytest.mark.parametrize("tokenizer", ["tekken.json", "tiktoken.model", "tokenizer.model"])
def test_a_repository_whose_tokenizer_cannot_be_read_is_refused_before_its_weights_come(
    tokenizer: str, hub: FakeHub, tmp_path: Path
) -> None:
    hub.files[tokenizer] = b"{}"
    with pytest.raises(ModelInvalid, match="has no tokenizer") as caught:
        pull(hub, tmp_path / "store")
    assert tokenizer in caught.value.fact
    assert not [name for name, _ in hub.asked if name.endswith(".safetensors")]


def test_shards_with_the_names_of_qwen35_are_pulled(hub: FakeHub, tmp_path: Path) -> None:
    """``model.safetensors-00001-of-00002.safetensors``."""
    for name in (FIRST, BIG):
        hub.files[f"model.safetensors{name.removeprefix('model')}"] = hub.files.pop(name)
    index = hub.files["model.safetensors.index.json"].replace(b'"model-', b'"model.safetensors-')
    hub.files["model.safetensors.index.json"] = index
    pull(hub, tmp_path / "store")
    assert ModelStore(tmp_path / "store").resolve(REPO).open_weights().config.num_layers == 3


def test_a_repository_with_one_weight_file_is_pulled(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()}
    with running(FakeHub(repo=REPO, files=files)) as hub:
        pull(hub, tmp_path / "store")
    weights = ["model.safetensors"] * 2  # its header, then all of it
    assert [name for name, _ in hub.asked] == ["config.json", *weights]
    assert ModelStore(tmp_path / "store").resolve(REPO).whole


def test_an_index_may_name_one_weight_file(tmp_path: Path) -> None:
    """As mlx-lm writes small models."""
    write_hf_folder(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()}
    names = random_tensors(hf_config(hf_values()))
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    with running(FakeHub(repo=REPO, files=files)) as hub:
        pull(hub, tmp_path / "store")
    model = ModelStore(tmp_path / "store").resolve(REPO)
    assert model.whole
    assert model.open_weights().config.num_layers == 3


def test_a_dry_run_asks_for_sizes_only(hub: FakeHub, tmp_path: Path) -> None:
    result = pull(hub, tmp_path / "store", dry_run=True)
    assert {file.name for file in result.files} >= {BIG, "config.json"}
    assert result.total_bytes == sum(len(hub.files[file.name]) for file in result.files)
    assert hub.asked == []
    assert not (tmp_path / "store").exists()


def test_a_tokenizer_larger_than_any_is_not_fetched(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "MAX_METADATA_BYTES", 1000)  # a file above the real limit is slow
    hub.files["tokenizer.json"] = bytes(1001)
    with pytest.raises(ModelInvalid, match="too large"):
        pull(hub, tmp_path / "store")
    assert hub.asked == []


def test_damaged_bytes_are_refused_and_deleted(hub: FakeHub, tmp_path: Path) -> None:
    for name in ("config.json", BIG):
        hub.damaged = {name}
        with pytest.raises(ModelInvalid, match="arrived damaged"):
            pull(hub, tmp_path / "store")
        assert list((tmp_path / "store").iterdir()) == []


def test_an_unusable_model_is_refused_before_its_weights_come(tmp_path: Path) -> None:
    files = repository(tmp_path / "source")
    files["config.json"] = json.dumps(hf_values(architectures=["BertModel"])).encode()
    with running(FakeHub(repo=REPO, files=files)) as hub, pytest.raises(ArchitectureUnsupported):
        pull(hub, tmp_path / "store")
    assert not [name for name, _ in hub.asked if name.endswith(".safetensors")]
    assert list((tmp_path / "store").iterdir()) == []


def test_a_connection_that_breaks_is_made_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut_after = {BIG: len(hub.files[BIG]) - 1000}  # once its header is read
    pull(hub, tmp_path / "store")
    assert len([name for name, _ in hub.asked if name == BIG]) == 2
    assert ModelStore(tmp_path / "store").resolve(REPO)


def test_what_came_before_a_failure_is_not_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.refused = {BIG: 1}  # after its header
    with pytest.raises(ModelDownloadFailed) as caught:
        pull(hub, tmp_path / "store")
    assert "the pull resumes" in caught.value.next_step
    assert ModelStore(tmp_path / "store").list() == []
    hub.refused, hub.asked = {}, []
    pull(hub, tmp_path / "store")
    assert [name for name, _ in hub.asked] == [FIRST, BIG, BIG], "both headers, then one file"


def test_a_pull_outlives_an_outage_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    """A large model downloads overnight, so the pull must resume without a person."""
    paused: list[float] = []
    hub.failing, events = {BIG: [503, 502, 429, 503] * 4}, list[PullProgress]()
    pull(hub, tmp_path / "store", events=events, pauses=virtual_pauses(paused))
    assert ModelStore(tmp_path / "store").resolve(REPO)
    assert paused[:2] == [2.0, 4.0]
    assert [event for event in events if event.phase == "waiting"]
    downloads = [event for event in events if event.phase == "download"]
    assert downloads[-1].done_bytes == downloads[-1].total_bytes


def test_a_pull_gives_up_after_ten_minutes_without_a_byte(hub: FakeHub, tmp_path: Path) -> None:
    paused: list[float] = []
    hub.failing = {BIG: [503] * 1000}
    with pytest.raises(ModelDownloadFailed, match="could not be fetched") as caught:
        pull(hub, tmp_path / "store", pauses=virtual_pauses(paused))
    assert "the hub has a fault" in caught.value.next_step
    assert 600 <= sum(paused) <= 700


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (503, "the hub has a fault (status 503)"),
        (429, "the hub is busy (status 429)"),
        (0, "no connection to the hub, or it broke"),
    ],
)
def test_one_failure_while_headers_are_checked_does_not_end_a_pull(
    hub: FakeHub, tmp_path: Path, fault: int, reason: str
) -> None:
    paused, events = list[float](), list[PullProgress]()
    if fault:
        hub.failing, hub.failing_after = {FIRST: [fault], BIG: [fault, fault]}, 0
    else:
        hub.cuts = {FIRST: [10], BIG: [100, 0]}
    pull(hub, tmp_path / "store", events=events, pauses=virtual_pauses(paused))
    assert ModelStore(tmp_path / "store").resolve(REPO).whole
    assert sorted(paused) == [2.0, 2.0, 4.0]
    assert any(f"{reason}; asking again in 2 s" in event.note for event in events)


@pytest.mark.parametrize(
    ("status", "headers", "pause_s"),
    [
        (429, {"Retry-After": "55"}, 55.0),
        (503, {"Retry-After": "999999999999"}, 300.0),
        (429, {"RateLimit": '"resolvers";r=0;t=120'}, 120.0),
        (503, {"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, 2.0),
        (503, {"Retry-After": "soon"}, 2.0),
    ],
)
def test_the_hub_says_when_it_wants_to_be_asked_again(
    hub: FakeHub, tmp_path: Path, status: int, headers: dict[str, str], pause_s: float
) -> None:
    paused: list[float] = []
    hub.failing, hub.refusal = {BIG: [status]}, headers
    pull(hub, tmp_path / "store", pauses=virtual_pauses(paused))
    assert paused == [pause_s]


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        (b"<html>Log in</html>", "the hub's answer is no JSON: is there a login page on this network?"),
        (b"[]", "is there a login page on this network?"),
        (b'{"siblings": [{}]}', "is there a login page on this network?"),
        (b'{"error": "log in"}', "is there a login page on this network?"),
        (b"\xff\xfe", "the hub's answer is no JSON"),
    ],
)
def test_a_login_page_instead_of_the_hub_is_named(hub: FakeHub, tmp_path: Path, answer: bytes, fact: str) -> None:
    hub.portal, hub.page = {""}, answer
    with pytest.raises(ModelDownloadFailed) as caught:
        pull(hub, tmp_path / "store")
    assert fact in caught.value.fact
    assert "open any web page in a browser" in caught.value.next_step
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("status", "headers", "step"),
    [
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "hf auth login"),
        (403, {}, "hf auth whoami"),
        (429, {"RateLimit": '"api";r=0;t=55'}, "wait five minutes"),
        (503, {}, "the hub has a fault"),
        (511, {}, "open any web page in a browser"),
    ],
)
def test_a_refusal_of_the_hub_says_what_helps(
    hub: FakeHub, tmp_path: Path, status: int, headers: dict[str, str], step: str
) -> None:
    hub.failing, hub.refusal = {"": [status]}, headers
    with pytest.raises(ModelDownloadFailed) as caught:
        pull(hub, tmp_path / "store")
    assert step in caught.value.next_step
    assert str(status) in caught.value.fact
    assert hub.failing == {"": []}, "a hub that cannot be asked at all is not asked again"


def test_a_disk_that_fills_up_in_a_pull_is_not_taken_for_the_network(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("edgepipe.store.hub_part.PartFile.add", full)  # no test can fill a disk
    with pytest.raises(ModelDownloadFailed) as caught:
        pull(hub, tmp_path / "store")
    assert caught.value.fact == "the disk is full"


def test_a_repository_that_is_not_there(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ModelUnknown, match="hub has no model"):
        pull(hub, tmp_path / "store", "org/other")


def test_a_hub_out_of_reach_is_told_in_three_lines(tmp_path: Path) -> None:
    hub = FakeHub(repo=REPO, files={}, endpoint="http://127.0.0.1:9")
    with pytest.raises(ModelDownloadFailed) as caught:
        pull(hub, tmp_path / "store")
    assert len(caught.value.lines()) == 3
    assert not (tmp_path / "store").exists()


def gguf_repository(folder: Path, *names: str) -> dict[str, bytes]:
    config = hf_config(hf_values())
    data = write_gguf(folder / "x.gguf", random_tensors(config), config).read_bytes()
    return dict.fromkeys(names, data)


def test_a_list_that_never_ends_is_given_up(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte of it comes in time."""

    def endless() -> dict[str, Any]:
        hub.ended.wait()
        return {}

    monkeypatch.setattr("edgepipe.store.hub._LISTING_S", 0.05)
    monkeypatch.setattr("edgepipe.store.hub.CONTACT_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(hub, "listing", endless)
    with pytest.raises(ModelDownloadFailed) as refused:
        list_hub(HubSource(repo=REPO), endpoint=hub.endpoint)
    assert refused.value.fact == "no answer came in time"


def test_one_gguf_of_several_is_chosen_by_its_type(tmp_path: Path) -> None:
    files = gguf_repository(tmp_path, "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "mmproj-F16.gguf")
    with running(FakeHub(repo=REPO, files=files)) as hub:
        with pytest.raises(ModelInvalid, match="several GGUF files") as several:
            pull(hub, tmp_path / "store")
        assert several.value.next_step == f"edgepipe models pull {REPO}:Q4_K_M"
        with pytest.raises(ModelInvalid, match="no file of the type 'IQ1'"):
            pull(hub, tmp_path / "store", f"{REPO}:IQ1")
        result = pull(hub, tmp_path / "store", f"{REPO}:q8_0")
        assert pull(hub, tmp_path / "store", f"{REPO}:Q8_0").already_here
    assert (result.path / "model.gguf").is_file()
    store = ModelStore(tmp_path / "store")
    assert store.resolve(f"{REPO}:Q8_0").config.num_layers == 3
    assert store.meant(REPO) == store.meant("tiny") == f"{REPO}:q8_0"
    assert {name for name, _ in hub.asked} == {"tiny-Q8_0.gguf"}
    assert store.rm("tiny:q8_0") > 0


def test_a_type_in_parts_is_pulled_and_opened_as_one_model(tmp_path: Path) -> None:
    config = hf_config(hf_values())
    parts = write_split_gguf(tmp_path, config, stem="tiny-F32", tokens=TOKENS + ["x"] * (300 - len(TOKENS)))
    files = {f"F32/{path.name}": path.read_bytes() for path in parts}
    with running(FakeHub(repo=REPO, files=files, lfs_from=0)) as hub:
        result = pull(hub, tmp_path / "store")
    assert result.model_id == f"{REPO}:f32"
    names = {path.name for path in result.path.iterdir()}
    assert names == {"edgepipe.json", "manifest.json", "tokenizer.json", TRAITS_FILE} | {
        f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    }
    weights = ModelStore(tmp_path / "store").resolve(f"{REPO}:F32").open_weights()
    for name, tensor in random_tensors(config).items():
        assert np.array_equal(weights.read(name).data.view("<f4"), tensor.reshape(-1))


@pytest.mark.parametrize("family", ["gemma4", "gemma4_moe", "phi3", "llama"])
def test_a_family_whose_rope_is_in_tensors_passes_the_check_of_headers(tmp_path: Path, family: str) -> None:
    path = write_family_gguf(tmp_path / "tiny-F32.gguf", family)
    with running(FakeHub(repo=REPO, files={path.name: path.read_bytes()}, lfs_from=0)) as hub:
        pull(hub, tmp_path / "store")
    assert ModelStore(tmp_path / "store").resolve(f"{REPO}:f32").config == open_weights(path).config


@pytest.mark.parametrize("case", ["type", "architecture", "tokenizer", "missing part", "other model"])
def test_what_cannot_be_read_is_refused_after_its_header(tmp_path: Path, case: str) -> None:
    config = hf_config(hf_values())
    tensors = random_tensors(config)
    good = write_gguf(tmp_path / "good.gguf", tensors, config).read_bytes()
    files, says, step = {"tiny-Q4_K_M.gguf": good}, "", ""
    if case == "type":
        withdrawn = gguf_row("token_embd.weight", (32,), 32, 0)
        files["tiny-Q4_0_4_8.gguf"] = gguf_bytes(rows=(withdrawn,), data=bytes(1 << 20))
        says, step = "the format Q4_0_4_8, which is not read", f"edgepipe models pull {REPO}:Q4_K_M"
    elif case == "architecture":
        path = write_gguf(tmp_path / "x.gguf", tensors, config, architecture="mamba")
        files["tiny-Q4_0_4_8.gguf"] = path.read_bytes()
        says = "GGUF mamba"
    elif case == "tokenizer":
        path = write_gguf(tmp_path / "x.gguf", tensors, config, tokens=TOKENS)
        files["tiny-Q4_0_4_8.gguf"] = path.read_bytes().replace(b"gpt-2", b"gpt-9")
        says = "pre-tokenizer 'gpt-9'"
    else:
        stem = "tiny-Q4_0_4_8"
        parts = {path.name: path.read_bytes() for path in write_split_gguf(tmp_path, config, stem=stem)}
        second = f"{stem}-00002-of-00003.gguf"
        if case == "missing part":
            del parts[second]
            says, step = "lacks parts", f"edgepipe models pull {REPO}:Q4_K_M"
        else:
            parts[second] = parts[f"{stem}-00003-of-00003.gguf"]
            says = "contradicts its name"
        files |= parts
    with running(FakeHub(repo=REPO, files=files)) as hub:
        with pytest.raises(ModelInvalid, match=says) as caught:
            pull(hub, tmp_path / "store", f"{REPO}:Q4_0_4_8")
    asked = [name for name, _ in hub.asked]
    assert len(asked) == len(set(asked)), "each file at most once, for its header"
    assert step in caught.value.next_step
    assert list((tmp_path / "store").glob("*")) == []


def test_an_unreadable_format_is_refused_with_a_type_that_works(tmp_path: Path) -> None:
    files = repository(tmp_path / "source")
    files["config.json"] = json.dumps(hf_values(quantization_config={"quant_method": "quip"})).encode()
    files |= dict.fromkeys(("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"), b"GGUF")
    with running(FakeHub(repo=REPO, files=files)) as hub, pytest.raises(ModelInvalid, match="quip") as caught:
        pull(hub, tmp_path / "store")
    assert caught.value.next_step == f"edgepipe models pull {REPO}:Q4_K_M"
    assert {name for name, _ in hub.asked} == {"config.json", "model.safetensors.index.json"}


@pytest.mark.parametrize("says", ["nothing", "another format"])
def test_tensors_that_contradict_the_config_are_refused_before_they_come(tmp_path: Path, says: str) -> None:
    write_quantised_folder(tmp_path, "fp8-block")
    config = json.loads((tmp_path / "config.json").read_text())
    claim = None if says == "nothing" else {"quant_method": "awq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": claim}))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()} | {"tiny-Q8_0.gguf": b"GGUF"}
    match = "does not say how" if says == "nothing" else "contradict the model's config"
    with running(FakeHub(repo=REPO, files=files)) as hub, pytest.raises(ModelInvalid, match=match) as caught:
        pull(hub, tmp_path / "store")
    assert caught.value.next_step == f"edgepipe models pull {REPO}:Q8_0"
    assert [name for name, _ in hub.asked] == ["config.json", "model.safetensors"], "its header alone"
    assert list((tmp_path / "store").iterdir()) == []


def test_an_unreadable_format_without_another_type_is_refused_with_the_original(tmp_path: Path) -> None:
    files = repository(tmp_path / "source")
    files["config.json"] = json.dumps(hf_values(quantization_config={"quant_method": "quip"})).encode()
    tags = ["gguf", "base_model:org/Finetuned", "base_model:quantized:org/Original", "base_model:quantized:../x"]
    with running(FakeHub(repo=REPO, files=files, tags=tags)) as hub, pytest.raises(ModelInvalid) as caught:
        pull(hub, tmp_path / "store")
    assert caught.value.next_step == "edgepipe models pull org/Original"


@pytest.mark.parametrize(
    ("files", "source", "fact", "step"),
    [
        (("model.safetensors",), f"{REPO}:Q4_K_M", "only GGUF files have such types", f"edgepipe models pull {REPO}"),
        (("pytorch_model.bin",), REPO, "'pytorch_model.bin' could run code", "choose a repository with safetensors"),
        (("README.md",), f"{REPO}:q8_0", "neither model.safetensors nor a GGUF", "choose a repository with"),
    ],
)
def test_a_repository_without_a_usable_file_says_what_it_has(
    tmp_path: Path, files: tuple[str, ...], source: str, fact: str, step: str
) -> None:
    with running(FakeHub(repo=REPO, files=dict.fromkeys(("config.json", *files), b"{}"))) as hub:
        with pytest.raises(ModelInvalid) as caught:
            pull(hub, tmp_path / "store", source)
        assert hub.asked == []
    assert fact in caught.value.fact
    assert caught.value.next_step.startswith(step)


def test_the_hubs_library_prints_nothing(hub: FakeHub, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pull(hub, tmp_path / "store")
    assert capfd.readouterr() == ("", "")


def test_a_local_source_that_is_no_model_names_the_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "gguf"
    folder.mkdir()
    parts = [folder / f"x-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")
    for source, fact, step in (
        ("gguf", "a folder of GGUF files", "edgepipe models pull gguf/x-00001-of-00002.gguf"),
        ("gguf:q4_k_m", "not with 'gguf'", "edgepipe models pull gguf"),
        ("demo:q4_k_m", "not with 'demo'", "edgepipe models pull demo"),
    ):
        with pytest.raises(ModelUnknown, match="is not a model source") as caught:
            Puller(tmp_path / "store").pull(source, lambda _: None, dry_run=False)
        assert fact in caught.value.fact
        assert caught.value.next_step == step


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("org/name", ("org/name", "", "main")),
        ("hf:org/name@v1.0", ("org/name", "", "v1.0")),
        ("org/name:Q4_K_M@refs/pr/1", ("org/name", "Q4_K_M", "refs/pr/1")),
        ("https://huggingface.co/org/name", ("org/name", "", "main")),
    ],
)
def test_sources(text: str, parts: tuple[str, str, str]) -> None:
    source = hub_source(text)
    assert source is not None
    assert (source.repo, source.type, source.revision) == parts


@pytest.mark.parametrize(
    "text", ["name", "a/b/c", "../x", "/a/b", "org/na me", "org/", "http://evil/a/b", "file:///a/b"]
)
def test_no_sources(text: str) -> None:
    with pytest.raises(ModelUnknown):
        Puller(Path("store")).pull(text, lambda _: None, dry_run=True)
