"""Pulling from a hub: a fake one on loopback that breaks off, lies and is not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgepipe.errors import ArchitectureUnsupported, ModelDownloadFailed, ModelInvalid, ModelUnknown
from edgepipe.model import install
from edgepipe.model.config import hf_config
from edgepipe.model.hub import HubSource, parse_hub_source, parse_pinned
from edgepipe.model.progress import PullProgress
from edgepipe.model.pull import Puller, PullResult
from edgepipe.model.store import ModelStore
from tests.support.fake_hub import COMMIT, FakeHub, running
from tests.support.model_files import hf_values, random_tensors, write_gguf, write_hf_folder

REPO = "org/tiny"
BIG = "model-00002-of-00002.safetensors"


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
    told = options.pop("told", [])
    return Puller(root, endpoint=hub.endpoint).pull(source, told.append, dry_run=options.pop("dry_run", False))


def test_a_repository_is_pulled_without_what_is_no_data(hub: FakeHub, tmp_path: Path) -> None:
    told: list[PullProgress] = []
    result = pull(hub, tmp_path / "store", told=told)
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
    download = [progress for progress in told if progress.phase == "download"]
    assert download[-1].done_bytes == download[-1].total_bytes == result.total_bytes
    assert parse_pinned(model.manifest.source) == HubSource(repo=REPO, revision=COMMIT)


def test_a_repository_with_one_weight_file_is_pulled(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()}
    with running(FakeHub(repo=REPO, files=files)) as hub:
        pull(hub, tmp_path / "store")
    assert [name for name, _ in hub.asked] == ["config.json", "model.safetensors"]
    assert ModelStore(tmp_path / "store").resolve(REPO).whole


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
    hub.cut_after = {BIG: 5000}
    pull(hub, tmp_path / "store")
    assert len([name for name, _ in hub.asked if name == BIG]) == 2
    assert ModelStore(tmp_path / "store").resolve(REPO)


def test_what_came_before_a_failure_is_not_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.refused = {BIG}
    with pytest.raises(ModelDownloadFailed) as caught:
        pull(hub, tmp_path / "store")
    assert "the pull resumes" in caught.value.next_step
    assert ModelStore(tmp_path / "store").list() == []
    hub.refused, hub.asked = set(), []
    pull(hub, tmp_path / "store")
    assert [name for name, _ in hub.asked] == [BIG]


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


def test_one_gguf_of_several_is_chosen_by_a_part_of_its_name(tmp_path: Path) -> None:
    files = gguf_repository(tmp_path, "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")
    with running(FakeHub(repo=REPO, files=files)) as hub:
        with pytest.raises(ModelInvalid, match="several GGUF files"):
            pull(hub, tmp_path / "store")
        with pytest.raises(ModelInvalid, match="no usable weights"):
            pull(hub, tmp_path / "store", f"{REPO}:IQ1")
        result = pull(hub, tmp_path / "store", f"{REPO}:q8_0")
    assert (result.path / "model.gguf").is_file()
    assert ModelStore(tmp_path / "store").resolve(REPO).config.num_layers == 3
    assert {name for name, _ in hub.asked} == {"tiny-Q8_0.gguf"}


def test_a_gguf_in_parts_is_refused(tmp_path: Path) -> None:
    files = gguf_repository(tmp_path, "tiny-00001-of-00002.gguf")
    with running(FakeHub(repo=REPO, files=files)) as hub, pytest.raises(ModelInvalid):
        pull(hub, tmp_path / "store")


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
    source = parse_hub_source(text)
    assert source is not None
    assert (source.repo, source.pick, source.revision) == parts


@pytest.mark.parametrize(
    "text", ["name", "a/b/c", "../x", "/a/b", "org/na me", "org/", "http://evil/a/b", "file:///a/b"]
)
def test_no_sources(text: str) -> None:
    assert parse_hub_source(text) is None
