"""Compare the CPU's kernels with results in float64 when they are compiled, on small random inputs.

LLVM chooses other instructions on each kind of CPU, so each process checks what it compiled; that takes some
milliseconds. Errors are in units of a bound that float32 sums keep to.

T rows, I in features, O out features, G groups, D head dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe.spec.packed_form import CODEBOOKS
from edgepipe_torch.cpu.calls import HeadKernels, KernelCalls, Product
from edgepipe_torch.cpu.frame import SEGMENT, SUM_WORDS
from edgepipe_torch.cpu.integer_code import rounded_inputs
from edgepipe_torch.cpu.kinds import (
    E2M1_ZERO,
    NUM_FACTORS,
    OFFSET_FACTOR,
    SCALE_FACTOR,
    SUM_FACTOR,
    TILE,
    ZERO,
    Kind,
    input_factor,
)
from edgepipe_torch.cpu.kv_code import row_fields
from edgepipe_torch.cpu.layout import integer_levels
from edgepipe_torch.cpu.product_code import CHUNK_ROWS, PANEL_INPUTS
from edgepipe_torch.cpu.step_code import ATTEND_JOB
from edgepipe_torch.cpu.tiled_weight import NUMBERS
from edgepipe_torch.layers.kv_codes import FINE_STEPS, Codes, FourBits, KVCodes, WholeCodes, codes_of

V = TypeVar("V", np.uint32, np.float16, np.float32)

_FLOAT32_SUMS = 2.0**-18  # tolerance relative to the sum of all products' sizes
_TINY = 1e-30
# Parts of every compiled size, and two chunks.
ROW_COUNTS = (*range(1, 9), 11, 13, 16, 17, 19, 23, 25, 29, 35, CHUNK_ROWS + 3)
_GROUP = 16
_INPUTS = PANEL_INPUTS + _GROUP  # more than a panel, an odd number of groups
_SLOT = _INPUTS + SUM_WORDS * (_INPUTS // _GROUP)  # words of a row's prepared inputs
_OUTPUTS = 2 * TILE + 5  # two whole tiles and a part of one
_COLUMN = 3  # place of the first output; outputs before and behind belong to other segments
_GROUP_ROWS = (3, 1, 20)
_SCALE_EXPONENT, _OFFSET_EXPONENT = -3, -5
_HEADS, _KV_HEADS = 4, 2
_SLOTS = 48
_LENGTHS = (1, 8, 13, 40)  # keys of a row


class RandomWeight:
    """A random weight [O, I] in the layout of ``kinds``, with its values in float64."""

    def __init__(self, kind: Kind, rng: np.random.Generator) -> None:
        self.kind = kind
        tiles, groups = -(-_OUTPUTS // TILE), _INPUTS // _GROUP
        units = _INPUTS // (8 * kind.unit)
        self.low = rng.integers(-(1 << 31), 1 << 31, (tiles, units * kind.words, TILE), np.int32)
        numbers = torch.empty(0)
        if kind.number:
            floats = torch.from_numpy(rng.standard_normal((tiles, _INPUTS, TILE), np.float32))
            numbers = floats.to(next(dtype for dtype, known in NUMBERS.items() if known == kind))
            self.low = numbers.view(torch.int32).numpy()
        if kind.floats:
            each = self.low.view(np.uint8)
            each[(each & 0x7F) == 0x7F] = 0  # NaN
        half = kind.high_bits == 16
        ends = np.iinfo(np.int16 if half else np.int32)
        self.high = rng.integers(ends.min, ends.max, (tiles, units, TILE), ends.dtype, endpoint=True)
        self.scale = rng.uniform(0.5, 1, (tiles, groups, TILE)).astype(np.float16)
        self.offset = rng.uniform(-16, 16, (tiles, groups, TILE)).astype(np.float16)
        self.order = rng.permutation(_INPUTS).astype(np.int32)
        self.bias = rng.standard_normal(tiles * TILE, np.float32)
        exponent = 0 if kind.number else kind.scale_exponent + _SCALE_EXPONENT
        plain = kind.added or kind.floats or kind.number
        self.zero = E2M1_ZERO if kind.e2m1 else 0 if plain else 1 << (kind.bits - 1)
        self.factors = np.zeros(NUM_FACTORS, np.float32)
        self.factors[:SUM_FACTOR] = [input_factor(kind, index) * 2.0**exponent for index in range(SUM_FACTOR)]
        self.factors[SCALE_FACTOR] = 2.0 ** (kind.gain_exponent + exponent)
        self.factors[ZERO] = self.zero
        self.factors[SUM_FACTOR] = -self.zero * 2.0**exponent
        if kind.added:
            self.factors[SUM_FACTOR] = 2.0**_OFFSET_EXPONENT
            self.factors[OFFSET_FACTOR] = 2.0 ** (_OFFSET_EXPONENT - exponent)
        if kind.number:
            self.levels = self.values = _rows(numbers.float().numpy()).astype(np.float64)
            self.sizes = np.abs(self.values)
            return
        codes = self._codes()
        levels = (CODEBOOKS["e4m3"][codes] if kind.floats else codes).astype(np.float64) - self.zero
        scales = self._by_input(self.scale) * 2.0**_SCALE_EXPONENT
        offsets = self._by_input(self.offset) * (2.0**_OFFSET_EXPONENT if kind.added else 0.0)
        self.levels = levels * scales  # values without offsets
        self.values = self.levels + offsets
        # Sizes of the terms that the kernels add up.
        self.sizes = (np.abs(levels) + self.zero) * scales + np.abs(offsets)

    def segment(self, product: Product) -> npt.NDArray[np.int64]:
        """Return the kernels' fields."""
        arrays = {name: getattr(self, name).ctypes.data for name in ("low", "scale", "order", "bias", "factors")}
        values = arrays | {
            "work": product.work.address,
            "prepare": product.prepare,
            "high": self.high.ctypes.data if self.kind.high_bits else 0,
            "offset": self.offset.ctypes.data if self.kind.added else 0,
            "inputs": _INPUTS,
            "groups": _INPUTS // _GROUP,
            "blocks": _GROUP // 8,
            "outputs": _OUTPUTS,
            "column": _COLUMN,
        }
        return np.array([values.get(name, 0) for name in SEGMENT], np.int64)

    def _codes(self) -> npt.NDArray[np.int32]:
        """Return the integers of the codes [O, I]."""
        return integer_levels(self.kind, _rows(self.low), _rows(self.high) if self.kind.split else None)

    def _by_input(self, values: npt.NDArray[np.float16]) -> npt.NDArray[np.float64]:
        return np.repeat(_rows(values).astype(np.float64), _GROUP, axis=1)


