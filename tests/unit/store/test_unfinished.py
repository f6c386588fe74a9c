"""What killed pulls and copies leave on the disk: listed, removed, and counted only where a pull continues it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgepipe.errors import ModelDownloadFailed
from edgepipe.store.pull import Puller
from edgepipe.store.store import ModelStore
from edgepipe.store.unfinished import exclusive_staging
from tests.support.models.fake_hub import FakeHub, running, virtual_pauses
from tests.support.models.files import write_hf_folder
from tests.support.models.killed_pulls import old_library_files

REPO = "org/tiny"
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    write_hf_folder(tmp_path / "source", shards=2)
    files = {path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()}
    with running(FakeHub(repo=REPO, files=files)) as served:
        yield served


def test_dead_parts_are_not_counted_as_fetched_and_are_removed(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    staging, needed = old_library_files(store), list[int]()
    (staging / FIRST).write_bytes(hub.files[FIRST])
    (staging / "model-00002-of-00002.safetensors.part").write_bytes(bytes(1000))  # of no known file
    monkeypatch.setattr("edgepipe.store.pull.check_room", lambda _model, _root, num_bytes: needed.append(num_bytes))
    result = Puller(store, endpoint=hub.endpoint, pauses=virtual_pauses([])).pull(REPO, lambda _: None, dry_run=False)
    assert needed == [result.total_bytes - len(hub.files[FIRST])]
    assert [path.name for path in store.iterdir()] == ["org--tiny"]
    assert not (result.path / ".cache").exists()


def test_a_pull_that_goes_on_is_not_removed(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store")
    staging = old_library_files(store.root)
    with exclusive_staging(staging, REPO):
        assert [pull.goes_on for pull in store.unended()] == [True]
        with pytest.raises(ModelDownloadFailed) as caught:
            store.rm(REPO)
    assert "stop that pull with ^C" in caught.value.next_step
    assert staging.exists()
    assert [pull.goes_on for pull in store.unended()] == [False]


def test_a_killed_copy_is_removed_by_the_next_start(tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    for name in (".quantising-tiny-q4", ".quantising-tiny-q8", ".removing-old"):
        (tmp_path / name / "tensors").mkdir(parents=True)
        (tmp_path / name / "tensors" / "x.bin").write_bytes(b"x")
    with exclusive_staging(tmp_path / ".quantising-tiny-q8", "tiny-q8"):
        store.tidy()
        assert [path.name for path in tmp_path.iterdir()] == [".quantising-tiny-q8"], "another process fills it"
    store.tidy()
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_folder_is_a_link_loses_the_link_alone(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "models")
    store.pull(str(write_hf_folder(tmp_path / "sources" / "tiny")))
    (store.root / "tiny").rename(tmp_path / "elsewhere")
    (store.root / "tiny").symlink_to(tmp_path / "elsewhere")
    assert store.rm("tiny") == 0
    assert list(store.root.iterdir()) == []
    assert (tmp_path / "elsewhere" / "edgepipe.json").is_file()
