"""A stored model's files may be the user's own: whatever writes them in place is found before their bytes are used."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgepipe.backend.types import StageSettings
from edgepipe.clock import Clock
from edgepipe.errors import ModelDownloadFailed, ModelInvalid
from edgepipe.files.cloning import clone
from edgepipe.files.disk import free_bytes
from edgepipe.files.progress import PullProgress
from edgepipe.spec.config import hf_config
from edgepipe.store import pull, taking
from edgepipe.store.linked_files import LINKS_FILE
from edgepipe.store.quantise import quantise_model
from edgepipe.store.store import ModelStore, StoredModel
from edgepipe.system import SystemClock
from edgepipe.wire.children import PrepareProgress
from edgepipe.workers import stage as stage_worker
from tests.support.models.files import TOKENS, hf_values, names, random_tensors, source_folder, write_gguf


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """A store on a disk that cannot clone files, as ext4."""
    monkeypatch.setattr(taking, "clone", lambda _path, _place: False)
    return ModelStore(tmp_path / "store")


@pytest.fixture
def weights_file(tmp_path: Path) -> Path:
    """A user's GGUF file."""
    config = hf_config(hf_values(vocab_size=len(TOKENS)))
    return write_gguf(tmp_path / "tiny.gguf", random_tensors(config), config, scheme="Q8_0", tokens=TOKENS)


def rewrite(path: Path) -> None:
    """Change the last bytes in place."""
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\xff" * 64)


def rewrite_with_old_time(path: Path) -> None:
    """As a tool that restores the time of the last change."""
    before = path.stat()
    rewrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def compared_bytes(model: StoredModel) -> int:
    """Check the model; return how many bytes were compared with the manifest."""
    found = [0]
    model.check_unchanged(lambda done, _total: found.append(done))
    return max(found)


@pytest.mark.parametrize("change", [rewrite, rewrite_with_old_time])
def test_a_file_that_was_written_in_place_is_not_computed_with(
    change: Callable[[Path], None], store: ModelStore, weights_file: Path
) -> None:
    store.pull(str(weights_file))
    model = store.resolve("tiny")
    model.check_unchanged()
    change(weights_file)
    for _ in "12":
        with pytest.raises(ModelInvalid, match="changed since it was pulled") as found:
            model.check_unchanged()
        assert found.value.next_step == f"pull it again: edgepipe models pull {weights_file}"


def test_weights_of_a_folder_are_checked_too(store: ModelStore, tmp_path: Path) -> None:
    folder = source_folder(tmp_path)
    store.pull(str(folder))
    rewrite(folder / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelInvalid, match="model-00002-of-00002"):
        store.resolve("My-Model").check_unchanged()
    (folder / "config.json").write_text("{}")  # a copy is in the store


def _remove(path: Path) -> None:
    path.unlink()


def _touch(path: Path) -> None:
    path.touch()


def _move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


@pytest.mark.parametrize("change", [_remove, _touch, _move])
def test_a_file_with_the_same_bytes_is_compared_once(
    change: Callable[[Path], None], store: ModelStore, weights_file: Path
) -> None:
    store.pull(str(weights_file))
    model = store.resolve("tiny")
    num_bytes = weights_file.stat().st_size
    assert compared_bytes(model) == 0
    change(weights_file)
    assert [compared_bytes(model) for _ in "12"] == [num_bytes, 0]


def test_a_model_that_changed_is_pulled_again(store: ModelStore, weights_file: Path) -> None:
    first = store.pull(str(weights_file))
    rewrite(weights_file)
    former = StoredModel("tiny", first.path).manifest_hash
    assert not store.pull(str(weights_file), dry_run=True).already_here
    assert StoredModel("tiny", first.path).manifest_hash == former
    assert not store.pull(str(weights_file)).already_here
    model = store.resolve("tiny")
    assert model.manifest_hash != former
    assert compared_bytes(model) == 0
    assert store.pull(str(weights_file)).already_here


def test_linked_files_of_an_earlier_version_are_compared_once(store: ModelStore, weights_file: Path) -> None:
    path = store.pull(str(weights_file)).path
    (path / LINKS_FILE).unlink()
    model = store.resolve("tiny")
    assert [compared_bytes(model) for _ in "12"] == [weights_file.stat().st_size, 0]
    (path / LINKS_FILE).unlink()
    rewrite(weights_file)
    with pytest.raises(ModelInvalid, match="changed"):
        model.check_unchanged()


@pytest.mark.parametrize("text", ["", "[]", '{"files": {"model.gguf": {"num_bytes": "1"}}}', "{" * 10_000])
def test_a_damaged_record_only_costs_time(text: str, store: ModelStore, weights_file: Path) -> None:
    path = store.pull(str(weights_file)).path
    (path / LINKS_FILE).write_text(text)
    assert [compared_bytes(store.resolve("tiny")) for _ in "12"] == [weights_file.stat().st_size, 0]