def _rows(tiles: npt.NDArray[V]) -> npt.NDArray[V]:
    """Return tiles [tiles, W, 16] as rows [O, W]."""
    return tiles.transpose(0, 2, 1).reshape(-1, tiles.shape[1])[:_OUTPUTS]


def product_error(kernels: KernelCalls, kind: Kind, product: Product) -> float:
    """Return the largest error of a kind's products and rows: each compiled number of rows, one thread and two."""
    rng = np.random.default_rng(5)
    counts = ROW_COUNTS
    weight = RandomWeight(kind, rng)
    segment = weight.segment(product)
    x = rng.standard_normal((counts[-1], _INPUTS), np.float32)
    own = x[:, weight.order]
    ordered, rounded = own.astype(np.float64), rounded_inputs(own, _GROUP, product.digits) if product.digits else own
    expected = rounded @ weight.levels.T + ordered @ (weight.values - weight.levels).T + weight.bias[:_OUTPUTS]
    bound = _FLOAT32_SUMS * (np.abs(ordered) @ weight.sizes.T + np.abs(weight.bias[:_OUTPUTS]))
    worst = 0.0
    for count, threads in (*((count, 1) for count in counts), (counts[0], 2), (counts[-1], 2)):
        accumulate = count % 2
        out = torch.ones(count, _OUTPUTS + 2 * _COLUMN)
        inputs, scratch = torch.from_numpy(x[:count]), torch.empty(count * _SLOT)
        first = segment.ctypes.data
        kernels.multiply(first, inputs, out, scratch, slot=_SLOT, accumulate=bool(accumulate), threads=threads)
        found = out.double().numpy()
        if not (found[:, :_COLUMN] == 1).all() or not (found[:, _COLUMN + _OUTPUTS :] == 1).all():
            return math.inf
        error = found[:, _COLUMN : _COLUMN + _OUTPUTS] - accumulate - expected[:count]
        worst = _larger(worst, error / (bound[:count] + _FLOAT32_SUMS * accumulate))
    worst = _larger(worst, _group_error(kernels, segment, x, expected, bound))
    ids = torch.tensor([0, TILE + 3, _OUTPUTS - 1])
    taken = torch.empty(len(ids), _INPUTS)
    product.take.call(segment.ctypes.data, ids.data_ptr(), len(ids), taken.data_ptr())
    error = taken.double().numpy() - weight.values[ids.numpy()]
    return _larger(worst, error / (_FLOAT32_SUMS * weight.sizes[ids.numpy()] + _TINY))


