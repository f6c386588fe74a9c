"""Packing GGUF blocks: the values of gguf-py bit for bit, and refusals of blocks that cannot be used."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.errors import ModelInvalid
from edgepipe.spec.gguf_types import BLOCKS_BY_NAME
from edgepipe.spec.tensors import StoredTensor, TensorInfo
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.gguf_blocks import LAYOUTS
from edgepipe.weights.gguf_packing import gguf_form, pack_gguf
from tests.support.models import ggml
from tests.support.models.packed import EXACT, FLOATS, QUANTISED, random_blocks, random_raw

REQUANTISED = tuple(scheme for scheme in QUANTISED if scheme not in EXACT)


def raw(scheme: str, shape: tuple[int, int], data: npt.NDArray[np.uint8]) -> StoredTensor:
    info = TensorInfo(name="blk", shape=shape, scheme=scheme, num_bytes=data.nbytes)
    return StoredTensor(info=info, data=data.reshape(-1))


def reference(scheme: str, shape: tuple[int, int], data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data.reshape(shape[0], -1), gguf.GGMLQuantizationType[scheme]).reshape(shape)


def test_every_type_has_a_form_and_floats_have_none() -> None:
    assert all(gguf_form(scheme) is None for scheme in FLOATS)
    assert all(gguf_form(scheme) is not None for scheme in QUANTISED)
    assert all(LAYOUTS[scheme].struct.itemsize == BLOCKS_BY_NAME[scheme].block_bytes for scheme in EXACT)


@pytest.mark.parametrize("scheme", EXACT)
def test_values_are_gguf_pys_bit_for_bit(scheme: str) -> None:
    block = BLOCKS_BY_NAME[scheme]
    shape = (37, 5 * block.block_values)
    rng = np.random.default_rng(3)
    data = random_blocks(scheme, shape, rng)
    packed = pack_gguf(raw(scheme, shape, data))
    assert np.array_equal(packed.float32(), reference(scheme, shape, data))
    assert packed.form == gguf_form(scheme)
    assert packed.num_bytes == packed.form.num_bytes(shape)


@pytest.mark.parametrize("scheme", EXACT)
@settings(max_examples=20)
@given(data=st.data())
def test_any_blocks_are_exact_or_refused(scheme: str, data: st.DataObject) -> None:
    block = BLOCKS_BY_NAME[scheme]
    shape = (data.draw(st.integers(1, 3)), block.block_values * data.draw(st.integers(1, 3)))
    size = shape[0] * shape[1] // block.block_values * block.block_bytes
    blocks = np.random.default_rng(data.draw(st.integers(0, 1 << 32))).integers(0, 256, size, dtype=np.uint8)
    expected = reference(scheme, shape, blocks)
    try:
        packed = pack_gguf(raw(scheme, shape, blocks))
    except ModelInvalid:
        assert not np.isfinite(expected).all() or scheme == "MXFP4"  # its 255 means NaN, gguf-py reads 2**128
        return
    with np.errstate(over="ignore"):
        assert np.array_equal(packed.float32(), expected)


@pytest.mark.parametrize("scheme", EXACT)
def test_a_single_block_stays_as_it_is(scheme: str) -> None:
    shape = (1, BLOCKS_BY_NAME[scheme].block_values)
    data = random_blocks(scheme, shape, np.random.default_rng(5))
    before = data.copy()
    pack_gguf(raw(scheme, shape, data))
    assert np.array_equal(data, before)


@pytest.mark.parametrize("scheme", EXACT)
def test_a_weight_of_many_chunks_is_whole(scheme: str) -> None:
    shape = (256, 4096)
    data = random_blocks(scheme, shape, np.random.default_rng(5))
    packed = pack_gguf(raw(scheme, shape, data))
    rows = np.array([0, 100, 255])
    per_row = data.reshape(shape[0], -1)[rows]
    assert np.array_equal(packed.rows(rows).float32(), reference(scheme, (3, shape[1]), per_row))


@pytest.mark.parametrize("scheme", REQUANTISED)
def test_types_without_a_form_are_requantised(scheme: str) -> None:
    stored = random_raw("w", scheme, (9, 512), np.random.default_rng(2))
    packed, exact = pack_gguf(stored), as_float32(stored)
    levels = np.abs(exact).reshape(9, -1, 32).max(axis=2).repeat(32, axis=1) / 127
    assert (np.abs(packed.float32() - exact) <= 0.57 * levels).all()
    assert packed.num_bytes == packed.form.num_bytes((9, 512))


@pytest.mark.parametrize("scheme", ["Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_blocks_that_ggml_wrote_are_exact(scheme: str) -> None:
    values = np.random.default_rng(0).normal(0, 0.02, (8, 512)).astype(np.float32)
    data = ggml.quantise(values, scheme)
    packed = pack_gguf(raw(scheme, (8, 512), data))
    assert np.array_equal(packed.float32(), reference(scheme, (8, 512), data))
    assert np.mean((packed.float32() - values) ** 2) < 0.03 * np.mean(values**2)


def bad_scale(scheme: str, blocks: npt.NDArray[np.uint8], value: float) -> npt.NDArray[np.uint8]:
    """Put a value into the last block's scale."""
    bits = np.array([value], np.float16).view(np.uint16)
    if scheme in LAYOUTS:
        blocks.reshape(-1, LAYOUTS[scheme].struct.itemsize).view(LAYOUTS[scheme].struct)[-1:, 0]["d"] = bits
    elif scheme == "IQ1_M":
        words = blocks.reshape(-1, 56)[-1, 48:].copy().view(np.uint16)
        words[:] = (words & 0x0FFF) | ((bits >> np.arange(0, 16, 4, dtype=np.uint16) & 15) << 12)
        blocks.reshape(-1, 56)[-1, 48:] = words.view(np.uint8)
    else:
        blocks.reshape(-1, BLOCKS_BY_NAME[scheme].block_bytes)[-1, :2] = bits.view(np.uint8)
    return blocks


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scheme", [scheme for scheme in QUANTISED if scheme not in ("MXFP4", "NVFP4")])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_scales_that_are_no_numbers_are_refused(scheme: str, value: float) -> None:
    shape = (4, 512)
    blocks = bad_scale(scheme, random_blocks(scheme, shape, np.random.default_rng(0)), value)
    with pytest.raises(ModelInvalid, match="'blk'") as error:
        pack_gguf(raw(scheme, shape, blocks))
    assert "no number" in error.value.fact


