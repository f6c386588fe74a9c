"""Memory of the CPU's packed weights: arrays side by side, in large pages where Linux has them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch.cpu import weight_memory  # noqa: E402
from edgepipe_torch.cpu.device import CpuDevice  # noqa: E402
from edgepipe_torch.cpu.kernels import cpu_kernels  # noqa: E402
from edgepipe_torch.cpu.packed import PackedCpuLinear  # noqa: E402
from edgepipe_torch.cpu.repack import repack, same_bits  # noqa: E402
from edgepipe_torch.cpu.shard_cache import ShardCache  # noqa: E402
from edgepipe_torch.cpu.tiled_weight import TiledWeight  # noqa: E402
from edgepipe_torch.cpu.weight_memory import WeightMemory  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402
from edgepipe_torch.layers.experts import EXPERTS  # noqa: E402
from edgepipe_torch.layers.linear import PartForms  # noqa: E402

from edgepipe.spec.tensors import WeightSource  # noqa: E402
from edgepipe.testing.tiny_model import tiny_config  # noqa: E402
from edgepipe.weights.repacked import RepackedPlace  # noqa: E402
from tests.support.backends.torch_slices import loaded_slice  # noqa: E402
from tests.support.models.packed import PackedTinyModel, random_packed  # noqa: E402

MODEL = tiny_config(num_layers=1, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=64)
SMAPS = Path("/proc/self/smaps")
large_pages = pytest.mark.skipif(
    sys.platform != "linux" or not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="no large pages"
)


def asks_for_large_pages(address: int) -> bool:
    """Return whether the mapping of an address has been marked by ``madvise``."""
    inside = False
    for line in SMAPS.read_text(encoding="utf-8").splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(each, 16) for each in words[0].split("-"))
            inside = start <= address < end
        elif inside and words[0] == "VmFlags:":
            return "hg" in words
    return False


def test_arrays_begin_with_a_cache_line_and_keep_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "_CHUNK_BYTES", 1000)
    memory = WeightMemory()
    sizes = [1, 63, 64, 65, 300, 300, 300, 1000, 5000, 7]
    arrays = [memory.empty((size,), torch.int8) for size in sizes]
    for index, array in enumerate(arrays):
        array.fill_(index)
    for index, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
        assert array.tolist() == [index] * size
        assert array.data_ptr() % 64 == 0


def test_an_array_has_its_shape_and_type() -> None:
    array = WeightMemory().empty((3, 5, 16), torch.float16)
    assert (array.shape, array.dtype, array.is_contiguous()) == ((3, 5, 16), torch.float16, True)
    assert WeightMemory().empty((2, 0, 16), torch.float16).shape == (2, 0, 16)


@large_pages
def test_runs_begin_with_a_large_page_and_go_with_their_last_array() -> None:
    memory = WeightMemory()
    first, second = memory.empty((10,), torch.int32), memory.empty((10,), torch.int32)
    address = first.data_ptr()
    assert address % (2 << 20) == 0
    assert second.data_ptr() == address + 64
    del memory, first
    assert asks_for_large_pages(address)
    second.zero_()
    del second
    assert not asks_for_large_pages(address)


def test_a_system_without_large_pages_has_torchs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    weight = random_packed("Q6_K", (40, 256), np.random.default_rng(0))
    array = WeightMemory().empty((4, 16), torch.float16)
    assert array.shape == (4, 16)
    assert same_bits(repack(weight, WeightMemory()), repack(weight))


@large_pages
def test_a_models_packed_weights_lie_in_large_pages(tmp_path: Path) -> None:
    source = PackedTinyModel(MODEL, {"": "Q6_K"})
    place = RepackedPlace(folder=tmp_path / "repacked", source="tiny", model_bytes=1 << 20)
    cache = ShardCache(place)
    assert all(is_in_large_pages(weight) for weight in packed_weights(source, cache))
    cache.write_in_background()
    cache.wait(20)
    assert len(list(place.folder.glob("*"))) >= 7
    kept = packed_weights(source, ShardCache(place, WeightMemory()))
    assert all(is_in_large_pages(weight) for weight in kept)


@large_pages
@pytest.mark.skipif(isinstance(cpu_kernels(), KernelsUnavailable), reason="no kernels for this CPU")
def test_experts_of_floats_lie_in_large_pages() -> None:
    linear = CpuDevice(torch.float32).product(EXPERTS, 64, (32,), PartForms(forms=[None], fit_16_bits=True))
    assert isinstance(linear, PackedCpuLinear)
    linear.fill(0, torch.randn(32, 64))
    assert asks_for_large_pages(linear._tiled[0].low.data_ptr())


def packed_weights(source: WeightSource, cache: ShardCache) -> list[TiledWeight]:
    products = [each for layer in loaded_slice(source, cache=cache).layers for each in layer.linears]
    return [weight for each in products if isinstance(each, PackedCpuLinear) for weight in each._tiled.values()]


def is_in_large_pages(weight: TiledWeight) -> bool:
    arrays = (weight.low, weight.high, weight.scale)
    return all(array is not None and asks_for_large_pages(array.data_ptr()) for array in arrays)