def test_a_file_that_is_written_while_it_is_pulled_leaves_no_model(
    store: ModelStore, weights_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = pull.install

    def slow(folder: Path, **options: Any) -> Any:
        made = install(folder, **options)
        rewrite(weights_file)
        return made

    monkeypatch.setattr(pull, "install", slow)
    with pytest.raises(ModelInvalid, match="changed since it was pulled"):
        store.pull(str(weights_file))
    assert names(store.root) == set()


def test_a_clone_is_the_store_s_own(store: ModelStore, weights_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking, "clone", lambda path, place: bool(shutil.copyfile(path, place)))
    path = store.pull(str(weights_file)).path
    rewrite(weights_file)
    assert compared_bytes(store.resolve("tiny")) == 0
    assert LINKS_FILE not in names(path)


def test_a_disk_clones_a_file_or_leaves_nothing(tmp_path: Path, weights_file: Path) -> None:
    place, before = tmp_path / "clone", weights_file.read_bytes()
    made = clone(weights_file, place)
    assert made == place.exists()
    rewrite(weights_file)
    assert not made or place.read_bytes() == before


def test_files_of_another_disk_are_copied_if_there_is_room(
    store: ModelStore, weights_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking, "hard_link", lambda _path, _place: False)
    free = free_bytes(store.root)
    monkeypatch.setattr("edgepipe.files.disk.free_bytes", lambda _root: 1000)
    with pytest.raises(ModelDownloadFailed, match="does not fit on the disk"):
        store.pull(str(weights_file))
    assert names(store.root) == set()
    monkeypatch.setattr("edgepipe.files.disk.free_bytes", lambda _root: free)
    events: list[PullProgress] = []
    store.pull(str(weights_file), on_progress=events.append)
    rewrite(weights_file)
    assert compared_bytes(store.resolve("tiny")) == 0
    assert {each.total_bytes for each in events if each.phase == "copy"} == {weights_file.stat().st_size}


def test_a_name_in_common_takes_no_room(store: ModelStore, weights_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgepipe.files.disk.free_bytes", lambda _root: 1000)
    assert not store.pull(str(weights_file)).already_here


def test_peers_get_tensors_that_are_unchanged_and_no_others(
    store: ModelStore, weights_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.pull(str(weights_file))
    model = store.resolve("tiny")
    read: list[str] = []
    read_tensor = StoredModel.read_tensor
    monkeypatch.setattr(
        StoredModel, "read_tensor", lambda self, name, **given: read.append(name) or read_tensor(self, name, **given)
    )
    tensors = [entry.info.name for entry in model.manifest.tensors]
    for name in tensors:
        model.check_tensor(name)
    assert read == []
    rewrite(weights_file)
    refused = [name for name in tensors * 2 if not _sent(model, name)]
    assert len(refused) == 2
    assert len(set(refused)) == 1
    assert sorted(read) == sorted([*tensors, refused[0]])


def _sent(model: StoredModel, name: str) -> bool:
    try:
        model.check_tensor(name)
    except ModelInvalid:
        return False
    return True


def test_a_packed_copy_of_changed_weights_is_not_made(store: ModelStore, tmp_path: Path) -> None:
    folder = source_folder(tmp_path)
    store.pull(str(folder))
    rewrite(folder / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelInvalid, match="changed since it was pulled"):
        quantise_model(store, "My-Model", "q8")
    assert names(store.root) == {"My-Model"}


class Link:
    """A stage's daemon, which notes what it hears."""

    def __init__(self) -> None:
        self.reports: list[Any] = []

    def report(self, report: Any) -> None:
        self.reports.append(report)


class Loading:
    """A stage that opens its weights and then calls a function, as on a compute thread."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile

    async def load(self, *, open_weights: Callable[[], Any], **_: Any) -> Any:
        def work() -> None:
            assert threading.current_thread() is not threading.main_thread()
            open_weights()
            self._meanwhile()

        await asyncio.to_thread(work)
        return SimpleNamespace(weight_bytes=1, kv_block_bytes=1, window_block_bytes=(), products=(), slow_paths=())


async def load(path: Path, link: Link, meanwhile: Callable[[], None]) -> None:
    settings = StageSettings(context_length=64)
    command: Any = SimpleNamespace(placement=SimpleNamespace(slices=()), path=str(path), settings=settings)
    clock: Clock = SystemClock()
    stage: Any = Loading(meanwhile)
    await stage_worker._load(stage, link, command, None, clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
async def test_a_stage_does_not_load_weights_that_changed(moment: str, store: ModelStore, weights_file: Path) -> None:
    path, link = store.pull(str(weights_file)).path, Link()
    await load(path, link, lambda: None)
    assert len(link.reports) == 1
    if moment == "before":
        rewrite(weights_file)
    with pytest.raises(ModelInvalid, match="changed since it was pulled"):
        await load(path, link, lambda: rewrite(weights_file) if moment == "meanwhile" else None)


async def test_a_stage_that_compares_files_says_how_far_it_is(store: ModelStore, weights_file: Path) -> None:
    """A load that is silent for long counts as hung."""
    path, link = store.pull(str(weights_file)).path, Link()
    _touch(weights_file)
    await load(path, link, lambda: None)
    assert isinstance(link.reports[0], PrepareProgress)
    assert link.reports[0].bytes_total == os.stat(weights_file).st_size