def test_the_nan_of_mxfp4_is_refused() -> None:
    blocks = random_blocks("MXFP4", (2, 64), np.random.default_rng(0))
    blocks[0] = 255
    with pytest.raises(ModelInvalid, match="'blk'"):
        pack_gguf(raw("MXFP4", (2, 64), blocks))


@pytest.mark.parametrize(
    ("scheme", "name"), [("Q4_1", "m"), ("Q5_1", "m"), ("Q2_K", "dmin"), ("Q4_K", "dmin"), ("Q5_K", "dmin")]
)
def test_offsets_that_are_no_numbers_are_refused(scheme: str, name: str) -> None:
    blocks = random_blocks(scheme, (2, 512), np.random.default_rng(0))
    blocks.reshape(-1, LAYOUTS[scheme].struct.itemsize).view(LAYOUTS[scheme].struct)[0, 0][name] = 0x7C00
    with pytest.raises(ModelInvalid, match="'blk'"):
        pack_gguf(raw(scheme, (2, 512), blocks))


@pytest.mark.parametrize("scheme", QUANTISED)
def test_bytes_and_shape_must_agree(scheme: str) -> None:
    block = BLOCKS_BY_NAME[scheme]
    values = 2 * block.block_values
    blocks = random_blocks(scheme, (2, values), np.random.default_rng(0))
    for data in (blocks[:-1], np.concatenate([blocks, blocks[:1]]), blocks[:0]):
        with pytest.raises(ModelInvalid, match="'blk'") as error:
            pack_gguf(raw(scheme, (2, values), data))
        assert f"takes {blocks.nbytes} bytes" in error.value.fact
    with pytest.raises(ModelInvalid, match="'blk'") as error:  # as many values, but a block would span two rows
        pack_gguf(raw(scheme, (4, block.block_values // 2), blocks[: 2 * block.block_bytes]))
    assert "no multiple" in error.value.fact


def test_blocks_of_zero_scale_are_zero() -> None:
    for scheme in QUANTISED:
        shape = (2, 256)
        blocks = np.zeros(2 * 256 // BLOCKS_BY_NAME[scheme].block_values * BLOCKS_BY_NAME[scheme].block_bytes, np.uint8)
        assert not pack_gguf(raw(scheme, shape, blocks)).float32().any(), scheme
