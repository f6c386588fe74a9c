"""Raw blocks to numbers: every GGUF type as the gguf package reads it, bf16 rounding as the definition says."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import ModelInvalid
from edgepipe.spec.gguf_types import BLOCKS_BY_NAME, GGUF_TYPES
from edgepipe.spec.tensors import StoredTensor, TensorInfo
from edgepipe.weights.dequantise import as_bf16_bits, as_float32, round_to_bf16, widen_bf16


def raw(scheme: str, shape: tuple[int, ...], data: np.ndarray, *, rounded: bool = False) -> StoredTensor:
    flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    info = TensorInfo(name="x", shape=shape, scheme=scheme, num_bytes=flat.nbytes, rounded=rounded)
    return StoredTensor(info=info, data=flat)


def test_the_table_of_types_is_the_librarys() -> None:
    for kind, block in GGUF_TYPES.items():
        named = gguf.GGMLQuantizationType(kind)
        assert named.name == block.name
        assert gguf.GGML_QUANT_SIZES[named] == (block.block_values, block.block_bytes)


@pytest.mark.parametrize("scheme", sorted(BLOCKS_BY_NAME))
def test_every_type_gives_the_librarys_values_rounded(scheme: str) -> None:
    block = BLOCKS_BY_NAME[scheme]
    rng = np.random.default_rng(7)
    shape = (6, 3 * block.block_values)
    blocks = rng.integers(0, 256, (6, 3 * block.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[scheme]).reshape(shape)
        got = as_float32(raw(scheme, shape, blocks, rounded=True))
        bits = as_bf16_bits(raw(scheme, shape, blocks, rounded=True))
        exact = as_float32(raw(scheme, shape, blocks))
    assert got.shape == bits.shape == shape
    assert np.array_equal(got, widen_bf16(round_to_bf16(expected)), equal_nan=True)
    assert np.array_equal(widen_bf16(bits), got, equal_nan=True)
    assert np.array_equal(exact, expected, equal_nan=True)


def test_a_tensor_larger_than_a_chunk_is_whole() -> None:
    values = np.arange(5 * (1 << 20), dtype=np.float32)
    assert (as_float32(raw("F32", values.shape, values, rounded=True)) == widen_bf16(round_to_bf16(values))).all()


def test_safetensors_values_stay_exact() -> None:
    values = np.array([1.0, 1.0 + 2**-20, -3e38], np.float32)
    assert (as_float32(raw("F32", (3,), values)) == values).all()
    half = np.array([1.0, 1.0009766, 6e-8], np.float16)
    assert (as_float32(raw("F16", (3,), half)) == half.astype(np.float32)).all()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rounding_takes_the_nearest_and_ties_to_even(value: float) -> None:
    bits = int(round_to_bf16(np.array([value], np.float32))[0])
    got = float(widen_bf16(np.array([bits], np.uint16))[0])
    below, above = ((int(np.array([value], np.float32).view(np.uint32)[0]) >> 16) + step for step in (0, 1))
    near, far = (float(widen_bf16(np.array([b & 0xFFFF], np.uint16))[0]) for b in (below, above))
    if np.isinf(far):
        return  # the largest values may round to infinity, as they do everywhere
    assert got in (near, far)
    assert abs(got - value) == min(abs(near - value), abs(far - value))
    if abs(near - value) == abs(far - value):
        assert bits % 2 == 0


def test_special_values_survive() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    got = widen_bf16(round_to_bf16(values))
    assert np.array_equal(got, values, equal_nan=True)
    assert np.signbit(got[4])
    worst = np.array([0x7F800001], np.uint32).view(np.float32)  # a NaN whose upper half alone would be infinity
    assert np.isnan(widen_bf16(round_to_bf16(worst)))[0]


@pytest.mark.parametrize(("scheme", "shape", "size"), [("Q9_9", (32,), 34), ("Q8_0", (32,), 33), ("Q8_0", (31,), 34)])
def test_bytes_that_do_not_fit_are_refused(scheme: str, shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(ModelInvalid):
        as_bf16_bits(raw(scheme, shape, np.zeros(size, np.uint8)))
