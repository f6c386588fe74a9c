"""Repacked weights on disk: the bits of a fresh load, files that are not used, bounds, and removal with the model."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.cpu import shard_cache  # noqa: E402
from edgepipe_torch.cpu.layout import LAYOUT_VERSION  # noqa: E402
from edgepipe_torch.cpu.packed import PackedCpuLinear  # noqa: E402
from edgepipe_torch.cpu.repack import repack  # noqa: E402
from edgepipe_torch.cpu.shard_cache import ShardCache  # noqa: E402
from edgepipe_torch.cpu.tiled_weight import TiledWeight  # noqa: E402

from edgepipe.backend.types import BackendOptions  # noqa: E402
from edgepipe.errors import ModelInvalid  # noqa: E402
from edgepipe.spec.config import hf_config  # noqa: E402
from edgepipe.spec.facts import LayerRange, make_slices  # noqa: E402
from edgepipe.spec.gguf_types import BLOCKS_BY_NAME  # noqa: E402
from edgepipe.spec.packed import Packed  # noqa: E402
from edgepipe.spec.tensors import StoredTensor, TensorInfo  # noqa: E402
from edgepipe.store.store import ModelStore  # noqa: E402
from edgepipe.text.template import ChatTemplate  # noqa: E402
from edgepipe.weights.card import ModelCard  # noqa: E402
from edgepipe.weights.repacked import REPACKED_FOLDER, RepackedPlace  # noqa: E402
from edgepipe.weights.weights import Weights, open_weights  # noqa: E402
from tests.support.backends.torch_slices import loaded_slice  # noqa: E402
from tests.support.models.files import TOKENS, adopt, hf_values, metadata_of, random_tensors, write_gguf  # noqa: E402
from tests.support.models.packed import QUANTISED, random_packed  # noqa: E402
from tests.support.models.quantised_folders import write_quantised_folder  # noqa: E402

CPU = torch.device("cpu")
ROOM_BYTES = 10_000_000
WAIT_S = 60.0
INFO = TensorInfo(name="w", shape=(40, 256), scheme="Q4_K", num_bytes=40 * 144)


def place_in(folder: Path, *, source: str = "a", model_bytes: int = ROOM_BYTES) -> RepackedPlace:
    return RepackedPlace(folder=folder / REPACKED_FOLDER, source=source, model_bytes=model_bytes)


def info_of(packed: Packed, scheme: str) -> TensorInfo:
    return TensorInfo(name="w", shape=packed.shape, scheme=scheme, num_bytes=packed.shape[0])


def kept(place: RepackedPlace, info: TensorInfo, weight: TiledWeight) -> list[Path]:
    cache = ShardCache(place)
    cache.keep(info, None, weight)
    write(cache)
    return sorted(place.folder.glob("*")) if place.folder.is_dir() else []


def write(cache: ShardCache) -> None:
    cache.write_in_background()
    cache.wait(WAIT_S)


def bits(weight: TiledWeight) -> list[object]:
    tensors = (weight.low, weight.high, weight.scale, weight.offset, weight.order)
    arrays = [None if tensor is None else (tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for tensor in tensors]
    return [weight.shape, weight.group, weight.kind.name, weight.zero, weight.factors.tobytes(), *arrays]


def example(seed: int = 0, rows: int = 40) -> TiledWeight:
    return repack(random_packed("Q4_K", (rows, 256), np.random.default_rng(seed)))


# --- one weight ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    scheme=st.sampled_from(QUANTISED),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 3),
    ordered=st.booleans(),
    piece=st.sampled_from([64, 1000, 1 << 20]),
    seed=st.integers(0, 1 << 30),
)
def test_a_kept_weight_is_read_with_the_same_bits(
    scheme: str, rows: int, blocks: int, ordered: bool, piece: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    packed = random_packed(scheme, (rows, blocks * BLOCKS_BY_NAME[scheme].block_values), random)
    if ordered:
        packed = replace(packed, order=random.permutation(packed.shape[1]).astype(np.int32))
    weight, info = repack(packed), info_of(packed, scheme)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_cache, "_PIECE_BYTES", piece // 8 * 8)
        place = place_in(Path(folder))
        (path,) = kept(place, info, weight)
        assert path.stat().st_mode & 0o777 == 0o600
        found = ShardCache(place).read(info, None)
    assert found is not None
    assert bits(found) == bits(weight)


def test_a_file_that_another_user_may_change_is_not_used(tmp_path: Path) -> None:
    (path,) = kept(place_in(tmp_path), INFO, example())
    path.chmod(0o666)
    assert ShardCache(place_in(tmp_path)).read(INFO, None) is None
    path.chmod(0o600)
    assert ShardCache(place_in(tmp_path)).read(INFO, None) is not None


def test_another_key_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, order = place_in(tmp_path), np.arange(40)
    kept(place, INFO, example())

    def found(
        info: TensorInfo = INFO, rows: npt.NDArray[np.int64] | None = None, place: RepackedPlace = place
    ) -> TiledWeight | None:
        return ShardCache(place).read(info, rows)

    assert found() is not None
    for other in (
        replace(INFO, name="v"),
        replace(INFO, scheme="Q4_0"),
        replace(INFO, num_bytes=1),
        replace(INFO, shape=(20, 512)),
    ):
        assert found(other) is None
    assert found(rows=order) is None
    assert found(place=place_in(tmp_path, source="b")) is None
    monkeypatch.setattr(shard_cache, "LAYOUT_VERSION", LAYOUT_VERSION + 1)
    assert found() is None


def test_two_orders_of_rows_are_two_files(tmp_path: Path) -> None:
    place, order = place_in(tmp_path), np.arange(40)[::-1].astype(np.int64)
    cache = ShardCache(place)
    cache.keep(INFO, None, example(0))
    cache.keep(INFO, order, example(1))
    write(cache)
    plain, turned = ShardCache(place).read(INFO, None), ShardCache(place).read(INFO, order)
    assert plain is not None
    assert turned is not None
    assert (bits(plain), bits(turned)) == (bits(example(0)), bits(example(1)))


def change_byte(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _data: b"",
    "truncated": lambda data: data[:-1],
    "only a header": lambda data: data[: data.index(b"\n") + 1],
    "longer": lambda data: data + b"0",
    "no header": lambda data: b"\0" * len(data),
    "an endless header": lambda data: b"[" * len(data),
    "another header": lambda data: b"[]" + data[data.index(b"\n") :],
    "another key": lambda data: change_byte(data, data.index(b'"key": "') + 8),
    "other rows": lambda data: data.replace(b'"rows": 40', b'"rows": 41'),
    "other inputs": lambda data: data.replace(b'"inputs": 256', b'"inputs": 512'),
    "no group": lambda data: data.replace(b'"group": 32', b'"group": 00'),
    "other bits": lambda data: data.replace(b'"bits": 4', b'"bits": 7'),
    "a text as bits": lambda data: data.replace(b'"bits": 4', b'"bits":""'),
    "a number as flag": lambda data: data.replace(b'"added": true', b'"added": 1234'),
    "a changed bit": lambda data: change_byte(data, len(data) // 2),
    "a changed digest": lambda data: change_byte(data, len(data) - 1),
    "pieces exchanged": lambda data: data[:-600] + data[-400:-200] + data[-600:-400] + data[-200:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_not_used_and_replaced(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_cache, "_PIECE_BYTES", 64)
    place, weight = place_in(tmp_path), example()
    (path,) = kept(place, INFO, weight)
    good = path.read_bytes()
    path.write_bytes(DAMAGE[damage](good))
    assert path.read_bytes() != good
    assert ShardCache(place).read(INFO, None) is None
    assert kept(place, INFO, weight) == [path]
    assert path.read_bytes() == good


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    (path,) = kept(place, INFO, example())
    path.symlink_to(path.rename(tmp_path / "elsewhere"))
    assert ShardCache(place).read(INFO, None) is None


def test_the_layout_has_the_version_of_its_bits() -> None:
    """If this fails, the layout of a ``TiledWeight`` changed: raise LAYOUT_VERSION and change the digest."""
    digest = hashlib.sha256()
    for scheme in ("Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4", "Q3_K"):
        packed = random_packed(scheme, (20, 512), np.random.default_rng(7))
        digest.update(repr((scheme, bits(repack(packed)))).encode())
    assert (LAYOUT_VERSION, digest.hexdigest()[:16]) == (2, "1dc1dc5bcf2ea90f")


# --- bounds and folders -------------------------------------------------------------------------------------------


def test_the_oldest_files_of_other_loads_make_room(tmp_path: Path) -> None:
    weight = example()
    file_bytes = kept(place_in(tmp_path), INFO, weight)[0].stat().st_size
    shutil.rmtree(tmp_path / REPACKED_FOLDER)
    place = place_in(tmp_path, model_bytes=int(3.2 * file_bytes / shard_cache.MOST_SHARE))
    paths: list[Path] = []
    for index in range(4):
        before = set(place.folder.glob("*"))
        kept(place, replace(INFO, name=str(index)), weight)
        paths += set(place.folder.glob("*")) - before
        os.utime(paths[-1], ns=(index, index))
    assert [path.exists() for path in paths] == [False, True, True, True]


def test_files_of_this_load_stay_and_the_rest_is_not_written(tmp_path: Path) -> None:
    weight = example()
    file_bytes = kept(place_in(tmp_path), INFO, weight)[0].stat().st_size
    place = place_in(tmp_path, model_bytes=int(2.5 * file_bytes / shard_cache.MOST_SHARE))
    infos = [replace(INFO, name=str(index)) for index in range(5)]
    cache = ShardCache(place)
    assert [cache.read(info, None) for info in infos] == [None] * 5
    for info in infos:
        cache.keep(info, None, weight)
    write(cache)
    assert [ShardCache(place).read(info, None) is not None for info in infos] == [True, True, False, False, False]
    assert sum(path.stat().st_size for path in place.folder.iterdir()) <= 2.5 * file_bytes


def test_space_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    place, weight = place_in(tmp_path), example()
    for free, files in ((2 * ROOM_BYTES, 0), (2 * ROOM_BYTES + 100_000, 1)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _path, free=free: usage._replace(free=free))
        assert len(kept(place, INFO, weight)) == files


def test_a_slow_disk_is_not_waited_for_and_stop_leaves_neither_thread_nor_part_nor_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, stopped = threading.Event(), threading.Event()
    write_bytes = shard_cache._write_bytes

    def slow(descriptor: int, data: bytes | memoryview) -> None:
        begun.set()
        stopped.wait(10)
        write_bytes(descriptor, data)

    monkeypatch.setattr(shard_cache, "_write_bytes", slow)
    place, weight = place_in(tmp_path), example()
    weights = weakref.ref(weight)
    cache = ShardCache(place)
    cache.keep(INFO, None, weight)
    cache.keep(replace(INFO, name="v"), None, weight)
    cache.write_in_background()
    with pytest.raises(TimeoutError):
        cache.wait(0.01)
    assert begun.wait(WAIT_S)
    threading.Timer(0.1, stopped.set).start()
    cache.stop()
    del weight
    assert list(place.folder.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "keep repacked"]
    assert weights() is None


def test_parts_of_processes_that_died_are_removed(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    place.folder.mkdir(parents=True)
    lost, written = place.folder / "a.repacked.1.part", place.folder / "b.repacked.2.part"
    for part in (lost, written):
        part.write_bytes(b"x")
    os.utime(lost, (0, 0))
    assert len(kept(place, INFO, example())) == 2
    assert (lost.exists(), written.exists()) == (False, True)


def test_a_folder_that_cannot_be_used_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / REPACKED_FOLDER).write_text("a file")
    cache = ShardCache(place_in(tmp_path))
    assert cache.read(INFO, None) is None
    cache.keep(INFO, None, example())
    write(cache)
    gone = place_in(tmp_path / "removed model")
    assert kept(gone, INFO, example()) == []
    assert not gone.folder.parent.exists()
    full = place_in(tmp_path / "full")
    full.folder.parent.mkdir()

    def no_space(_descriptor: int, _data: bytes | memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_cache, "_write_bytes", no_space)
    assert kept(full, INFO, example()) == []


# --- models -------------------------------------------------------------------------------------------------------


class CountedWeights(Weights):
    """A stored model that notes which tensors are read."""

    def __init__(self, source: Weights) -> None:
        super().__init__(source.config, source._files, repacked=source.repacked)
        self.touched: set[str] = set()

    def read(self, name: str) -> StoredTensor:
        self.touched.add(name)
        return super().read(name)

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        self.touched.add(name)
        return super().read_range(name, offset, num_bytes)


def loaded(folder: Path) -> tuple[list[list[object]], set[str]]:
    """Load a model; return the bits of its packed weights, and the matrices that were read."""
    source = CountedWeights(open_weights(folder))
    cache = ShardCache(source.repacked) if source.repacked else None
    found = loaded_slice(source, cache=cache)
    if cache is not None:
        write(cache)
    products: Sequence[object] = [
        *(each for layer in found.layers for each in layer.linears),
        found.head,
    ]
    weights = [
        bits(weight)
        for product in products
        if isinstance(product, PackedCpuLinear)
        for _part, weight in sorted(product._tiled.items())
    ]
    return weights, {name for name in source.touched if "norm" not in name}


def stored_gguf_model(tmp_path: Path, scheme: str = "Q8_0") -> ModelStore:
    values = hf_values(hidden_size=64, intermediate_size=160, num_hidden_layers=2, vocab_size=len(TOKENS))
    config = hf_config(values)
    path = write_gguf(tmp_path / "tiny.gguf", random_tensors(config), config, scheme=scheme, tokens=TOKENS)
    store = ModelStore(tmp_path / "store")
    store.pull(str(path))
    return store


@pytest.mark.parametrize("scheme", ["Q8_0", "Q4_0", "Q5_1"])
def test_a_second_load_reads_no_matrix_of_the_file(scheme: str, tmp_path: Path) -> None:
    model = stored_gguf_model(tmp_path, scheme).resolve("tiny")
    fresh, read = loaded(model.path)
    again, read_again = loaded(model.path)
    assert len(fresh) >= 14
    assert again == fresh
    assert len([name for name in read if "layers" in name]) == 14
    assert not [name for name in read_again if "layers" in name]


def test_a_backend_keeps_the_weights_after_the_load_until_it_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stored_gguf_model(tmp_path).resolve("tiny")
    slices = make_slices([LayerRange(0, 2)], 2)
    closing, write_bytes = threading.Event(), shard_cache._write_bytes

    def slow(descriptor: int, data: bytes | memoryview) -> None:
        closing.wait(10)
        write_bytes(descriptor, data)

    monkeypatch.setattr(shard_cache, "_write_bytes", slow)
    backend = TorchBackend(BackendOptions(device="cpu"))
    backend.load(slices, model.open_weights(), lambda _progress: None)
    threading.Timer(0.1, closing.set).start()
    backend.close()
    assert not list((model.path / REPACKED_FOLDER).glob("*.part"))
    few = len(list((model.path / REPACKED_FOLDER).glob("*")))
    backend.load(slices, model.open_weights(), lambda _progress: None)
    backend.wait_until_kept(WAIT_S)
    backend.close()
    assert len(list((model.path / REPACKED_FOLDER).glob("*"))) > few


@pytest.mark.parametrize("recipe", ["awq", "gptq-act-order"])
def test_weights_of_several_tensors_are_kept(recipe: str, tmp_path: Path) -> None:
    write_quantised_folder(tmp_path, recipe)
    config = open_weights(tmp_path).config
    (tmp_path / "edgepipe.json").write_bytes(ModelCard(config=config, template=ChatTemplate(sources={})).to_json())
    fresh, _read = loaded(tmp_path)
    again, read_again = loaded(tmp_path)
    assert fresh
    assert again == fresh
    assert not [name for name in read_again if "layers" in name]


def test_a_changed_model_is_repacked(tmp_path: Path) -> None:
    model = stored_gguf_model(tmp_path).resolve("tiny")
    fresh, read = loaded(model.path)
    os.utime(model.path / "model.gguf", ns=(1, 1))
    again, read_again = loaded(model.path)
    assert again == fresh
    assert read_again == read


def test_damage_costs_only_one_repacking(tmp_path: Path) -> None:
    model = stored_gguf_model(tmp_path).resolve("tiny")
    fresh, _read = loaded(model.path)
    victim = sorted((model.path / REPACKED_FOLDER).iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:-100])
    again, read_again = loaded(model.path)
    assert again == fresh
    assert len(read_again) >= 1
    assert loaded(model.path)[1] < read_again


def test_files_outside_the_store_and_read_only_folders_have_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stored_gguf_model(tmp_path).resolve("tiny")
    assert open_weights(tmp_path / "tiny.gguf").repacked is None
    assert model.open_weights().repacked is not None
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    assert model.open_weights().repacked is None
    loaded(model.path)
    assert not (model.path / REPACKED_FOLDER).exists()


def test_repacked_weights_count_to_no_size_and_go_with_the_model(tmp_path: Path) -> None:
    store = stored_gguf_model(tmp_path)
    model = store.resolve("tiny")
    size, manifest = model.size_bytes, model.manifest.hash
    loaded(model.path)
    extra = sum(path.stat().st_size for path in (model.path / REPACKED_FOLDER).iterdir())
    assert extra > 0
    assert extra <= shard_cache.MOST_SHARE * size
    again = store.resolve("tiny")
    assert (again.size_bytes, again.manifest.hash) == (size, manifest)
    assert [found.id for found in store.list()] == ["tiny"]
    with pytest.raises(ModelInvalid):
        again.metadata_file(f"{REPACKED_FOLDER}/x")
    assert store.rm("tiny") == size + extra
    assert list(store.root.iterdir()) == []


def test_parts_of_a_model_from_peers_are_kept(tmp_path: Path) -> None:
    origin = stored_gguf_model(tmp_path).resolve("tiny")
    part = adopt(ModelStore(tmp_path / "other"), origin.manifest, metadata_of(origin))
    writer = part.writer()
    for name in origin.held_tensors():
        place = part.open_weights().repacked
        assert place is not None
        with writer.open(name) as sink:
            sink.write(origin.read_tensor(name).tobytes())
            assert sink.finish()
    whole, empty = part.open_weights().repacked, place_in(tmp_path)
    assert whole is not None
    assert whole.model_bytes == sum(entry.info.num_bytes for entry in origin.manifest.tensors)
    assert whole.folder.name == empty.folder.name
    fresh, _read = loaded(part.path)
    again, read_again = loaded(part.path)
    assert again == fresh == loaded(origin.path)[0]
    assert not [name for name in read_again if "layers" in name]
