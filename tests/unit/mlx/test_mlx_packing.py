"""Packed weights in MLX's layout and through its kernels, every form beside the weight's values in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
from edgepipe_mlx.device import configure
from edgepipe_mlx.matrices import Linear, PackedMatrix
from edgepipe_mlx.packing import lay_out, mlx_form, pack_bits
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.spec.packed import GroupValues, Packed, split_planes
from edgepipe.spec.packed_form import CODEBOOKS, MXFP8_FORM, NVFP4_FORM, PackedForm
from edgepipe.weights.dequantise import as_bf16_bits, round_to_bf16, widen_bf16
from edgepipe.weights.resident import resident_bytes
from tests.support.models.packed import EXACT, QUANTISED, random_packed, random_raw

Values = npt.NDArray[np.float32]
ROWS, INPUTS = 48, 512


def form(bits: int, group: int, **fields: object) -> PackedForm:
    return PackedForm(**({"bits": bits, "group": group} | fields))  # type: ignore[arg-type] - fields of the class


OTHERS = {
    "AWQ": form(4, 128, offset="zeros"),
    "GPTQ act-order": form(4, 64, offset="zeros", ordered=True),
    "W4A16 per row": form(4, INPUTS, offset="zero"),
    "int8 per row": form(8, INPUTS, base_bits=32, offset="zeros"),
    "MLX 4": form(4, 64, offset="added"),
    "MLX 4, bf16": form(4, 64, offset="added"),
    "MLX 6": form(6, 64, offset="added"),
    "MLX 8": form(8, 32, offset="added"),
    "4 bits, groups of 16": form(4, 16, offset="added"),
    "NF4": form(4, 64, base_bits=32, codebook="nf4"),
    "MXFP8": MXFP8_FORM,
    "FP8 block": form(8, 128, base_bits=32, codebook="e4m3"),
    "FP8 act-order": form(8, 64, base_bits=32, codebook="e4m3", ordered=True),
}
"""Forms that no GGUF type has."""

FORMS = (*QUANTISED, *OTHERS)

EIGHT_BITS = 0.00395  # half a step of 255 that reach from minus to plus the largest value
BOUNDS: dict[str, tuple[float, float]] = {
    # largest error as a part of the largest value of 32 neighbours: scales in float32, in 16 bits
    "Q4_0": (0, 0),
    "Q4_1": (0, 0),
    "Q4_K": (0, 2**-9),
    "Q5_0": (0, 0),
    "Q5_1": (0, 0),
    "Q5_K": (0, 2**-9),
    "Q3_K": (0.0055, 0.0055),  # half a third of the largest step: parts of it keep one group of 16 exactly
    "Q6_K": (0.0055, 0.0055),
    "Q8_0": (0, 0),
    "IQ4_NL": (0, 0),
    "IQ4_XS": (0, 2**-11),
    "MXFP4": (0, 0),
    "MXFP8": (0, 0),
    "NVFP4": (0, 0),
    "TQ1_0": (0, 0),
    "TQ2_0": (0, 0),
    "AWQ": (0, 2**-11),
    "GPTQ act-order": (0, 2**-11),
    "W4A16 per row": (0, 0),
    "int8 per row": (2**-22, 2**-10),
    "MLX 4": (0, 0),
    "MLX 4, bf16": (0, 0),
    "MLX 6": (0, 0),
    "MLX 8": (0, 0),
}
"""By form; forms that are not listed are rounded to 8 bits: ``EIGHT_BITS`` in both."""


def made(name: str, shape: tuple[int, int] = (ROWS, INPUTS)) -> Packed:
    """A weight of a GGUF type, or of one of ``OTHERS``."""
    rng = np.random.default_rng(0)
    if name in QUANTISED:
        return random_packed(name, shape, rng)
    packed = _by_hand(OTHERS[name], shape, rng)
    if name == "MXFP8":
        exponents = rng.integers(112, 122, packed.scale.base.shape).astype(np.uint16)
        return replace(packed, scale=GroupValues(base=exponents << np.uint16(7)))
    return _in_bf16(packed) if name.endswith("bf16") else packed


def _in_bf16(packed: Packed) -> Packed:
    """Return the weight with a scale and an offset that bf16 holds."""
    assert packed.offset is not None
    scale, offset = (GroupValues(base=round_to_bf16(each.float32())) for each in (packed.scale, packed.offset))
    return replace(packed, scale=scale, offset=offset)


def _by_hand(kind: PackedForm, shape: tuple[int, int], rng: np.random.Generator) -> Packed:
    groups = (shape[0], shape[1] // kind.group)
    middle = 1 << (kind.bits - 1)
    codes = rng.integers(0, 2 * middle, shape, dtype=np.uint8)
    unit = 0.02 / float(np.nanstd(CODEBOOKS[kind.codebook])) if kind.codebook else 0.04 / middle
    if kind.codebook == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0
    low, high = split_planes(codes, kind.bits)

    def values(centre: float) -> GroupValues:
        drawn = centre * rng.uniform(0.8, 1.2, groups)
        return GroupValues(base=drawn.astype(np.float32 if kind.base_bits == 32 else np.float16))

    zeros = rng.integers(middle // 2, middle, groups, dtype=np.uint8)
    return Packed(
        name="w",
        shape=shape,
        form=kind,
        low=low,
        high=high,
        scale=values(unit),
        offset=values(-unit * middle) if kind.offset == "added" else None,
        zero={"zero": middle, "zeros": zeros}.get(kind.offset),
        order=rng.permutation(shape[1]).astype(np.int32) if kind.ordered else None,
    )


@pytest.mark.parametrize("narrow", [False, True])
def test_groups_of_16_lose_less_than_evenly_spaced_levels_would(narrow: bool) -> None:
    packed = made("Q6_K", (64, 2048))
    wanted = mlx_form(packed.form, 2048)
    assert wanted is not None
    weight = PackedMatrix(lay_out(packed, wanted, narrow=narrow), dtype=mx.float32, in_float32=True)
    values, exact = np.array(weight.rows(mx.arange(64))), packed.float32()
    groups = exact.reshape(64, -1, 32)
    step = (groups.max(axis=2) - groups.min(axis=2)) / 255
    evenly = np.sqrt((step**2 / 12).mean())  # errors of rounding to evenly spaced levels
    assert np.sqrt(np.square(values - exact).mean()) <= 0.85 * evenly


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    configure(mx.Device(mx.cpu))
    with mx.stream(mx.Device(mx.cpu)):
        yield


def matrix(packed: Packed, dtype: mx.Dtype = mx.float32) -> PackedMatrix:
    wanted = mlx_form(packed.form, packed.shape[1])
    assert wanted is not None
    planes = lay_out(packed, wanted, narrow=dtype == mx.bfloat16)
    return PackedMatrix(planes, dtype=dtype, in_float32=True)


def error_of(got: Values, packed: Packed) -> float:
    """Largest error as a part of the largest value of 32 neighbours in the stored order."""
    order = np.arange(INPUTS) if packed.order is None else packed.order
    expected = packed.float32()
    error, size = (np.abs(each[:, order]).reshape(ROWS, -1, 32).max(axis=2) for each in (got - expected, expected))
    return float((error / np.maximum(size, 1e-30)).max())


@pytest.mark.parametrize("name", FORMS)
def test_values_keep_the_bounds_of_their_form(name: str) -> None:
    packed = made(name)
    wanted = mlx_form(packed.form, INPUTS)
    assert wanted is not None
    for narrow, bound in zip((False, True), BOUNDS.get(name, (EIGHT_BITS, EIGHT_BITS)), strict=True):
        planes = lay_out(packed, wanted, narrow=narrow)
        weight = PackedMatrix(planes, dtype=mx.float32, in_float32=True)  # rows are not rounded again
        assert error_of(np.array(weight.rows(mx.arange(ROWS))), packed) <= bound


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_products_are_those_of_the_rows(name: str, dtype: mx.Dtype) -> None:
    packed = made(name)
    weight = matrix(packed, dtype)
    x = mx.random.normal((5, INPUTS), key=mx.random.key(1)).astype(dtype)
    got = np.array(weight.multiply(x).astype(mx.float32))
    expected = np.array(x.astype(mx.float32)) @ packed.float32().T
    bound = BOUNDS.get(name, (EIGHT_BITS, EIGHT_BITS))[dtype == mx.bfloat16]
    assert weight.multiply(x).dtype == dtype
    size = float(np.abs(packed.float32()).max()) * INPUTS**0.5
    rounding = 1e-6 if dtype == mx.float32 else 2**-8 + 2**-11  # to float16, then to bf16
    np.testing.assert_allclose(got, expected, rtol=rounding, atol=(4 * bound + 1e-6) * size)


@pytest.mark.parametrize(("name", "kept"), [("Q4_0", "float16"), ("Q4_K", "float16"), ("MLX 4, bf16", "uint16")])
def test_16_bit_scales_have_the_type_that_loses_less(name: str, kept: str) -> None:
    packed = made(name)
    wanted = mlx_form(packed.form, INPUTS)
    assert wanted is not None
    planes = lay_out(packed, wanted, narrow=True)
    assert planes.biases is not None
    assert planes.scales.dtype == planes.biases.dtype == kept


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_scales_beyond_float16_are_kept(name: str) -> None:
    packed = made(name)
    scale = GroupValues(base=np.full_like(packed.scale.base, 30000), factor=packed.scale.factor)
    large = replace(packed, scale=scale)
    got = np.array(matrix(large, mx.bfloat16).rows(mx.arange(ROWS)).astype(mx.float32))
    assert error_of(got, large) <= 2**-6


@pytest.mark.parametrize("largest", [0.01, 1.0, 1e4, 1e6])
def test_products_in_float16_take_inputs_of_any_size(largest: float) -> None:
    packed = made("Q4_K")
    weight = matrix(packed, mx.bfloat16)
    x = (largest * mx.random.uniform(-1, 1, (3, INPUTS), key=mx.random.key(2))).astype(mx.bfloat16)
    expected = np.array(x.astype(mx.float32)) @ packed.float32().T
    got = np.array(weight.multiply(x).astype(mx.float32))
    np.testing.assert_allclose(got, expected, rtol=2**-8, atol=2**-10 * float(np.abs(expected).max()))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_the_planner_knows_the_bytes(name: str, dtype: mx.Dtype) -> None:
    packed = made(name)
    names = {mx.float32: "float32", mx.bfloat16: "bfloat16"}
    expected = resident_bytes(packed.form, packed.shape, kind="mlx", dtype=names[dtype])
    assert matrix(packed, dtype).num_bytes == expected


@given(data=st.data(), bits=st.sampled_from([4, 5, 6, 8]), group=st.sampled_from([32, 64, 128]))
def test_words_are_those_of_mlx(data: st.DataObject, bits: int, group: int) -> None:
    rows, groups = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    codes = rng.integers(0, 1 << bits, (rows, groups * group), dtype=np.uint8)
    scales, biases = mx.ones((rows, groups)), mx.zeros((rows, groups))
    words = mx.array(pack_bits(codes, bits))
    np.testing.assert_array_equal(np.array(mx.dequantize(words, scales, biases, group, bits)), codes)


def test_a_projection_adds_its_bias() -> None:
    weight, bias = matrix(made("Q4_K")), mx.arange(ROWS).astype(mx.float32)
    x = mx.ones((1, 3, INPUTS))
    np.testing.assert_array_equal(
        np.array(Linear(weight, bias).multiply(x)), np.array(Linear(weight, None).multiply(x) + bias)
    )


def test_every_exponent_of_mxfp4_is_kept() -> None:
    exponents = np.arange(252, dtype=np.uint16).reshape(126, 2)  # from 2^-127; six times larger ones overflow
    bits = np.where(exponents == 0, np.uint16(0x40), exponents << 7)
    low, _ = split_planes(np.tile(np.arange(16, dtype=np.uint8), (126, 4)), 4)
    kind = form(4, 32, codebook="e2m1")
    packed = Packed(name="w", shape=(126, 64), form=kind, low=low, high=None, scale=GroupValues(base=bits))
    np.testing.assert_array_equal(np.array(matrix(packed).rows(mx.arange(126))), packed.float32())


def test_every_scale_of_nvfp4_is_kept() -> None:
    scale = CODEBOOKS["e4m3"][:126].astype(np.float16).reshape(63, 2)
    low, _ = split_planes(np.tile(np.arange(16, dtype=np.uint8), (63, 2)), 4)
    packed = Packed(name="w", shape=(63, 32), form=NVFP4_FORM, low=low, high=None, scale=GroupValues(base=scale))
    np.testing.assert_array_equal(np.array(matrix(packed).rows(mx.arange(63))), packed.float32())


@pytest.mark.parametrize(("name", "scale"), [("MXFP4", 0.3), ("MXFP8", 0.3), ("NVFP4", 0.3), ("NVFP4", 500.0)])
def test_scales_that_mlx_cannot_hold_are_refused(name: str, scale: float) -> None:
    packed = made(name)
    values = np.full((ROWS, packed.num_groups), scale, np.float32)
    with pytest.raises(ValueError, match="a scale of 'w' is no"):
        matrix(replace(packed, scale=GroupValues(base=values)))


def test_inputs_that_mlx_cannot_group_stay_floats() -> None:
    kind = form(4, 16, offset="zero")
    assert mlx_form(kind, 48) is None
    assert resident_bytes(kind, (8, 48), kind="mlx", dtype="bfloat16") == 2 * 8 * 48


@pytest.mark.parametrize("scheme", EXACT)
def test_widened_values_are_those_read_directly(scheme: str) -> None:
    rng = np.random.default_rng(0)
    raw = random_raw("w", scheme, (ROWS, INPUTS), rng)
    packed = random_packed(scheme, (ROWS, INPUTS), np.random.default_rng(0))
    np.testing.assert_array_equal(widen_bf16(as_bf16_bits(packed)), widen_bf16(as_bf16_bits(raw)))  # 0 is -0