def _group_error(
    kernels: KernelCalls,
    segment: npt.NDArray[np.int64],
    x: npt.NDArray[np.float32],
    expected: npt.NDArray[np.float64],
    bound: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Return the errors of groups of rows that have the same weight, on one thread and on two."""
    rows = sum(_GROUP_ROWS)
    firsts = np.cumsum((0, *_GROUP_ROWS[:-1]))
    groups = np.array([(segment.ctypes.data, first, count) for first, count in zip(firsts, _GROUP_ROWS, strict=True)])
    errors: list[npt.NDArray[np.float64]] = []
    for threads in (1, 2):
        out, scratch = torch.zeros(rows, _OUTPUTS + 2 * _COLUMN), torch.empty(rows * _SLOT)
        inputs = torch.from_numpy(x[:rows])
        kernels.multiply_groups(groups, inputs, out, scratch, pitch=_SLOT, slot=_SLOT, threads=threads)
        found = out.double().numpy()[:, _COLUMN : _COLUMN + _OUTPUTS]
        errors.append((found - expected[:rows]) / bound[:rows])
    return np.stack(errors)


def step_error(kernels: KernelCalls) -> float:
    """Return the largest error of RMSNorm, SwiGLU and joined rows, called and replayed."""
    rng = np.random.default_rng(6)
    x, weight = _normal(rng, 3, 2, 24), _normal(rng, 24)
    normed, silu = torch.empty_like(x), torch.empty(3, 24)
    with kernels.record() as recording:
        kernels.normalise(x, weight, normed, 1e-5)
        kernels.swiglu(x.view(3, 48), silu)
    places, weights, joined = torch.tensor([[5, 0], [1, 1]]), _normal(rng, 2, 2), torch.ones(2, 24)
    rows = x.view(6, 24)
    kernels.join(rows, places, weights, joined)
    products = rows[places].double() * weights.double().unsqueeze(2)
    worst = _larger(0.0, (joined - 1 - products.sum(1)) / (_FLOAT32_SUMS * (1 + products.abs().sum(1))))
    for _ in range(2):
        expected = F.rms_norm(x.double(), (24,), weight.double(), 1e-5)
        worst = _larger(worst, (normed - expected) / (_FLOAT32_SUMS * expected.abs() + _TINY))
        gate, up = x.double().view(3, 48).chunk(2, dim=-1)
        expected = F.silu(gate) * up
        worst = _larger(worst, (silu - expected) / (_FLOAT32_SUMS * expected.abs() + _TINY))
        x.copy_(40 * _normal(rng, 3, 2, 24))
        kernels.replay(recording)
    return worst


def head_error(kernels: KernelCalls, sizes: tuple[int, int], heads: HeadKernels, *, kv: str) -> float:
    """Return the largest error of rotation and attention, without and with sinks: runs and scattered keys.

    sizes  of a head, and of the part of a key that is its value; 0: values are apart
    kv     form of the KV; empty: float32
    """
    rng = np.random.default_rng(7)
    head_dim, value_width = sizes
    count, entries = len(_LENGTHS), _KV_HEADS if value_width else 2 * _KV_HEADS
    qkv = _normal(rng, count, _HEADS + 2 * _KV_HEADS, head_dim)
    pool = _normal(rng, _SLOTS, entries, head_dim)
    form = codes_of(kv, head_dim, value_width) if kv else None
    arrays: Sequence[Tensor] = (pool,) if form is None else form.encode(pool)
    worst = 0.0 if value_width else _rotation_error(heads, qkv, arrays, form, rng)
    arrays = [torch.cat([each, each.flip(0)]) for each in arrays]  # the second half serves as lower bits
    scattered = [rng.permutation(_SLOTS)[:length] if index % 2 else None for index, length in enumerate(_LENGTHS)]
    rests = [_SLOTS + rng.permutation(_SLOTS)[: min(length, 1 + 5 * index)] for index, length in enumerate(_LENGTHS)]
    table = np.zeros((count, row_fields(heads.keep is not None)), np.int64)
    for index, (length, places) in enumerate(zip(_LENGTHS, scattered, strict=True)):
        found = (rests[index].ctypes.data, len(rests[index])) if heads.keep is not None else ()
        table[index] = index, index, 0 if places is None else places.ctypes.data, length, *found
    sinks, scale = _normal(rng, _HEADS), 0.7 * head_dim**-0.5
    expected = _turned(qkv[:, :_HEADS], form) * scale
    keys_of: list[Tensor] = []
    for index, (length, places) in enumerate(zip(_LENGTHS, scattered, strict=True)):
        seen = torch.arange(index, index + length) if places is None else torch.from_numpy(places)
        keys_of.append(_seen_values(arrays, form, seen, torch.from_numpy(rests[index])))
    for threads, sunk in itertools.product((1, 2) if kernels.parallel else (1,), (sinks, None)):
        out, queries = torch.empty(count, _HEADS, value_width or head_dim), qkv.clone()[:, :_HEADS]
        room = (_SLOTS + 8) * (_HEADS // _KV_HEADS)
        scores = torch.empty(threads * room)
        values = {
            "queries": queries.data_ptr(),
            "stride": queries.stride(0),
            "out": out.data_ptr(),
            "keys": arrays[0].data_ptr(),
            "scales": arrays[-1].data_ptr(),
            "sinks": 0 if sunk is None else sunk.data_ptr(),
            "rows": table.ctypes.data,
            "items": count * _HEADS,
            "heads": _HEADS,
            "shared": _HEADS // _KV_HEADS,
            "pitch": arrays[0].stride(0),
            "scores": scores.data_ptr(),
            "room": room,
            "calls": kernels.openmp,
            "threads": threads,
            "scale": int(np.float32(scale).view(np.int32)),
        }
        job = np.array([values.get(name, 0) for name in ATTEND_JOB], np.int64)
        heads.attend.call(job.ctypes.data)
        for index, seen in enumerate(keys_of):
            worst = _larger(worst, _attention_error(_turned(out[index], form), expected[index], seen, sunk))
    return worst


def _rotation_error(
    heads: HeadKernels, qkv: Tensor, arrays: Sequence[Tensor], form: KVCodes | None, rng: np.random.Generator
) -> float:
    """Return the largest error of rotated qkv, which changes, and of what is written to a pool's arrays."""
    count, head_dim = len(qkv), qkv.shape[-1]
    rotations = torch.polar(torch.ones(count, head_dim // 2), _normal(rng, count, head_dim // 2))
    slots = torch.from_numpy(rng.permutation(_SLOTS)[:count])
    turned = torch.view_as_complex(qkv.double().unflatten(-1, (-1, 2))) * rotations.to(torch.complex128).unsqueeze(1)
    expected = torch.view_as_real(turned).flatten(-2)
    expected[:, _HEADS + _KV_HEADS :] = qkv[:, _HEADS + _KV_HEADS :]
    expected_pool = _values(arrays, form)
    expected_pool[slots] = _turned(expected[:, _HEADS:], form)
    rests = torch.zeros(count, *arrays[0].shape[1:], dtype=torch.uint8)
    written = (*arrays, *(() if form is None else (rests,)))
    addresses = (qkv.data_ptr(), rotations.data_ptr(), slots.data_ptr(), *(each.data_ptr() for each in written))
    heads.rotate.call(*addresses, count, _HEADS, _KV_HEADS)
    worst = _larger(0.0, (qkv - expected) / (_FLOAT32_SUMS * (expected.abs() + 1)))
    pool = _values(arrays, form)
    rounding = 0.0 if form is None else form.steps(Codes(*arrays)).double() / 2
    worst = _larger(worst, (pool - expected_pool) / (_FLOAT32_SUMS * (expected_pool.abs() + 1) + rounding))
    if heads.keep is None:
        return worst
    assert isinstance(form, FourBits)
    own = [each[slots] for each in arrays]
    whole = form.widen_whole(WholeCodes(Codes(*own), rests), torch.float32).double()
    rounding = form.steps(Codes(*own)).double() / (2 * FINE_STEPS)
    worst = _larger(
        worst, (whole - expected_pool[slots]) / (_FLOAT32_SUMS * (expected_pool[slots].abs() + 1) + rounding)
    )
    tokens, kept = torch.arange(count).flip(0), torch.zeros_like(arrays[0])
    addresses = (each.data_ptr() for each in (kept, rests, tokens, slots))
    heads.keep.call(*addresses, count, kept.stride(0))
    return worst if torch.equal(kept, torch.zeros_like(kept).index_copy_(0, slots, rests[tokens])) else math.inf


def _values(arrays: Sequence[Tensor], form: KVCodes | None) -> Tensor:
    """Return a copy of a pool's values [slots, entries, D] in float64, turned as its form keeps them."""
    return arrays[0].double() if form is None else form.widen(Codes(*arrays), torch.float32).double()


def _seen_values(arrays: Sequence[Tensor], form: KVCodes | None, slots: Tensor, rests: Tensor) -> Tensor:
    """Return the values [L, entries, D] of ``slots`` [L], turned; ``rests`` [n]: slots of the last ones' lower bits."""
    found = [each[slots] for each in arrays]
    values = _values(found, form)
    if isinstance(form, FourBits):
        newest = Codes(*(each[-len(rests) :] for each in found))
        values[-len(rests) :] = form.widen_whole(WholeCodes(newest, arrays[0][rests]), torch.float32).double()
    return values


def _turned(vectors: Tensor, form: KVCodes | None) -> Tensor:
    """Rotate vectors [..., n] in float64 as a form keeps them."""
    if form is None:
        return vectors.double()
    return vectors.double() @ form.turned(torch.eye(vectors.shape[-1])).double()


def _attention_error(found: Tensor, queries: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the errors of found [Hq, V], in units of the bound.

    queries [Hq, D], scaled; kv [L, entries, D]; sinks [Hq]
    """
    each = kv.double().repeat_interleave(_HEADS // _KV_HEADS, dim=1).transpose(0, 1)  # [2 Hq or Hq, L, D]
    keys, values = each[:_HEADS], each[-_HEADS:, :, : found.shape[-1]]
    scores = torch.einsum("hd,hld->hl", queries.double(), keys)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().unsqueeze(1)], -1)
    weights = torch.softmax(scores, -1)[:, : len(kv)]
    sizes = torch.einsum("hd,hld->hl", queries.double().abs(), keys.abs()).amax(-1, keepdim=True)
    expected = torch.einsum("hl,hld->hd", weights, values)
    bound = _FLOAT32_SUMS * (1 + sizes) * torch.einsum("hl,hld->hd", weights, values.abs()) + _TINY
    return (found - expected) / bound


def _normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, np.float32))


def _larger(worst: float, errors: Tensor | npt.NDArray[np.float64]) -> float:
    """Return the largest size of errors, or ``worst`` if that is larger; infinite with a NaN."""
    found = float(np.abs(np.asarray(errors)).max())
    return math.inf if math.isnan(found) else max(worst, found)
