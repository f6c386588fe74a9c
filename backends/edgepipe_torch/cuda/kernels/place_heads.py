"""Place a step's heads on CUDA: norms of heads, rotation, and writing keys and values, in one launch.

T rows, Hq and Hkv heads, D head dim, E entries that a slot keeps: keys, then values.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from edgepipe_torch.cuda.kernels.driver import SHARED_BYTES, Module
from edgepipe_torch.cuda.kernels.products import WARPS
from edgepipe_torch.layers.kv_codes import LEAST_SCALE, SCALE_FACTOR, FourBits
from edgepipe_torch.layers.step_ops import HeadNorms

_PAIR_BYTES = 4  # two neighbours in bf16, which one lane reads at once
_GROUP = 32  # values of a scale of 4 bits, which half a warp has


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitHeads:
    """How heads become codes of 4 bits, and where the lower bits of their 8 go."""

    block: int  # values that rotate together, see ``kv_codes.FourBits``
    rests: Tensor | None = None  # [T, E, D / 2] uint8: of each row
    rest_slots: Tensor | None = None  # [T] int64: slots of the pool's codes


class PlaceHeads:
    """The kernel on one device."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def __call__(
        self,
        parts: Tensor,
        rotations: Tensor | None,
        slots: Tensor,
        pool: Tensor,
        scales: Tensor | None = None,
        *,
        num_heads: int,
        num_kv_heads: int,
        norms: HeadNorms,
        eps: float,
        four_bits: FourBitHeads | None = None,
    ) -> None:
        """Normalise and rotate queries in place; write normalised and rotated keys, and values, to the pool.

        parts      [T, Hq + E, D] bf16, of which the heads of a row adjoin; keys and values in it stay as they are
        rotations  [T, 1, pairs] complex64 of the first pairs of queries and keys; None: nothing rotates
        slots      [T] int64
        pool       [slots, E, D] bf16, or int8 codes; with ``four_bits`` [slots, E, D / 2] uint8
        scales     [slots, E] float16, of codes, see ``kv_codes.EightBits``; with ``four_bits`` [slots, E, groups] uint8
        norms      weights [D] bf16
        """
        rows, count, dim = parts.shape
        if not rows:
            return
        assert can_place(parts)
        assert pool.is_contiguous()
        if four_bits is not None:
            _check_four_bits(four_bits, pool, scales, rows, dim)
        else:
            assert pool.dtype == (torch.bfloat16 if scales is None else torch.int8)
            assert scales is None or (scales.is_contiguous() and scales.shape == pool.shape[:2])
        assert pool.shape[1:] == (count - num_heads, dim if four_bits is None else dim // 2)
        assert rotations is None or (rotations.is_contiguous() and rotations.dtype == torch.complex64)
        given = _Heads(
            heads=parts.data_ptr(),
            turns=None if rotations is None else rotations.data_ptr(),
            slots=slots.data_ptr(),
            pool=pool.data_ptr(),
            scales=_address(scales),
            rests=None if four_bits is None else _address(four_bits.rests),
            rest_slots=None if four_bits is None else _address(four_bits.rest_slots),
            query_norm=_address(norms.query),
            key_norm=_address(norms.key),
            value_norm=_address(norms.value),
            rows=rows,
            stride=parts.stride(0),
            queries=num_heads,
            keys=num_kv_heads,
            entries=pool.shape[1],
            dim=dim,
            turned=0 if rotations is None else rotations.shape[-1],
            block=0 if four_bits is None else four_bits.block,
            eps=eps,
            scale_factor=SCALE_FACTOR,
            least_scale=LEAST_SCALE,
            block_scale=0.0 if four_bits is None else four_bits.block**-0.5,
        )
        blocks = -(-rows * count // WARPS)
        shared_bytes = 0 if four_bits is None else _turning_bytes(dim)
        self._module.launch("place_heads", blocks=blocks, shared_bytes=shared_bytes, arguments=(given,))


def can_place(parts: Tensor) -> bool:
    """Return whether the kernel reads heads [T, n, D] where they are."""
    aligned = parts.data_ptr() % _PAIR_BYTES == 0 and parts.stride(0) % 2 == 0 and parts.shape[2] % 2 == 0
    return aligned and parts.dtype == torch.bfloat16 and parts.stride()[1:] == (parts.shape[2], 1)


def can_place_four_bits(head_dim: int, form: FourBits) -> bool:
    """Return whether the kernel makes a form's codes of 4 bits of heads with so many values."""
    return form.group == _GROUP and _turning_bytes(head_dim) <= SHARED_BYTES


def _turning_bytes(dim: int) -> int:
    """Return the shared memory of a block whose warps rotate a head each, in whole rounds of 64 values."""
    return 4 * WARPS * -(-dim // 64) * 64


def _check_four_bits(given: FourBitHeads, pool: Tensor, scales: Tensor | None, rows: int, dim: int) -> None:
    """Check shapes, because the kernel checks nothing."""
    assert dim % given.block == given.block % _GROUP == 0
    assert scales is not None
    assert scales.is_contiguous()
    assert scales.shape == (*pool.shape[:2], dim // _GROUP)
    assert pool.dtype == scales.dtype == torch.uint8
    if (rests := given.rests) is not None:
        assert rests.is_contiguous()
        assert rests.dtype == torch.uint8
        assert rests.shape == (rows, *pool.shape[1:])
    assert given.rest_slots is None or given.rest_slots.shape == (rows,)


def _address(weight: Tensor | None) -> int | None:
    return None if weight is None else weight.data_ptr()


class _Heads(ctypes.Structure):
    """``Heads`` of place_heads.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("heads", "turns", "slots", "pool", "scales", "rests", "rest_slots"),
                *("query_norm", "key_norm", "value_norm"),
            )
        ),
        *((name, ctypes.c_int) for name in ("rows", "stride", "queries", "keys", "entries", "dim", "turned", "block")),
        *((name, ctypes.c_float) for name in ("eps", "scale_factor", "least_scale", "block_scale")),
    )
