"""Check the kernel that places heads against float64: when it loads, and in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.spec.kv_forms import KV_4BIT
from edgepipe_torch.cuda.kernels.place_heads import FourBitHeads, PlaceHeads
from edgepipe_torch.layers.kv_codes import (
    FINE_STEPS,
    LEAST_SCALE,
    MIDDLE,
    SCALE_FACTOR,
    Codes,
    FourBits,
    WholeCodes,
)
from edgepipe_torch.layers.step_ops import HeadNorms

_BF16_ROUNDING = 2.0**-8  # rounding of a value
_HALF_ROUNDING = 2.0**-11  # rounding of a scale in float16
_FLOAT32_SUMS = 2.0**-18  # tolerance relative to the largest value of a head
_EPS = 0.25  # large enough to matter
_SLOTS = 21
_UNTOUCHED = -128  # no code of 8 bits
_UNTOUCHED_BYTE = 0xA5
_SCALE_ROUNDING = 1 / 16  # rounding of a scale with three bits behind the point
_LEAST_FOUR_BIT_SCALE = 2.0**-20

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCase:
    """Heads of a layer, and what happens to them."""

    rows: int
    heads: int
    kv_heads: int
    dim: int
    turned: int  # pairs that rotate
    normalised: Sequence[bool]  # queries, keys, values
    has_values: bool = True  # values are apart from keys


CASES = (
    *(
        PlacedCase(rows=3, heads=4, kv_heads=2, dim=dim, turned=turned, normalised=normalised)
        for dim, turned, normalised in product(
            (64, 72), (0, 16, 32), ((False,) * 3, (True, True, False), (False, True, True))
        )
    ),
    PlacedCase(rows=2, heads=3, kv_heads=1, dim=576, turned=0, normalised=(False,) * 3, has_values=False),
    PlacedCase(
        rows=2, heads=2, kv_heads=1, dim=96, turned=8, normalised=(False,) * 3
    ),  # half a warp holds their rotation
    PlacedCase(rows=9, heads=5, kv_heads=1, dim=256, turned=32, normalised=(True,) * 3),
)


def worst_place_error(kernel: PlaceHeads, device: torch.device, *, kv: str = "") -> float:
    """Return the largest error of placed heads, in units of its bound; NaN counts as infinite.

    ``kv``: form of the pool's KV, of those with own kernels; empty: bf16.
    """
    fitting = (case for case in CASES if kv != KV_4BIT or case.dim % 32 == 0)
    return max(place_error(kernel, case, device, kv=kv) for case in fitting)


def place_error(kernel: PlaceHeads, case: PlacedCase, device: torch.device, *, kv: str = "") -> float:
    """Return the largest error of a case in units of its bound: one rounding, and float32 sums.

    Numbers beside the heads and slots of no row must stay as they are.
    """
    draw = torch.Generator().manual_seed(case.dim + case.turned)
    entries = case.kv_heads * (2 if case.has_values else 1)
    width = (case.heads + entries) * case.dim
    made = torch.full((case.rows, width + 16), float("nan"))
    made[:, 8 : width + 8] = torch.randn(case.rows, width, generator=draw) * 3
    vectors = made[:, 8 : width + 8].unflatten(1, (-1, case.dim))
    vectors *= torch.rand(case.rows, case.heads + entries, 1, generator=draw) * 2 + 0.1  # scales differ
    buffer = made.to(torch.bfloat16).to(device)
    parts = buffer[:, 8 : width + 8].unflatten(1, (-1, case.dim))
    exact = parts.double().cpu().numpy()
    angles = torch.randn(case.rows, 1, max(1, case.turned), generator=draw)
    turns = torch.polar(torch.full_like(angles, 1.25), angles)
    weights = [1 + torch.randn(case.dim, generator=draw).to(torch.bfloat16) / 8 for _ in range(3)]
    norms = [each if used else None for each, used in zip(weights, case.normalised, strict=True)]
    slots, rest_slots = torch.randperm(_SLOTS - 1, generator=draw)[: 2 * case.rows].view(2, -1)
    pool, scales = _empty_pool(case, entries, kv, device)
    four_bits: FourBitHeads | None = None
    if kv == KV_4BIT:
        rests = torch.zeros(case.rows, *pool.shape[1:], dtype=torch.uint8, device=device)
        block = FourBits(case.dim).block
        four_bits = FourBitHeads(block=block, rests=rests, rest_slots=rest_slots.to(device))
    kernel(
        parts,
        turns.to(device) if case.turned else None,
        slots.to(device),
        pool,
        scales,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        norms=HeadNorms(*(None if each is None else each.to(device) for each in norms)),
        eps=_EPS,
        four_bits=four_bits,
    )
    expected = _placed(exact, case, norms, turns.to(torch.complex128).numpy()[:, 0])
    placed, kept = slots.to(device), expected[:, case.heads :]
    worst = _error(parts[:, : case.heads], expected[:, : case.heads])
    if scales is None:
        worst = max(worst, _error(pool[placed], kept))
    elif four_bits is None:
        worst = max(worst, _code_error(pool[placed], scales[placed], kept))
    else:
        worst = max(worst, _four_bits_error(pool, scales, placed, four_bits, kept))
    empty_pool, empty_scales = _empty_pool(case, entries, kv, device)
    others = torch.ones(_SLOTS, dtype=torch.bool)
    others[slots] = False
    untouched = scales is None or _same(scales[others.to(device)], empty_scales)
    others[rest_slots] &= four_bits is None
    untouched &= _same(pool[others.to(device)], empty_pool)
    untouched &= bool(buffer[:, :8].isnan().all() & buffer[:, -8:].isnan().all())
    return worst if untouched else float("inf")


def _empty_pool(case: PlacedCase, entries: int, kv: str, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return a pool and its scales, full of what no kernel writes or, with 4 bits, is unlikely to."""
    shape = _SLOTS, entries, case.dim
    if not kv:
        return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device), None
    if kv != KV_4BIT:
        codes = torch.full(shape, _UNTOUCHED, dtype=torch.int8, device=device)
        return codes, torch.full(shape[:2], float("nan"), dtype=torch.float16, device=device)
    sizes = case.dim // 2, case.dim // FourBits(case.dim).group
    codes, scales = (
        torch.full((*shape[:2], size), _UNTOUCHED_BYTE, dtype=torch.uint8, device=device) for size in sizes
    )
    return codes, scales


