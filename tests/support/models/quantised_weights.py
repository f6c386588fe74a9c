"""Quantised weights for tests: stored tensors of each format with the values they stand for, both from its definition.

A recipe draws codes and scales, packs them by the format's description, and computes the values from codes and scales.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Draw = np.random.Generator
Array = npt.NDArray[Any]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as safetensors stores it; BF16 and F8_E4M3 as bits."""

    dtype: str
    array: Array


@dataclass(frozen=True, slots=True)
class Quantised:
    """One weight: its stored tensors by suffix of the module's name, and its values [O, I] float32."""

    parts: Mapping[str, Tensor]
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a format stores weights, and what ``config.json`` says of it."""

    config: Mapping[str, Any]
    make: Callable[[Draw, int, int], Quantised]
    key: str = "quantization_config"
    tables: bool = False  # embedding and head are quantised too
    outputs: int = 8  # divide the outputs of every weight
    notes: Mapping[str, Any] = field(default_factory=dict[str, Any])


def scales(draw: Draw, shape: tuple[int, ...], dtype: str) -> tuple[Tensor, npt.NDArray[np.float32]]:
    """Draw scales as stored and as float32."""
    values = np.asarray(draw.uniform(0.002, 0.01, shape) * draw.choice([-1, 1], shape), np.float32)
    if dtype == "F32":
        return Tensor("F32", values), values
    if dtype == "F16":
        half = values.astype(np.float16)
        return Tensor("F16", half), half.astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return Tensor("BF16", bits), (bits.astype(np.uint32) << 16).view(np.float32)


def pack_int32(codes: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> npt.NDArray[np.int32]:
    """Pack codes along an axis into int32; position p (from the lowest bits) holds element ``order[p]``."""
    moved = np.moveaxis(codes, axis, -1)
    per_word = 32 // bits
    padded = np.zeros((*moved.shape[:-1], -(-moved.shape[-1] // per_word) * per_word), np.uint32)
    padded[..., : moved.shape[-1]] = moved
    words = np.zeros((*padded.shape[:-1], padded.shape[-1] // per_word), np.uint32)
    for position, element in enumerate(order or range(per_word)):
        words |= padded[..., element::per_word] << np.uint32(bits * position)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def pack_stream(codes: Array, bits: int, axis: int) -> npt.NDArray[np.int32]:
    """Pack codes along an axis into int32 as one stream of bits: codes cross words."""
    moved = np.moveaxis(codes, axis, -1).astype(np.uint8)
    stream = np.unpackbits(moved[..., None], axis=-1, bitorder="little")[..., :bits].reshape(*moved.shape[:-1], -1)
    words = np.packbits(stream, axis=-1, bitorder="little").view(np.int32)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


def awq(group: int, dtype: str = "F16") -> Recipe:
    """AutoAWQ, GEMM."""

    def make(draw: Draw, outputs: int, inputs: int) -> Quantised:
        size = inputs if group < 0 else group
        codes, zeros = draw.integers(0, 16, (inputs, outputs)), draw.integers(0, 16, (inputs // size, outputs))
        stored, scale = scales(draw, zeros.shape, dtype)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        parts = {
            "qweight": Tensor("I32", pack_int32(codes, 4, 1, order)),
            "qzeros": Tensor("I32", pack_int32(zeros, 4, 1, order)),
            "scales": stored,
        }
        group_of = np.arange(inputs) // size
        values = (codes - zeros[group_of]).astype(np.float32) * scale[group_of]
        return Quantised(parts, np.ascontiguousarray(values.T))

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Recipe(config=config, make=make)


def gptq(
    bits: int, group: int, *, version: int = 1, sym: bool = True, act_order: bool = False, indexed: bool = True
) -> Recipe:
    """AutoGPTQ (version 1) and GPTQModel (version 2)."""
    pack = pack_stream if bits == 3 else pack_int32

    def make(draw: Draw, outputs: int, inputs: int) -> Quantised:
        size = inputs if group < 0 else group
        top = 1 << bits
        groups = np.arange(inputs) // size
        groups = draw.permutation(groups) if act_order else groups
        codes = draw.integers(0, top, (inputs, outputs))
        zeros = (
            np.full((inputs // size, outputs), top // 2) if sym else draw.integers(0, top, (inputs // size, outputs))
        )
        stored, scale = scales(draw, zeros.shape, "F16")
        parts = {
            "qweight": Tensor("I32", pack(codes, bits, 0)),
            "qzeros": Tensor("I32", pack((zeros - (version == 1)) % top, bits, 1)),
            "scales": stored,
        }
        if indexed:
            parts["g_idx"] = Tensor("I32", groups.astype(np.int32))
        values = (codes - zeros[groups]).astype(np.float32) * scale[groups]
        return Quantised(parts, np.ascontiguousarray(values.T))

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act_order}
    config |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    return Recipe(config=config, make=make, outputs={2: 16, 3: 32}.get(bits, 8))


def compressed(bits: int, group: int | None, *, symmetric: bool = True, act_order: bool = False) -> Recipe:
    """compressed-tensors, ``pack-quantized``; no group: one scale per row."""

    def make(draw: Draw, outputs: int, inputs: int) -> Quantised:
        size = group or inputs
        half = 1 << (bits - 1)
        groups = np.arange(inputs) // size
        groups = draw.permutation(groups) if act_order else groups
        signed = draw.integers(-half, half, (outputs, inputs))
        zeros = np.zeros((outputs, inputs // size), np.int64)
        if not symmetric:
            zeros = draw.integers(-half, half, zeros.shape)
        stored, scale = scales(draw, zeros.shape, "BF16")
        parts = {
            "weight_packed": Tensor("I32", pack_int32(signed + half, bits, 1)),
            "weight_scale": stored,
            "weight_shape": Tensor("I64", np.array([outputs, inputs], np.int64)),
        }
        if not symmetric:
            parts["weight_zero_point"] = Tensor("I32", pack_int32(zeros + half, bits, 0))
        if act_order:
            parts["weight_g_idx"] = Tensor("I32", groups.astype(np.int32))
        return Quantised(parts, (signed - zeros[:, groups]).astype(np.float32) * scale[:, groups])

    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights |= {"actorder": "group"} if act_order else {}
    return Recipe(config=_compressed("pack-quantized", weights), make=make)


def int8(*, symmetric: bool = True) -> Recipe:
    """compressed-tensors, ``int-quantized`` (W8A8), one scale per row."""

    def make(draw: Draw, outputs: int, inputs: int) -> Quantised:
        signed = draw.integers(-128, 128, (outputs, inputs))
        zeros = np.zeros((outputs, 1), np.int64) if symmetric else draw.integers(-128, 128, (outputs, 1))
        stored, scale = scales(draw, zeros.shape, "BF16")
        parts = {"weight": Tensor("I8", signed.astype(np.int8)), "weight_scale": stored}
        if not symmetric:
            parts["weight_zero_point"] = Tensor("I8", zeros.astype(np.int8))
        return Quantised(parts, (signed - zeros).astype(np.float32) * scale)

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    return Recipe(config=_compressed("int-quantized", weights), make=make)


def compressed_fp8(strategy: str) -> Recipe:
    """compressed-tensors, ``float-quantized``."""

    def make(draw: Draw, outputs: int, inputs: int) -> Quantised:
        codes = _e4m3_codes(draw, (outputs, inputs))
        stored, scale = scales(draw, (outputs, 1) if strategy == "channel" else (1,), "BF16")
        parts = {"weight": Tensor("F8_E4M3", codes), "weight_scale": stored}
        return Quantised(parts, e4m3_values(codes) * scale)

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    return Recipe(config=_compressed("float-quantized", weights), make=make)


def _compressed(layout: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    return {**config, "ignore": ["lm_head"], "quantization_status": "compressed"}


def fp8_block(dtype: str = "F32", *, block: tuple[int, int] = (128, 128)) -> Recipe:
    """FP8 as DeepSeek-V3 and Qwen3-FP8 store it."""

    def make(draw: Draw, outputs: int, inputs: int) -> Quantised:
        codes = _e4m3_codes(draw, (outputs, inputs))
        stored, scale = scales(draw, (-(-outputs // block[0]), -(-inputs // block[1])), dtype)
        wide = np.repeat(np.repeat(scale, block[0], axis=0), block[1], axis=1)[:outputs, :inputs]
        parts = {"weight": Tensor("F8_E4M3", codes), "weight_scale_inv": stored}
        return Quantised(parts, e4m3_values(codes) * wide)

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Recipe(config=config, make=make)


def fp8_tensor(scale_name: str = "weight_scale", unused_name: str = "input_scale") -> Recipe:
    """FP8 with one scale per tensor, stored without dimensions; Ministral 3 has other names."""

    def make(draw: Draw, outputs: int, inputs: int) -> Quantised:
        codes = _e4m3_codes(draw, (outputs, inputs))
        stored, scale = scales(draw, (), "F32")
        parts = {"weight": Tensor("F8_E4M3", codes), scale_name: stored}
        parts[unused_name] = Tensor("F32", np.ones((), np.float32))
        return Quantised(parts, e4m3_values(codes) * scale)

    return Recipe(config={"quant_method": "fp8", "activation_scheme": "static"}, make=make)


def _e4m3_codes(draw: Draw, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Draw codes of moderate size: exponents up to 2^1, either sign, subnormal numbers among them."""
    return (draw.integers(0, 72, shape) | (draw.integers(0, 2, shape) << 7)).astype(np.uint8)


