"""Products of few rows with weights in blocks: by Metal kernels, and by plain operations as their reference.

T rows, O out features, I inputs, E experts, N rows with an expert each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from edgepipe_mlx.blocks.layout import BlockForm

MOST_ROWS = 16
"""Rows of a product by these kernels. More rows than that are bound by arithmetic, for which MLX has kernels."""
MOST_WITH_EXPERTS = 128
"""The same of rows with an expert each. A row reads its expert alone, so sixteen rows with eight experts each."""

_LANES = 32  # threads of a simdgroup
TILES = {1: 4, 4: 2}
"""Out features of a simdgroup, by its rows. Inputs and sums of four rows fill its registers, so it takes fewer."""
_CONSTANT = 8  # MLX gives smaller arrays in the constant address space, by other code
_SIMDGROUPS = 2  # simdgroups of a threadgroup, for each tile of rows


@dataclass(frozen=True, slots=True, eq=False)
class BlockArrays:
    """The arrays of a ``BlockWeight`` [O, I], or of E experts one below the other."""

    form: BlockForm
    words: mx.array  # [O, I * bits / 32] uint32
    factors: mx.array  # [O, m] uint8 or int8
    bases: mx.array  # [O, n] float16


class BlockKernels(Protocol):
    """Products of few rows, summed in float32 and rounded once. A row does not depend on its neighbours."""

    def rows(self, x: mx.array, weight: BlockArrays, dtype: mx.Dtype) -> mx.array:
        """Return ``x @ weight.T`` [T, O] in a type, of x [T, I] of any type of floats."""
        ...

    def by_expert(self, x: mx.array, experts: mx.array, weight: BlockArrays, count: int, dtype: mx.Dtype) -> mx.array:
        """Return ``x[n // (N / T)] @ weight[experts[n]].T`` [N, O] for each n.

        x        [T, I]; T divides N
        experts  [N] uint32
        count    E
        """
        ...


@cache
def _source(name: str) -> str:
    return (Path(__file__).parent / f"{name}.metal").read_text(encoding="utf-8")


class MetalKernels:
    """Own kernels. MLX compiles a form when it is first used, and raises RuntimeError where that fails."""

    def __init__(self) -> None:
        own = ["words", "factors", "bases"]
        header = _source("products")
        make: Any = mx.fast.metal_kernel
        self._rows = make(
            name="edgepipe_block_rows",
            input_names=["x", *own],
            output_names=["y"],
            header=header,
            source=_source("rows"),
        )
        self._by_expert = make(
            name="edgepipe_block_experts",
            input_names=["x", "experts", *own],
            output_names=["y"],
            header=header,
            source=_source("experts"),
        )

    def rows(self, x: mx.array, weight: BlockArrays, dtype: mx.Dtype) -> mx.array:
        """See ``BlockKernels``."""
        count, outputs = x.shape[0], weight.words.shape[0]
        size = min(TILES) if count == 1 else max(TILES)
        tiles, features = -(-count // size), TILES[size]
        return self._rows(
            inputs=[x, weight.words, weight.factors, weight.bases],
            template=[*_constants(weight, x, dtype), ("ROWS", size), ("FEATURES", features)],
            grid=(_LANES, tiles, -(-outputs // features)),
            threadgroup=(_LANES, tiles, _SIMDGROUPS),
            output_shapes=[(count, outputs)],
            output_dtypes=[dtype],
        )[0]

    def by_expert(self, x: mx.array, experts: mx.array, weight: BlockArrays, count: int, dtype: mx.Dtype) -> mx.array:
        """See ``BlockKernels``."""
        words = weight.words.reshape(count, -1, weight.words.shape[-1])
        number, outputs, features = experts.shape[0], words.shape[1], TILES[1]
        small = number < _CONSTANT
        return self._by_expert(
            inputs=[x, experts, words, weight.factors, weight.bases],
            template=[*_constants(weight, x, dtype), ("FEATURES", features), ("IN_CONSTANT", int(small))],
            grid=(_LANES, number, -(-outputs // features)),
            threadgroup=(_LANES, 1, _SIMDGROUPS),
            output_shapes=[(number, outputs)],
            output_dtypes=[dtype],
        )[0]


def _constants(weight: BlockArrays, x: mx.array, dtype: mx.Dtype) -> list[tuple[str, int | mx.Dtype]]:
    """Return the constants of a kernel, and the types of its arrays.

    MLX names compiled code by these. It compiles anew whenever code of one name differs, so all that changes the code
    must be among them.
    """
    form = weight.form
    types = [("X", x.dtype), ("F", weight.factors.dtype), ("Y", dtype)]
    return [*types, ("BITS", form.bits), ("GROUP", form.group), ("ADDED", int(form.added)), ("ZERO", form.zero)]


class ReferenceKernels:
    """The same by plain operations on widened weights, for comparison."""

    def rows(self, x: mx.array, weight: BlockArrays, dtype: mx.Dtype) -> mx.array:
        """See ``BlockKernels``."""
        return (x.astype(mx.float32) @ block_values(weight).T).astype(dtype)

    def by_expert(self, x: mx.array, experts: mx.array, weight: BlockArrays, count: int, dtype: mx.Dtype) -> mx.array:
        """See ``BlockKernels``."""
        matrices = block_values(weight).reshape(count, -1, x.shape[-1])[experts]  # [N, O, I]
        rows = mx.repeat(x.astype(mx.float32), experts.shape[0] // x.shape[0], axis=0)
        return (matrices @ rows[..., None]).squeeze(-1).astype(dtype)


def block_values(weight: BlockArrays) -> mx.array:
    """Return the weight's values [O, I] in float32, each rounded once at most."""
    form, outputs = weight.form, weight.words.shape[0]
    scales = group_values(weight, 0)
    plain = mx.ones((outputs, weight.words.shape[1] // form.bits), mx.float32)
    codes = mx.dequantize(weight.words, plain, mx.zeros_like(plain), group_size=32, bits=form.bits)
    grouped = codes.reshape(outputs, -1, form.group)
    if form.added:
        values = grouped * scales[..., None] + group_values(weight, 1)[..., None]
    else:
        values = (grouped - form.zero) * scales[..., None]
    return values.reshape(outputs, -1)


def group_values(weight: BlockArrays, kind: int, *, first: int = 0, step: int = 1, half: bool = False) -> mx.array:
    """Return scales (kind 0) or offsets (kind 1) [O, n] of each ``step``th group from ``first`` on.

    half  rounded to float16; else float32, exact
    """
    form, outputs = weight.form, weight.words.shape[0]
    kinds = 1 + form.added
    factors = weight.factors.reshape(outputs, -1, kinds, form.groups)[:, :, kind, first::step]
    bases = weight.bases.reshape(outputs, -1, kinds, 1)[:, :, kind]
    return (_half_product if half else _float32_product)(factors, bases).reshape(outputs, -1)


@partial(mx.compile, shapeless=True)  # one kernel on Metal
def _float32_product(factors: mx.array, bases: mx.array) -> mx.array:
    return factors.astype(mx.float32) * bases.astype(mx.float32)


@partial(mx.compile, shapeless=True)
def _half_product(factors: mx.array, bases: mx.array) -> mx.array:
    return (factors.astype(mx.float32) * bases.astype(mx.float32)).astype(mx.float16)
