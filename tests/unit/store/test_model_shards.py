"""Parts of a model go from peer to peer: resumable, checked against the manifest (M20), given on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgepipe.errors import ModelInvalid, ModelUnknown
from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.store.store import ModelStore, StoredModel, tensor_names
from edgepipe.weights.manifest import Manifest
from tests.support.models.files import (
    TOKENS,
    adopt,
    hf_values,
    metadata_of,
    names,
    random_tensors,
    source_folder,
    write_gguf,
    write_tensor,
)

SLICES = make_slices([LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 3)], 3)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


@pytest.fixture
def giver(store: ModelStore, tmp_path: Path) -> StoredModel:
    store.pull(str(source_folder(tmp_path)))
    return store.resolve("My-Model")


@pytest.fixture
def taker(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "other")


def chunks(model: StoredModel, name: str, *, offset: int = 0, size: int = 1000) -> Iterator[bytes]:
    total = model.manifest.by_name[name].info.num_bytes
    for begin in range(offset, total, size):
        yield model.read_tensor(name, offset=begin, num_bytes=min(size, total - begin)).tobytes()


def test_a_node_serves_a_part_that_came_from_a_peer(giver: StoredModel, taker: ModelStore) -> None:
    manifest = Manifest.from_json(giver.manifest.to_json())
    part = adopt(taker, manifest, metadata_of(giver))
    writer = part.writer()
    missing = part.missing((SLICES[1],))
    assert [item.name for item in missing] == tensor_names(giver.config, (SLICES[1],))
    for item in missing:
        assert write_tensor(writer, item.name, chunks(giver, item.name))
    assert part.missing((SLICES[1],)) == []
    assert not part.whole
    assert sorted(part.held_tensors()) == sorted(item.name for item in missing)
    whole, shard = giver.open_weights(), part.open_weights()
    assert shard.config == whole.config
    for info in shard.tensors(SLICES[1]):
        assert (shard.read(info.name).data == whole.read(info.name).data).all()
    with pytest.raises(ModelInvalid, match="not on this node"):
        shard.read("model.norm.weight")
    assert part.tokenizer().encode("ab") == [12]


def test_a_copy_with_other_content_is_not_taken_for_it(giver: StoredModel, taker: ModelStore, tmp_path: Path) -> None:
    other = tmp_path / "changed"
    other.mkdir()
    taker.pull(str(source_folder(other, rms_norm_eps=1e-3)))
    assert taker.resolve("My-Model").manifest_hash != giver.manifest_hash
    assert taker.find("My-Model", giver.manifest_hash) is None
    with pytest.raises(ModelUnknown):
        taker.resolve("My-Model", manifest_hash=giver.manifest_hash)


def test_a_part_can_be_given_on(giver: StoredModel, taker: ModelStore, tmp_path: Path) -> None:
    writer = adopt(taker, giver.manifest, metadata_of(giver)).writer()
    name = "model.norm.weight"
    write_tensor(writer, name, chunks(giver, name))
    part = taker.resolve("My-Model")
    third = adopt(ModelStore(tmp_path / "third"), part.manifest, metadata_of(part)).writer()
    assert write_tensor(third, name, chunks(part, name))


def test_a_broken_transfer_goes_on_where_it_stopped(giver: StoredModel, taker: ModelStore) -> None:
    name = "model.embed_tokens.weight"
    writer = adopt(taker, giver.manifest, metadata_of(giver)).writer()
    first = next(chunks(giver, name))
    assert write_tensor(writer, name, [first]) is False
    again = taker.resolve("My-Model").writer()
    (missing,) = again.missing([name])
    assert missing.have_bytes == 1000
    assert write_tensor(again, name, chunks(giver, name, offset=1000), offset=1000)
    assert again.missing([name]) == []


def test_a_transfer_may_begin_again_at_the_start(giver: StoredModel, taker: ModelStore) -> None:
    name = "model.norm.weight"
    writer = adopt(taker, giver.manifest, metadata_of(giver)).writer()
    write_tensor(writer, name, [b"x" * 10])
    assert write_tensor(writer, name, chunks(giver, name))
    with writer.open("model.embed_tokens.weight") as sink, pytest.raises(ModelInvalid, match="cannot continue at byte"):
        sink.seek(5)


def parts_left(taker: ModelStore) -> list[Path]:
    return list(taker.root.rglob("*.part"))


def test_m20_damaged_tensors_are_refused_and_deleted(giver: StoredModel, taker: ModelStore) -> None:
    name = "model.norm.weight"
    writer = adopt(taker, giver.manifest, metadata_of(giver)).writer()
    good = giver.read_tensor(name).tobytes()
    for bad in (b"\0" * len(good), good + b"x", good * 2):
        with pytest.raises(ModelInvalid, match="arrived damaged"):
            write_tensor(writer, name, [bad[:64], bad[64:]])
        assert parts_left(taker) == []
        assert [item.name for item in writer.missing([name])] == [name]
    assert write_tensor(writer, name, [good])


def test_m20_damaged_metadata_is_refused(giver: StoredModel, taker: ModelStore) -> None:
    metadata = metadata_of(giver)
    tokenizer = metadata["tokenizer.json"]
    for bad in (tokenizer[:-1], tokenizer + b" ", tokenizer.replace(b"ab", b"ac")):
        with pytest.raises(ModelInvalid, match="arrived damaged"):
            adopt(taker, giver.manifest, {**metadata, "tokenizer.json": bad})
        assert names(taker.root) == set()


def test_a_manifest_that_contradicts_the_card_is_refused(giver: StoredModel, taker: ModelStore) -> None:
    short = replace(giver.manifest, tensors=giver.manifest.tensors[1:])
    with pytest.raises(ModelInvalid, match="contradict"):
        adopt(taker, short, metadata_of(giver))


def test_only_what_the_manifest_names_is_given(giver: StoredModel) -> None:
    for name in ("config.json", "../x", "/etc/passwd", "manifest.json"):
        with pytest.raises(ModelInvalid):
            giver.read_file(name, offset=0, num_bytes=1)
    with pytest.raises(ModelInvalid):
        giver.read_tensor("no.such.tensor")
    with pytest.raises(ModelInvalid):
        giver.read_tensor("model.norm.weight", offset=100, num_bytes=100)
    with pytest.raises(ModelInvalid):
        giver.read_tensor("model.norm.weight", offset=-1)


def test_the_hash_is_of_content_not_of_names(giver: StoredModel) -> None:
    renamed = replace(giver.manifest, model_id="other", source="elsewhere")
    assert renamed.hash == giver.manifest_hash
    first, *rest = giver.manifest.tensors
    changed = replace(giver.manifest, tensors=(replace(first, sha256="0" * 64), *rest))
    assert changed.hash != giver.manifest_hash


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../x"},
        {"name": "/x"},
        {"name": "a/b"},
        {"name": ""},
        {"scheme": "Q9"},
        {"shape": []},
        {"shape": [-1]},
        {"shape": [1 << 40, 1 << 40]},
        {"num_bytes": 1},
        {"sha256": "abc"},
        {"shape": "x"},
    ],
)
def test_a_peers_manifest_is_checked(change: dict[str, Any], giver: StoredModel) -> None:
    value = json.loads(giver.manifest.to_json())
    value["tensors"][0].update(change)
    with pytest.raises(ModelInvalid):
        Manifest.from_json(json.dumps(value).encode())


@pytest.mark.parametrize("name", ["../x", "/x", "a\\b", "", "a\0"])
def test_file_names_in_a_peers_manifest_are_checked(name: str, giver: StoredModel) -> None:
    value = json.loads(giver.manifest.to_json())
    value["files"][0]["name"] = name
    with pytest.raises(ModelInvalid):
        Manifest.from_json(json.dumps(value).encode())


def test_reading_for_peers_gives_what_backends_read(store: ModelStore, tmp_path: Path) -> None:
    config = hf_config(hf_values(vocab_size=len(TOKENS)))
    path = write_gguf(tmp_path / "t.gguf", random_tensors(config), config, scheme="Q8_0", tokens=TOKENS)
    store.pull(str(path))
    model = store.resolve("t")
    name = "model.layers.0.self_attn.q_proj.weight"
    raw = model.open_weights().read(name).data
    pieces = [model.read_tensor(name, offset=i, num_bytes=min(100, len(raw) - i)) for i in range(0, len(raw), 100)]
    assert (np.concatenate(pieces) == raw).all()
