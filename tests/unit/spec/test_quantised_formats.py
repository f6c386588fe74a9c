"""Quantised weights have exactly the values of their format's definition; values that cannot be right are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.errors import ModelInvalid
from edgepipe.spec.formats import check_format, pack_weight, packed_form, weight_parts
from edgepipe.spec.formats.mxfp4 import pack_mxfp4
from edgepipe.spec.packed import Packed
from edgepipe.spec.packed_form import MXFP8_FORM
from edgepipe.spec.quantisation import Quantisation, WeightFormat, quantisation_from_json, quantisation_to_json
from edgepipe.spec.quantisation_config import check_quantisation, settle_quantisation
from edgepipe.spec.tensors import StoredTensor, TensorInfo
from tests.support.models.quantised_weights import (
    E2M1,
    RECIPES,
    Quantised,
    Recipe,
    Tensor,
    awq,
    compressed,
    fp8_block,
    gptq,
)

NAME = "model.layers.0.mlp.up_proj.weight"
MODULE = "model.layers.0.mlp.up_proj"


def raw(name: str, tensor: Tensor) -> StoredTensor:
    data = np.frombuffer(tensor.array.tobytes(), np.uint8)
    info = TensorInfo(name=name, shape=tensor.array.shape, scheme=tensor.dtype, num_bytes=data.nbytes)
    return StoredTensor(info=info, data=data)


def settled(recipe: Recipe, made: Quantised) -> WeightFormat:
    found = check_quantisation({recipe.key: dict(recipe.config)})
    assert found is not None
    infos = {f"{MODULE}.{suffix}": raw(suffix, tensor).info for suffix, tensor in made.parts.items()}
    return settle_quantisation(found, {NAME: made.values.shape}, infos).default


def pack(recipe: Recipe, made: Quantised, **changed: Tensor) -> Packed:
    parts = {**made.parts, **changed}
    tensors = {suffix: raw(f"{MODULE}.{suffix}", tensor) for suffix, tensor in parts.items()}
    return pack_weight(NAME, made.values.shape, settled(recipe, made), tensors)


def make(recipe: Recipe, *, seed: int = 0, shape: tuple[int, int] | None = None) -> Quantised:
    return recipe.make(np.random.default_rng(seed), *(shape or (9 * recipe.outputs, 256)))


@pytest.mark.parametrize("name", RECIPES)
def test_values_are_those_of_the_definition_bit_for_bit(name: str) -> None:
    made = make(RECIPES[name])
    packed = pack(RECIPES[name], made)
    assert np.array_equal(packed.float32(), made.values)
    form = packed_form(settled(RECIPES[name], made), made.values.shape)
    assert packed.form == form
    assert packed.num_bytes == form.num_bytes(made.values.shape)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(RECIPES)),
    outputs=st.integers(1, 12),
    inputs=st.integers(1, 3),
    seed=st.integers(0, 1 << 32),
)
def test_random_tensors_of_any_shape(name: str, outputs: int, inputs: int, seed: int) -> None:
    made = make(RECIPES[name], seed=seed, shape=(RECIPES[name].outputs * outputs, 128 * inputs))
    assert np.array_equal(pack(RECIPES[name], made).float32(), made.values)


@pytest.mark.parametrize(
    "recipe", [compressed(4, 32, symmetric=False), compressed(8, 32, symmetric=False), fp8_block()]
)
def test_outputs_that_fill_no_word_or_block(recipe: Recipe) -> None:
    made = make(recipe, shape=(13, 256))
    assert np.array_equal(pack(recipe, made).float32(), made.values)


def test_an_fp8_row_that_ends_within_a_block() -> None:
    recipe = fp8_block()
    made = make(recipe, shape=(200, 320))
    packed = pack(recipe, made)
    assert packed.form.group == 64  # divides 128 and 320
    assert np.array_equal(packed.float32(), made.values)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_mlx_agrees_on_its_own_layout(bits: int, group: int) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    values = np.random.default_rng(bits).standard_normal((24, 256)).astype(np.float32)
    arrays = mx.quantize(mx.array(values), group_size=group, bits=bits)
    suffixes, dtypes = ("weight", "scales", "biases"), ("U32", "F32", "F32")
    parts = {suffix: Tensor(kind, np.array(data)) for suffix, kind, data in zip(suffixes, dtypes, arrays, strict=True)}
    expected = np.array(mx.dequantize(*arrays, group_size=group, bits=bits))
    recipe = Recipe(config={"group_size": group, "bits": bits}, make=RECIPES["mlx4"].make, key="quantization")
    assert np.array_equal(pack(recipe, Quantised(parts, expected)).float32(), expected)


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_mlx_agrees_on_codes_in_floating_point(mode: str, bits: int, group: int) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    values = mx.array(np.random.default_rng(0).standard_normal((24, 256)).astype(np.float32))
    words, scales = mx.quantize(values, group_size=group, bits=bits, mode=mode)
    expected = np.array(mx.dequantize(words, scales, group_size=group, bits=bits, mode=mode, dtype=mx.float32))
    parts = {"weight": Tensor("U32", np.array(words)), "scales": Tensor("U8", np.array(scales))}
    assert np.array_equal(pack(RECIPES[f"mlx-{mode}"], Quantised(parts, expected)).float32(), expected)


@pytest.mark.parametrize(("seed", "inputs"), [(0, 128), (1, 160)], ids=["blocks of 128", "blocks of 32"])
def test_fp8_with_16_bit_scales_never_has_the_form_of_mxfp8(seed: int, inputs: int) -> None:
    recipe = fp8_block("BF16")
    made = make(recipe, seed=seed, shape=(128, inputs))
    packed = pack(recipe, made)
    assert packed.form != MXFP8_FORM
    assert np.array_equal(packed.float32(), made.values)


def test_mxfp4_blocks_as_gpt_oss_stores_them() -> None:
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (6, 3, 16)).astype(np.uint8)
    scales = np.array([0, 1, 100, 127, 150, 252] * 3, np.uint8).reshape(6, 3)
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=3).reshape(6, 3, 32)
    expected = np.ldexp(E2M1[nibbles], scales.astype(np.int64)[:, :, None] - 127).reshape(6, 96)
    assert np.array_equal(pack_mxfp4("experts", blocks, scales).float32(), expected)
    scales[2, 1] = 255
    with pytest.raises(ModelInvalid):
        pack_mxfp4("experts", blocks, scales)
    with pytest.raises(ModelInvalid):
        pack_mxfp4("experts", blocks[:, :, :8], scales)


def test_version_1_of_gptq_stores_a_zero_of_0_as_15() -> None:
    recipe = gptq(4, 32, sym=False)
    made = make(recipe, shape=(8, 32))
    zeros = np.full((1, 1), -1, np.int32)  # all nibbles 15
    packed = pack(recipe, made, qzeros=Tensor("I32", zeros))
    assert isinstance(packed.zero, np.ndarray)
    assert not packed.zero.any()


def test_e4m3_covers_every_code() -> None:
    finite = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    recipe = fp8_block()
    made = make(recipe, shape=(1, 128))
    for half in (finite[:127], finite[127:]):
        codes = np.resize(half, 128)[None]
        got = pack(
            recipe, made, weight=Tensor("F8_E4M3", codes), weight_scale_inv=Tensor("F32", np.ones((1, 1), "<f4"))
        )
        values = got.float32()[0]
        magnitudes = np.abs(values[:127])
        assert np.array_equal(np.sort(magnitudes), magnitudes)  # codes of one sign are in order of size
        assert magnitudes[-1] == 448
        assert (np.signbit(values[:127]) == (half >= 128)).all()


def _nan(tensor: Tensor) -> Tensor:
    array = tensor.array.copy()
    bits = {"F16": 0x7E00, "BF16": 0x7FC0, "F32": 0x7F800000}[tensor.dtype]  # NaN, NaN, infinity
    array.view(np.uint32 if tensor.dtype == "F32" else np.uint16).reshape(-1)[-1] = bits
    return Tensor(tensor.dtype, array)


SCALES = {
    "awq": "scales",
    "gptq": "scales",
    "w4a16": "weight_scale",
    "int8": "weight_scale",
    "fp8-block": "weight_scale_inv",
    "fp8-static": "weight_scale",
    "mlx4": "biases",
    "mlx6": "scales",
    "nf4": "weight.nested_absmax",
    "nf4-plain": "weight.absmax",
}


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_that_is_not_finite_is_refused(name: str) -> None:
    made = make(RECIPES[name])
    with pytest.raises(ModelInvalid) as caught:
        pack(RECIPES[name], made, **{SCALES[name]: _nan(made.parts[SCALES[name]])})
    assert NAME in caught.value.what


def _with(array: np.ndarray, value: int) -> np.ndarray:
    changed = array.copy()
    changed.reshape(-1)[0] = value
    return changed


HOSTILE: Mapping[str, tuple[str, str, Callable[[np.ndarray], np.ndarray]]] = {
    "g_idx too large": ("gptq-act-order", "g_idx", lambda index: _with(index, 1 << 30)),
    "g_idx negative": ("gptq-act-order", "g_idx", lambda index: _with(index, -1)),
    "g_idx uneven": ("gptq-act-order", "g_idx", lambda index: np.zeros_like(index)),
    "g_idx out of order": ("gptq-asym", "g_idx", lambda index: index[::-1]),
    "weight_g_idx too large": ("w4a16-act-order", "weight_g_idx", lambda index: _with(index, 99)),
    "zeros of a symmetric weight": ("gptq", "qzeros", lambda zeros: _with(zeros, 0)),
    "a code of NaN": ("fp8-block", "weight", lambda codes: _with(codes, 0xFF)),
    "an exponent of NaN": ("mlx-mxfp4", "scales", lambda scales: _with(scales, 255)),
    "an exponent of mxfp8 of NaN": ("mlx-mxfp8", "scales", lambda scales: _with(scales, 255)),
    "a code of mxfp8 of NaN": ("mlx-mxfp8", "weight", lambda words: _with(words, 0x7F)),
    "a scale of nvfp4 of NaN": ("mlx-nvfp4", "scales", lambda scales: _with(scales, 0x7F)),
    "a negative scale of nvfp4": ("mlx-nvfp4", "scales", lambda scales: _with(scales, 0x80)),
    "another table": ("nf4", "weight.quant_map", lambda table: table[::-1]),
    "no JSON": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda text: text[1:]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_values_that_cannot_be_right_are_refused(case: str) -> None:
    name, part, change = HOSTILE[case]
    made = make(RECIPES[name])
    tensor = made.parts[part]
    with pytest.raises(ModelInvalid):
        pack(RECIPES[name], made, **{part: Tensor(tensor.dtype, np.ascontiguousarray(change(tensor.array)))})


@pytest.mark.parametrize(
    "state",
    [
        {"quant_type": "fp4"},
        {"blocksize": 128},
        {"shape": [256, 72]},
        {"nested_blocksize": 128},
        {"nested_offset": None},
        {"nested_offset": 1e39},
    ],
)
def test_a_quant_state_that_contradicts_is_refused(state: dict[str, Any]) -> None:
    import json

    made = make(RECIPES["nf4"])
    suffix = "weight.quant_state.bitsandbytes__nf4"
    text = json.dumps({**json.loads(made.parts[suffix].array.tobytes()), **state}).encode()
    with pytest.raises(ModelInvalid):
        pack(RECIPES["nf4"], made, **{suffix: Tensor("U8", np.frombuffer(text, np.uint8))})


def test_a_weight_that_does_not_fit_its_groups_is_refused() -> None:
    for recipe, shape in (
        (awq(128), (72, 192)),
        (awq(32), (12, 64)),
        (gptq(4, 128), (8, 192)),
        (fp8_block(), (8, 136)),
    ):
        stored = check_quantisation({recipe.key: dict(recipe.config)})
        assert stored is not None
        with pytest.raises(ModelInvalid):
            weight_parts(stored.default, shape)


FORMAT = st.builds(
    WeightFormat,
    kind=st.sampled_from(["awq", "gptq", "packed", "int8", "fp8", "fp8_inv", "mlx", "mlx_mxfp4", "nf4", "else"]),
    bits=st.sampled_from([2, 3, 4, 5, 7, 8]),
    group=st.sampled_from([0, 1, 32, 64, 128, 4096]),
    rows=st.sampled_from([0, 1, 128]),
    scale=st.sampled_from(["F16", "BF16", "F32", "U8", "I64", "Q4_K"]),
    zeros=st.booleans(),
    indexed=st.booleans(),
    ordered=st.booleans(),
)


@given(stored=FORMAT, shape=st.tuples(st.integers(1, 300), st.integers(1, 300)))
def test_a_checked_format_always_has_parts_and_a_form_of_their_size(
    stored: WeightFormat, shape: tuple[int, int]
) -> None:
    try:
        parts = weight_parts(check_format(stored), shape)
    except ModelInvalid:
        return
    form = packed_form(stored, shape)
    assert shape[1] % form.group == 0
    assert form.bits in (4, 5, 6, 8)
    assert form.num_bytes(shape) > 0
    assert parts


@given(default=FORMAT, others=st.dictionaries(st.text(max_size=20), st.none() | FORMAT), more=st.lists(FORMAT))
def test_a_quantisation_survives_json(
    default: WeightFormat, others: dict[str, WeightFormat | None], more: list[WeightFormat]
) -> None:
    import json

    value = Quantisation(default=default, others=tuple(others.items()), alternatives=tuple(more))
    text = json.dumps(quantisation_to_json(value))
    assert quantisation_from_json(json.loads(text)) == value


def test_defaults_are_not_written() -> None:
    value = Quantisation(default=WeightFormat(kind="mlx"))
    assert quantisation_to_json(value) == {"default": {"kind": "mlx"}}
    assert value != replace(value, default=WeightFormat(kind="awq"))