def e4m3_values(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the values of float8_e4m3fn codes, one bit field at a time."""
    sign, exponent, mantissa = codes >> 7, (codes >> 3 & 15).astype(int), (codes & 7).astype(int)
    size = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    return np.where(sign == 1, -size, size).astype(np.float32)


def mlx(bits: int, group: int, dtype: str = "BF16") -> Recipe:
    """MLX, affine: codes as one stream of bits."""

    def make(draw: Draw, outputs: int, inputs: int) -> Quantised:
        codes = draw.integers(0, 1 << bits, (outputs, inputs)).astype(np.uint8)
        stored, scale = scales(draw, (outputs, inputs // group), dtype)
        biases, bias = scales(draw, scale.shape, dtype)
        words = pack_stream(codes, bits, 1).view(np.uint32)
        parts = {"weight": Tensor("U32", words), "scales": stored, "biases": biases}
        values = codes.astype(np.float32) * np.repeat(scale, group, axis=1)
        return Quantised(parts, values + np.repeat(bias, group, axis=1))

    return Recipe(config={"group_size": group, "bits": bits}, make=make, key="quantization", tables=True)


def mlx_mxfp4() -> Recipe:
    """MLX, mode mxfp4."""

    def make(draw: Draw, outputs: int, inputs: int) -> Quantised:
        codes = draw.integers(0, 16, (outputs, inputs)).astype(np.uint8)
        exponents = draw.integers(112, 122, (outputs, inputs // 32)).astype(np.uint8)
        parts = {"weight": Tensor("U32", pack_int32(codes, 4, 1).view(np.uint32)), "scales": Tensor("U8", exponents)}
        scale = np.ldexp(np.float32(1), exponents.astype(int) - 127)
        return Quantised(parts, E2M1[codes] * np.repeat(scale, 32, axis=1))

    config = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    return Recipe(config=config, make=make, key="quantization", tables=True)


def mlx_mxfp8() -> Recipe:
    """MLX, mode mxfp8."""

    def make(draw: Draw, outputs: int, inputs: int) -> Quantised:
        codes = _e4m3_codes(draw, (outputs, inputs))
        exponents = draw.integers(112, 122, (outputs, inputs // 32)).astype(np.uint8)
        parts = {"weight": Tensor("U32", codes.view(np.uint32)), "scales": Tensor("U8", exponents)}
        scale = np.ldexp(np.float32(1), exponents.astype(int) - 127)
        return Quantised(parts, e4m3_values(codes) * np.repeat(scale, 32, axis=1))

    config = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    return Recipe(config=config, make=make, key="quantization", tables=True)


def mlx_nvfp4() -> Recipe:
    """MLX, mode nvfp4."""

    def make(draw: Draw, outputs: int, inputs: int) -> Quantised:
        codes = draw.integers(0, 16, (outputs, inputs)).astype(np.uint8)
        scale = draw.integers(0, 32, (outputs, inputs // 16)).astype(np.uint8)
        parts = {"weight": Tensor("U32", pack_int32(codes, 4, 1).view(np.uint32)), "scales": Tensor("U8", scale)}
        return Quantised(parts, E2M1[codes] * np.repeat(e4m3_values(scale), 16, axis=1))

    config = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    return Recipe(config=config, make=make, key="quantization", tables=True)


def nf4(*, nested: bool = True) -> Recipe:
    """bitsandbytes NF4 in blocks of 64, with double quantisation or without."""

    def make(draw: Draw, outputs: int, inputs: int) -> Quantised:
        codes = draw.integers(0, 16, (outputs, inputs)).astype(np.uint8)
        flat = codes.reshape(-1)
        parts = {"weight": Tensor("U8", (flat[0::2] << 4 | flat[1::2])[:, None])}
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [outputs, inputs]}
        num_blocks = len(flat) // 64
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0078125}
            small = draw.integers(0, 256, num_blocks).astype(np.uint8)
            outer = draw.uniform(0.001, 0.004, -(-num_blocks // 256)).astype(np.float32)
            table = np.linspace(-1, 1, 256, dtype=np.float32)
            parts["weight.absmax"] = Tensor("U8", small)
            parts["weight.nested_absmax"] = Tensor("F32", outer)
            parts["weight.nested_quant_map"] = Tensor("F32", table)
            absmax = table[small] * outer[np.arange(num_blocks) // 256] + np.float32(0.0078125)
        else:
            absmax = draw.uniform(0.005, 0.01, num_blocks).astype(np.float32)
            parts["weight.absmax"] = Tensor("F32", absmax)
        parts["weight.quant_map"] = Tensor("F32", NF4)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        parts["weight.quant_state.bitsandbytes__nf4"] = Tensor("U8", text)
        values = (NF4[flat].reshape(-1, 64) * absmax[:, None]).reshape(outputs, inputs)
        return Quantised(parts, values)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return Recipe(config=config | {"bnb_4bit_use_double_quant": nested}, make=make)


RECIPES: Mapping[str, Recipe] = {
    "mlx4": mlx(4, 64),
    "awq": awq(128),
    "gptq": gptq(4, 128),
    "fp8-block": fp8_block(),
    "mlx2": mlx(2, 64, "F16"),
    "mlx3": mlx(3, 32),
    "mlx5": mlx(5, 128),
    "mlx6": mlx(6, 64, "F32"),
    "mlx8": mlx(8, 64),
    "mlx-mxfp4": mlx_mxfp4(),
    "mlx-mxfp8": mlx_mxfp8(),
    "mlx-nvfp4": mlx_nvfp4(),
    "awq-32": awq(32, "BF16"),
    "awq-64": awq(64),
    "awq-row": awq(-1),
    "gptq-asym": gptq(4, 32, sym=False),
    "gptq-v2-asym": gptq(4, 64, version=2, sym=False),
    "gptq-act-order": gptq(4, 32, act_order=True),
    "gptq-row-act-order": gptq(4, -1, act_order=True),
    "gptq-no-index": gptq(4, 128, indexed=False),
    "gptq2": gptq(2, 64),
    "gptq2-act-order": gptq(2, 32, act_order=True),
    "gptq3": gptq(3, 128),
    "gptq3-v2-asym": gptq(3, 32, version=2, sym=False),
    "gptq3-asym-act-order": gptq(3, 32, sym=False, act_order=True),
    "gptq8": gptq(8, 128),
    "gptq8-asym-act-order": gptq(8, 32, sym=False, act_order=True),
    "w4a16": compressed(4, 128),
    "w4a16-asym": compressed(4, 32, symmetric=False),
    "w4a16-row": compressed(4, None),
    "w4a16-act-order": compressed(4, 32, act_order=True),
    "w8a16": compressed(8, None),
    "w8a16-asym": compressed(8, 64, symmetric=False),
    "int8": int8(),
    "int8-asym": int8(symmetric=False),
    "fp8-channel": compressed_fp8("channel"),
    "fp8-tensor": compressed_fp8("tensor"),
    "fp8-static": fp8_tensor(),
    "fp8-ministral": fp8_tensor("weight_scale_inv", "activation_scale"),
    "fp8-block-bf16": fp8_block("BF16"),
    "fp8-block-64": fp8_block(block=(64, 32)),
    "nf4": nf4(),
    "nf4-plain": nf4(nested=False),
}
"""Recipes by name; the first four are the most usual formats."""
