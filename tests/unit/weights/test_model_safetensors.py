"""safetensors: what is refused (M1-M6, M8, M15), and that what the safetensors package wrote is read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgepipe.errors import ModelInvalid
from edgepipe.spec.config import hf_config
from edgepipe.weights.safetensors_file import open_safetensors
from tests.support.models.files import entry, hf_values, random_tensors, safetensors_bytes, write_hf_folder

A16 = entry(0, 16)

DAMAGED = {
    "M1 length 0": safetensors_bytes({}, bytes(16), length=0),
    "M1 length 1": safetensors_bytes({}, bytes(16), length=1),
    "M1 length 7": safetensors_bytes({}, bytes(16), length=7),
    "M1 length 2^63": safetensors_bytes({}, bytes(16), length=1 << 63),
    "M1 beyond file": safetensors_bytes({}, bytes(16), length=100),
    "M1 file of 3 bytes": b"abc",
    "M2 no JSON": safetensors_bytes(b"{no json}"),
    "M2 list": safetensors_bytes(b"[1, 2, 3]"),
    "M2 space first": safetensors_bytes(b'  {"a": 1}'),
    "M2 UTF-8": safetensors_bytes(b'{"\xff": 1}'),
    "M2 depth": safetensors_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "M2 NaN": safetensors_bytes(b'{"a": NaN}'),
    "M3 overlap": safetensors_bytes({"a": A16, "b": entry(8, 24)}, bytes(24)),
    "M3 hole": safetensors_bytes({"a": A16, "b": entry(20, 36)}, bytes(36)),
    "M3 hole at start": safetensors_bytes({"a": entry(4, 20)}, bytes(20)),
    "M3 rest": safetensors_bytes({"a": A16}, bytes(20)),
    "M3 beyond": safetensors_bytes({"a": entry(0, 32)}, bytes(16)),
    "M3 backwards": safetensors_bytes({"a": entry(16, 0, shape=[4])}, bytes(16)),
    "M3 negative": safetensors_bytes({"a": entry(-16, 0, shape=[4])}, bytes(16)),
    "M4 overflow": safetensors_bytes({"a": entry(0, 16, shape=[1 << 32, 1 << 32, 1 << 2])}, bytes(16)),
    "M4 huge": safetensors_bytes({"a": entry(0, 16, shape=[1 << 63])}, bytes(16)),
    "M4 negative": safetensors_bytes({"a": entry(0, 16, shape=[-4])}, bytes(16)),
    "M4 two negatives": safetensors_bytes({"a": entry(0, 16, shape=[-2, -2])}, bytes(16)),
    "M4 float": safetensors_bytes({"a": entry(0, 16, shape=[4.0])}, bytes(16)),
    "M4 true": safetensors_bytes({"a": entry(0, 4, shape=[True])}, bytes(4)),
    "M4 a million dims": safetensors_bytes({"a": entry(0, 4, shape=[1] * 1_000_000)}, bytes(4)),
    "M4 text": safetensors_bytes({"a": entry(0, 16, shape="4")}, bytes(16)),
    "M5 names twice": safetensors_bytes(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "M6 a million of size 0": safetensors_bytes(
        b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(1_000_000)) + b"}"
    ),
    "type": safetensors_bytes({"a": entry(0, 16, dtype="F64", shape=[2])}, bytes(16)),
    "entry": safetensors_bytes({"a": 3}),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGED[case])
    with pytest.raises(ModelInvalid) as caught:
        open_safetensors(tmp_path)
    assert "model.safetensors" in caught.value.what


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 200), place=st.integers(0, 200), byte=st.integers(0, 255))
def test_cut_or_changed_files_fail_only_in_the_known_way(cut: int, place: int, byte: int, tmp_path: Path) -> None:
    good = bytearray(safetensors_bytes({"a": A16, "b": entry(16, 32)}, bytes(32)))
    good[place % len(good)] = byte
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(good[: len(good) - cut % len(good)]))
    try:
        open_safetensors(tmp_path)
    except ModelInvalid:
        pass


def test_what_the_library_wrote_is_read_back(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4, dtype=np.float16),
        "empty": np.zeros((0, 3), np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = open_safetensors(tmp_path)
    assert {name: info.shape for name, info in files.infos.items()} == {"a": (2, 3), "b": (4,), "empty": (0, 3)}
    assert (files.read("a").view("<f4").reshape(2, 3) == tensors["a"]).all()
    assert (files.read("b").view("<f2") == tensors["b"]).all()
    assert bytes(files.read_range("a", 4, 8)) == tensors["a"].tobytes()[4:12]


def test_an_indexed_folder_gives_all_tensors(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", shards=3)
    files = open_safetensors(folder)
    expected = random_tensors(hf_config(hf_values()))
    assert set(files.infos) == set(expected)
    assert all((files.read(name).view("<f4") == tensor.reshape(-1)).all() for name, tensor in expected.items())


def test_a_file_cut_after_opening_is_an_error(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    files = open_safetensors(folder)
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    last = list(files.infos)[-1]
    with pytest.raises(ModelInvalid, match="shorter"):
        files.read(last)


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "a\\b.safetensors", "a\0b", "..", "", "a/../b", "./a", "~/a", "c:a", "a//b"],
)
def test_an_index_cannot_name_files_elsewhere(name: str, tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelInvalid, match="outside of the model's folder"):
        open_safetensors(folder)


def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ModelInvalid, match="link that leaves"):
        open_safetensors(folder)


def test_the_hub_caches_own_links_are_followed(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "snapshots" / "abc")
    (tmp_path / "blobs").mkdir()
    (folder / "model.safetensors").rename(tmp_path / "blobs" / "1234")
    (folder / "model.safetensors").symlink_to("../../blobs/1234")
    assert open_safetensors(folder).infos


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 3}, {"a": "missing.safetensors"}])
def test_an_index_that_says_nothing_useful_is_refused(weight_map: object, tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelInvalid):
        open_safetensors(folder)


def test_an_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    index = {"weight_map": {"no.such.tensor": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelInvalid, match="lacks a tensor"):
        open_safetensors(folder)
