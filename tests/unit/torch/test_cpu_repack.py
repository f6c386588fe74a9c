"""Repacking GGUF blocks by compiled code: the bits of the way through ``Packed`` and numpy, and the same refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from edgepipe_torch.cpu import repack as cpu_repack  # noqa: E402
from edgepipe_torch.cpu.kernels import CpuKernels, cpu_kernels  # noqa: E402
from edgepipe_torch.cpu.packed import PackedCpuLinear  # noqa: E402
from edgepipe_torch.cpu.repack import repack, repack_blocks, same_bits  # noqa: E402
from edgepipe_torch.cpu.repack_code import BLOCK_CODES  # noqa: E402
from edgepipe_torch.cpu.tiled_weight import TiledWeight  # noqa: E402
from edgepipe_torch.layers.compiled_code import KernelsUnavailable  # noqa: E402

from edgepipe.errors import ModelInvalid  # noqa: E402
from edgepipe.spec.config import hf_config  # noqa: E402
from edgepipe.spec.gguf_types import BLOCKS_BY_NAME  # noqa: E402
from edgepipe.spec.tensors import StoredTensor, WeightSource  # noqa: E402
from edgepipe.weights.gguf_packing import pack_gguf  # noqa: E402
from edgepipe.weights.stored_weight import Rows  # noqa: E402
from edgepipe.weights.weights import Weights, open_weights  # noqa: E402
from tests.support.backends.torch_slices import loaded_slice  # noqa: E402
from tests.support.models.files import hf_values, random_tensors, write_gguf  # noqa: E402
from tests.support.models.packed import random_raw  # noqa: E402

CPU = torch.device("cpu")
NO_KERNELS = KernelsUnavailable("for a test")

needs_kernels = pytest.mark.skipif(isinstance(cpu_kernels(), KernelsUnavailable), reason="no kernels for this CPU")


def kernels() -> CpuKernels:
    found = cpu_kernels()
    assert isinstance(found, CpuKernels)
    return found


def repacked(raw: StoredTensor, rows: Rows | None = None) -> TiledWeight:
    """The rows of a tensor, by compiled code from its file."""
    function = kernels().repack(raw.info.scheme)
    return repack_blocks(raw.info, lambda start, count: raw.data[start : start + count].copy(), function, rows)


def random_weight(scheme: str, rows: int, blocks: int, seed: int = 0) -> StoredTensor:
    shape = (rows, blocks * BLOCKS_BY_NAME[scheme].block_values)
    return random_raw("w", scheme, shape, np.random.default_rng(seed))


@needs_kernels
@pytest.mark.parametrize("scheme", BLOCK_CODES)
@settings(max_examples=6, deadline=None)
@given(rows=st.integers(1, 70), blocks=st.integers(1, 5), tiles=st.integers(1, 3), seed=st.integers(0, 1 << 30))
def test_compiled_code_gives_the_bits_of_numpy(scheme: str, rows: int, blocks: int, tiles: int, seed: int) -> None:
    raw = random_weight(scheme, rows, blocks, seed)
    packed = pack_gguf(raw)
    with patch.object(cpu_repack, "_READ_BYTES", tiles * 16 * len(raw.data) // rows):
        assert same_bits(repacked(raw), repack(packed))
        order = np.random.default_rng(seed).permutation(rows)[: max(1, rows - 3)]
        assert same_bits(repacked(raw, order), repack(packed.rows(order)))


@needs_kernels
@pytest.mark.parametrize("scheme", BLOCK_CODES)
def test_all_codes_and_all_finite_scales_are_repacked(scheme: str) -> None:
    """Random bytes instead of sensible values, down to scales of 2**-24 and of zero."""
    raw = random_weight(scheme, 32, 4)
    random = np.random.default_rng(1)
    blocks = random.integers(0, 256, (32 * 4, BLOCKS_BY_NAME[scheme].block_bytes), np.uint8)
    records = blocks.view(cpu_repack.LAYOUTS[scheme].struct)
    for name in {"d", "m", "dmin"}.intersection(records.dtype.names or ()):
        records[name] = random.integers(0, 0x7C00, records.shape) | random.choice([0, 0x8000], records.shape)
        records[name][:3] = [[0], [1], [0x8001]]
    raw = replace(raw, data=blocks.reshape(-1))
    assert same_bits(repacked(raw), repack(pack_gguf(raw)))


@needs_kernels
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
@pytest.mark.parametrize(("scheme", "field"), [("Q4_K", "d"), ("Q4_K", "dmin"), ("Q6_K", "d"), ("Q4_1", "m")])
def test_a_scale_that_is_no_number_is_refused_alike(scheme: str, field: str, bits: int) -> None:
    raw = random_weight(scheme, 20, 2)
    raw.data.view(cpu_repack.LAYOUTS[scheme].struct)[field][17] = bits
    with pytest.raises(ModelInvalid) as by_numpy:
        pack_gguf(raw)
    with pytest.raises(ModelInvalid) as compiled:
        repacked(raw)
    assert str(compiled.value) == str(by_numpy.value)


@needs_kernels
def test_a_tensor_whose_size_does_not_fit_its_shape_is_refused() -> None:
    raw = random_weight("Q4_K", 20, 2)
    short = replace(raw, info=replace(raw.info, num_bytes=raw.info.num_bytes - 144), data=raw.data[:-144])
    odd = replace(raw, info=replace(raw.info, shape=(20, 511)))
    for wrong in (short, odd):
        with pytest.raises(ModelInvalid):
            repacked(wrong)


@needs_kernels
def test_wrong_code_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source, found = gguf_weights(tmp_path, "Q5_1"), kernels()
    by_numpy = packed_parts(source, NO_KERNELS)
    monkeypatch.setattr(found, "_repacks", {})
    monkeypatch.setattr("edgepipe_torch.cpu.kernels.repack_error", lambda _function, _scheme: float("inf"))
    with pytest.raises(KernelsUnavailable, match="wrong values"):
        found.repack("Q5_1")
    assert all(same_bits(*pair) for pair in zip(packed_parts(source, found), by_numpy, strict=True))


# --- models in files ----------------------------------------------------------------------------------------------


class CountedWeights(Weights):
    """A model's file that notes the sizes of its reads."""

    def __init__(self, source: Weights) -> None:
        super().__init__(source.config, source._files)
        self.whole: list[str] = []
        self.parts: list[int] = []

    def read(self, name: str) -> StoredTensor:
        self.whole.append(name)
        return super().read(name)

    def read_range(self, name: str, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        if num_bytes == self.infos[name].num_bytes:
            self.whole.append(name)
        else:
            self.parts.append(num_bytes)
        return super().read_range(name, offset, num_bytes)


def gguf_weights(folder: Path, scheme: str, architecture: str = "llama") -> Weights:
    config = hf_config(hf_values(hidden_size=64, intermediate_size=160, num_hidden_layers=2))
    path = write_gguf(folder / "m.gguf", random_tensors(config), config, scheme=scheme, architecture=architecture)
    return open_weights(path)


def packed_parts(source: WeightSource, with_kernels: CpuKernels | KernelsUnavailable) -> list[TiledWeight]:
    loaded = loaded_slice(source, kernels=with_kernels)
    products = [each for layer in loaded.layers for each in layer.linears]
    found: list[TiledWeight] = []
    for product in products:
        assert isinstance(product, PackedCpuLinear)
        found += [weight for _part, weight in sorted(product._tiled.items())]
    return found


@needs_kernels
@pytest.mark.parametrize("scheme", ["Q4_0", "Q5_1", "Q8_0"])
def test_a_file_is_loaded_with_the_same_bits(scheme: str, tmp_path: Path) -> None:
    weights = gguf_weights(tmp_path, scheme)
    compiled, by_numpy = packed_parts(weights, kernels()), packed_parts(weights, NO_KERNELS)
    assert len(compiled) == len(by_numpy) == 2 * 7
    assert all(same_bits(array, other) for array, other in zip(compiled, by_numpy, strict=True))


@needs_kernels
def test_matrices_are_read_in_parts(tmp_path: Path) -> None:
    """Only q and k are read whole: their rows change places."""
    weights = CountedWeights(gguf_weights(tmp_path, "Q8_0"))
    with patch.object(cpu_repack, "_READ_BYTES", 2000):
        packed_parts(weights, kernels())
    rest = ("norm.weight", "q_proj.weight", "k_proj.weight")
    assert all(name.endswith(rest) for name in weights.whole)
    assert max(weights.parts) <= 16 * 160 // 32 * 34
    infos = weights.infos.values()
    assert sum(weights.parts) == sum(info.num_bytes for info in infos if not info.name.endswith(rest))


@needs_kernels
def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    weights = gguf_weights(tmp_path, "Q8_0")
    path = tmp_path / "m.gguf"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(ModelInvalid, match="shorter than its header says"):
        packed_parts(weights, kernels())