def _same(found: Tensor, full: Tensor | None) -> bool:
    """Return whether all is as in a full tensor."""
    assert full is not None
    value = full.flatten()[0]
    return bool((found.isnan() if bool(value.isnan()) else found == value).all())


def _placed(
    heads: Values, case: PlacedCase, norms: Sequence[Tensor | None], turns: npt.NDArray[np.complex128]
) -> Values:
    """Return heads [T, n, D] normalised and rotated in float64."""
    found = heads.copy()
    ends = np.cumsum([0, case.heads, case.kv_heads, heads.shape[1] - case.heads - case.kv_heads])
    for number, norm in enumerate(norms):
        own = found[:, ends[number] : ends[number + 1]]
        if norm is not None:
            own /= np.sqrt((own**2).mean(axis=-1, keepdims=True) + _EPS)
            own *= norm.double().numpy()
    if case.turned:
        rotating = np.ascontiguousarray(found[:, : ends[2], : 2 * case.turned]).view(np.complex128)
        found[:, : ends[2], : 2 * case.turned] = (rotating * turns[:, None]).view(np.float64)
    return found


def _code_error(codes: Tensor, scales: Tensor, expected: Values) -> float:
    """Return the largest error of codes [..., D] and scales [...] in units of its bound.

    A value is off by half a scale, a scale by the rounding of float16.
    """
    largest = np.abs(expected).max(axis=-1, initial=0.0)
    steps, wanted = scales.double().cpu().numpy(), largest * SCALE_FACTOR + LEAST_SCALE
    off = np.abs(steps - wanted) / (_HALF_ROUNDING * wanted + LEAST_SCALE / 2 + _FLOAT32_SUMS * wanted)
    error = np.abs(codes.double().cpu().numpy() * steps[..., None] - expected)
    error /= steps[..., None] / 2 + _FLOAT32_SUMS * largest[..., None]
    return float(max(np.where(np.isnan(each), np.inf, each).max(initial=0.0) for each in (off, error)))


def _four_bits_error(pool: Tensor, scales: Tensor, slots: Tensor, four_bits: FourBitHeads, expected: Values) -> float:
    """Return the largest error of codes of 4 bits, and of those of 8, against float64, in units of its bound.

    A value is off by half a scale or a 32nd, a scale by its rounding.
    """
    rests = four_bits.rests
    assert rests is not None
    assert four_bits.rest_slots is not None
    if not torch.equal(pool[four_bits.rest_slots], rests):
        return float("inf")
    dim = expected.shape[-1]
    form, wanted = FourBits(dim), rotated(expected, four_bits.block)
    made = WholeCodes(Codes(pool[slots].cpu(), scales[slots].cpu()), rests.cpu())
    steps = form.steps(made.codes).double().numpy()
    highest = np.abs(wanted).reshape(*wanted.shape[:-1], -1, form.group).max(-1).repeat(form.group, -1) / MIDDLE
    rounding = _FLOAT32_SUMS * np.abs(expected).max(axis=-1, keepdims=True)
    errors = [np.abs(steps - highest) / (_SCALE_ROUNDING * highest + _LEAST_FOUR_BIT_SCALE + rounding)]
    for found, bound in (
        (form.widen(made.codes, torch.float64), steps / 2),
        (form.widen_whole(made, torch.float64), steps / (2 * FINE_STEPS)),
    ):
        errors.append(np.abs(found.numpy() - wanted) / (bound + rounding))
    return float(max(np.where(np.isnan(each), np.inf, each).max(initial=0.0) for each in errors))


def rotated(vectors: Values, block: int) -> Values:
    """Multiply blocks of vectors [..., D] with the Hadamard matrix, which is its own inverse."""
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (vectors.reshape(*vectors.shape[:-1], -1, block) @ matrix).reshape(vectors.shape) / np.sqrt(block)


def _error(found: Tensor, expected: Values) -> float:
    """Return the largest error in units of its bound; NaN counts as infinite."""
    if not expected.size:
        return 0.0
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    error = np.abs(found.double().cpu().numpy() - expected)
    error /= _BF16_ROUNDING * np.abs(expected) + _FLOAT32_SUMS * largest
    return float(np.where(np.isnan(error), np.inf, error).max())
