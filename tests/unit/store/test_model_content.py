"""The manifest's hash covers what prompts and answers mean, and peers cannot change that (R4, R5)."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.errors import ModelInvalid
from edgepipe.files.canonical import tokenizer_digest
from edgepipe.store.adoption import is_model_folder
from edgepipe.store.store import ModelStore, StoredModel
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights import manifest as manifest_module
from edgepipe.weights.card import ModelCard, read_card
from edgepipe.weights.manifest import CARD_FILE, TOKENIZER_FILE, FileEntry, Manifest
from tests.support.models.files import TOKENS, adopt, gguf_text, metadata_of, names, source_folder
from tests.support.models.specs import first_rope, with_attention

Values = dict[str, Any]


@pytest.fixture(scope="module")
def giver(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    folder = tmp_path_factory.mktemp("giver")
    ModelStore(folder / "store").pull(str(source_folder(folder)))
    return ModelStore(folder / "store").resolve("My-Model")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """A model without a tokenizer, which is taken in without a process that tries it."""
    folder = tmp_path_factory.mktemp("bare")
    ModelStore(folder / "store").pull(str(source_folder(folder, tokenizer=False)))
    return ModelStore(folder / "store").resolve("My-Model")


@pytest.fixture
def taker(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "other")


@pytest.fixture(scope="module")
def spelled(giver: StoredModel) -> Values:
    """A tokenizer that has every part, as this version of the library spells it."""
    values = json.loads((giver.path / TOKENIZER_FILE).read_text())
    values["model"]["merges"] = [["a", "b"], ["c", "d"], ["#version:", "1"]]
    return values


def digest(values: object, folder: Path) -> str:
    path = folder / TOKENIZER_FILE
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return tokenizer_digest(path)


def older(values: Values) -> Values:
    """As a library before 0.20 spells it."""
    spelled = copy.deepcopy(values)
    spelled["model"]["merges"] = [" ".join(merge) for merge in values["model"]["merges"]]
    return spelled


def shuffled(value: object, draw: Callable[[st.SearchStrategy[Any]], Any]) -> object:
    """The same values with other orders of keys and more fields that are null."""
    if isinstance(value, list):
        return [shuffled(item, draw) for item in value]
    if not isinstance(value, dict):
        return value
    keys = draw(st.permutations(list(value)))
    nulls = {"dropout2": None} if draw(st.booleans()) and not {"a", "b"} <= set(value) else {}
    return {**{key: shuffled(value[key], draw) for key in keys}, **nulls}


def leaves(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every value that is no list, object or null."""
    if isinstance(value, Mapping):
        return [way for key, item in value.items() for way in leaves(item, (*path, key))]
    if isinstance(value, list):
        return [way for index, item in enumerate(value) for way in leaves(item, (*path, index))]
    return [path] if value is not None else []


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_one_tokenizer_has_one_digest_however_it_is_spelled(
    data: st.DataObject, spelled: Values, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    spelled = {**spelled, "model": {**spelled["model"], "merges": [["a", "b"], ["c", "d"]]}}
    again = shuffled(older(spelled) if data.draw(st.booleans()) else spelled, data.draw)
    indent = data.draw(st.sampled_from([None, 1]))
    ascii_only = data.draw(st.booleans())
    assert digest(json.dumps(again, indent=indent, ensure_ascii=ascii_only), folder) == digest(spelled, folder)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_every_value_of_a_tokenizer_counts(
    data: st.DataObject, spelled: Values, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    changed = copy.deepcopy(spelled)
    *way, last = data.draw(st.sampled_from(leaves(spelled)))
    place: Any = changed
    for key in way:
        place = place[key]
    old = place[last]
    if isinstance(old, bool):
        place[last] = not old
    elif isinstance(old, int):
        place[last] = old + data.draw(st.integers(min_value=1))
    else:
        place[last] = data.draw(st.text().filter(lambda text: text != old))
    assert digest(changed, folder) != digest(spelled, folder)


def test_what_a_library_may_read_differently_is_not_taken_for_the_same(spelled: Values, tmp_path: Path) -> None:
    """A line of a version within old merges is skipped by the library, the pair is a merge."""
    assert digest(older(spelled), tmp_path) != digest(spelled, tmp_path)
    reversed_merges = {**spelled, "model": {**spelled["model"], "merges": spelled["model"]["merges"][::-1]}}
    assert digest(reversed_merges, tmp_path) != digest(spelled, tmp_path)
    for bad in ('{"model": {}, "model": {}}', '{"a": 1e999}', '{"a": NaN}', "[" * 100_000, "[]", "{"):
        with pytest.raises(ModelInvalid):
            digest(bad, tmp_path)


def changed_card(card: ModelCard) -> list[ModelCard]:
    """Cards that change what a prompt or an answer means."""
    stretched = replace(first_rope(card.config), factor=2.0)
    return [
        replace(card, template=replace(card.template, sources={"default": "evil"})),
        replace(card, template=replace(card.template, sources={**card.template.sources, "tool_use": "evil"})),
        replace(card, template=replace(card.template, special_tokens={"eos_token": "a"})),
        replace(card, config=replace(card.config, eos_token_ids=(4,))),
        replace(card, config=replace(card.config, bos_token_id=None)),
        replace(card, config=replace(card.config, context_length=64)),
        replace(card, config=with_attention(card.config, rope=stretched)),
        replace(card, sampling={"temperature": 0.6}),
    ]


def test_a_card_counts_by_what_it_says(giver: StoredModel, tmp_path: Path) -> None:
    """A version that knew fewer fields, which have their defaults here, wrote the same card."""
    values = json.loads((giver.path / CARD_FILE).read_text())
    for key in ("logit_scale", "logit_softcap", "naming"):
        del values["config"][key]
    del values["sampling"]
    (tmp_path / CARD_FILE).write_text(json.dumps(values))
    assert read_card(tmp_path).digest == giver.card.digest
    digests = {card.digest for card in changed_card(giver.card)}
    assert len(digests) == 8
    assert giver.card.digest not in digests


def forged(manifest: Manifest, metadata: Mapping[str, bytes]) -> Manifest:
    """The genuine hash over other files: a peer chooses what the hash does not cover."""
    files = [
        replace(file, num_bytes=len(metadata[file.name]), sha256=hashlib.sha256(metadata[file.name]).hexdigest())
        if file.metadata
        else file
        for file in manifest.files
    ]
    return replace(manifest, files=tuple(files))


def other_tokenizer() -> dict[str, object]:
    """The same ids for other texts."""
    swapped = [*TOKENS[:3], *reversed(TOKENS[3:-1]), TOKENS[-1]]
    return {**gguf_text(), "tokenizer.ggml.tokens": swapped}


@pytest.mark.parametrize("kind", ["tokenizer", "template", "ends"])
def test_r4_another_meaning_under_the_genuine_hash_is_refused(
    kind: str, giver: StoredModel, bare: StoredModel, taker: ModelStore, tmp_path: Path
) -> None:
    giver = giver if kind == "tokenizer" else bare
    metadata = metadata_of(giver)
    if kind == "tokenizer":
        Tokenizer.from_gguf(other_tokenizer()).save(tmp_path / TOKENIZER_FILE)
        metadata[TOKENIZER_FILE] = (tmp_path / TOKENIZER_FILE).read_bytes()
    else:
        metadata[CARD_FILE] = changed_card(giver.card)[0 if kind == "template" else 3].to_json()
    manifest = Manifest.from_json(forged(giver.manifest, metadata).to_json())
    assert manifest.hash == giver.manifest_hash
    with pytest.raises(ModelInvalid, match="does not match the model's hash"):
        adopt(taker, manifest, metadata)
    assert names(taker.root) == set()


def test_the_files_that_are_there_count(giver: StoredModel, taker: ModelStore) -> None:
    without = replace(giver.manifest, files=tuple(file for file in giver.manifest.files if file.name != TOKENIZER_FILE))
    assert without.hash != giver.manifest_hash
    bare = replace(without, files=())
    with pytest.raises(ModelInvalid, match="the peer's model has no"):
        adopt(taker, bare, {})
    emulated = replace(giver.card, emulated=True)
    lists = forged(without, {CARD_FILE: emulated.to_json()})
    with pytest.raises(ModelInvalid, match="contradict"):
        adopt(taker, lists, {CARD_FILE: emulated.to_json()})


def test_a_tokenizer_that_another_version_of_the_library_wrote_is_the_same_model(
    giver: StoredModel, taker: ModelStore
) -> None:
    metadata = metadata_of(giver)
    metadata[TOKENIZER_FILE] = json.dumps(older(json.loads(metadata[TOKENIZER_FILE])), indent=2).encode()
    adopted = adopt(taker, forged(giver.manifest, metadata), metadata)
    assert adopted.manifest_hash == giver.manifest_hash
    assert adopted.tokenizer().encode("ab") == [12]


@pytest.mark.parametrize("change", [b"", b"x", b"x" * 100_000])
def test_r5_a_file_of_another_length_is_refused(change: bytes, giver: StoredModel, taker: ModelStore) -> None:
    (card, *_) = giver.manifest.metadata_files
    with taker.adoption(giver.manifest) as adoption, adoption.open(card) as sink:
        if not change:
            sink.write(b"x" * (card.num_bytes - 1))
            with pytest.raises(ModelInvalid, match="arrived damaged"):
                sink.finish()
            return
        sink.write(b"x" * card.num_bytes)
        with pytest.raises(ModelInvalid, match="more than the promised"):
            sink.write(change)
        (staging,) = taker.root.iterdir()
        assert (staging / card.name).stat().st_size == card.num_bytes, "what is too much is not written"
    assert names(taker.root) == set()


def entries(count: int, *, metadata: bool) -> tuple[FileEntry, ...]:
    return tuple(
        FileEntry(name=f"f{i}", num_bytes=64 << 20, sha256="0" * 64, metadata=metadata, content="0" * 64 * metadata)
        for i in range(count)
    )


def test_r5_a_manifest_has_bounds(giver: StoredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for files in (entries(1, metadata=True), entries(4096, metadata=True), entries(4097, metadata=False)):
        with pytest.raises(ModelInvalid):
            Manifest.from_json(replace(giver.manifest, files=files).to_json())
    monkeypatch.setattr(manifest_module, "MAX_TENSORS", len(giver.manifest.tensors))  # the real limit makes a slow test
    assert Manifest.from_json(giver.manifest.to_json()) == giver.manifest
    monkeypatch.setattr(
        manifest_module, "MAX_TENSORS", len(giver.manifest.tensors) - 1
    )  # the real limit makes a slow test
    with pytest.raises(ModelInvalid, match="are read"):
        Manifest.from_json(giver.manifest.to_json())
    monkeypatch.undo()
    (card, *_) = giver.manifest.metadata_files
    for bad in (replace(card, num_bytes=17 << 20), replace(card, content="x"), replace(card, content="")):
        with pytest.raises(ModelInvalid):
            Manifest.from_json(replace(giver.manifest, files=(bad,)).to_json())


def test_what_killed_processes_left_goes_with_the_next_adoption(bare: StoredModel, taker: ModelStore) -> None:
    for name, age_s in ((".adopting-x-1", 7200), (".adopting-x-2", 60), (".pulling-x", 7200)):
        (taker.root / name).mkdir(parents=True)
        changed_s = time.time() - age_s
        os.utime(taker.root / name, (changed_s, changed_s))
    half = taker.adoption(bare.manifest)._folder  # pyright: ignore[reportPrivateUsage]
    half.mkdir()
    (half / "manifest.json").write_text("{")
    adopt(taker, bare.manifest, metadata_of(bare))
    assert names(taker.root) == {".adopting-x-2", ".pulling-x", half.name}
    assert is_model_folder(half)


@pytest.mark.parametrize("damaged", ["manifest.json", CARD_FILE])
def test_metadata_that_a_power_cut_damaged_is_fetched_again_and_its_tensors_stay(
    damaged: str, bare: StoredModel, taker: ModelStore
) -> None:
    part, name = adopt(taker, bare.manifest, metadata_of(bare)), "model.norm.weight"
    with part.writer().open(name) as sink:
        sink.write(bare.read_tensor(name).tobytes())
        assert sink.finish()
    (part.path / damaged).write_bytes(b"")
    assert taker.find(bare.id, bare.manifest_hash) is None
    assert adopt(taker, bare.manifest, metadata_of(bare)).held_tensors() == [name]
    assert names(taker.root) == {part.path.name}


def test_a_whole_model_is_found_beside_a_damaged_copy_of_it(giver: StoredModel, taker: ModelStore) -> None:
    whole, copied = taker.root / giver.path.name, taker.root / f"{giver.path.name}@0123456789ab"
    for path in (whole, copied):
        shutil.copytree(giver.path, path)
    (copied / "manifest.json").write_bytes(b"")
    found = taker.find(giver.id, giver.manifest_hash)
    assert found is not None
    assert found.path == whole


def test_adopted_metadata_is_on_the_disk_before_its_folder_appears(
    bare: StoredModel, taker: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut leaves a folder of empty files under the model's name."""
    fsync, flushed = os.fsync, set[int]()

    def note(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    made = adopt(taker, bare.manifest, metadata_of(bare)).path
    assert {path.stat().st_ino for path in made.iterdir() if path.is_file()} <= flushed
