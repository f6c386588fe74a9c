"""Place a step's heads on CUDA: norms of heads, rotation, and writing keys and values, in one launch.

T rows, Hq and Hkv heads, D head dim, E entries that a slot keeps: keys, then values.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from edgepipe_torch.cuda.kernels.driver import Module
from edgepipe_torch.cuda.kernels.products import WARPS
from edgepipe_torch.layers.kv_codes import LEAST_SCALE, SCALE_FACTOR
from edgepipe_torch.layers.step_ops import HeadNorms

_PAIR_BYTES = 4  # of two neighbours in bf16, which one lane reads at once


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
    ) -> None:
        """Normalise and rotate queries in place; write normalised and rotated keys, and values, to the pool.

        parts      [T, Hq + E, D] bf16, of which the heads of a row adjoin; keys and values in it stay as they are
        rotations  [T, 1, pairs] complex64 of the first pairs of queries and keys; None: nothing rotates
        slots      [T] int64
        pool       [slots, E, D] bf16, or int8 codes
        scales     [slots, E] float16, of codes; see ``kv_codes.EightBits``
        norms      weights [D] bf16
        """
        rows, count, dim = parts.shape
        if not rows:
            return
        assert can_place(parts)
        assert pool.is_contiguous()
        assert pool.shape[1:] == (count - num_heads, dim)
        assert pool.dtype == (torch.bfloat16 if scales is None else torch.int8)
        assert scales is None or (scales.is_contiguous() and scales.shape == pool.shape[:2])
        assert rotations is None or (rotations.is_contiguous() and rotations.dtype == torch.complex64)
        given = _Heads(
            heads=parts.data_ptr(),
            turns=None if rotations is None else rotations.data_ptr(),
            slots=slots.data_ptr(),
            pool=pool.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
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
            eps=eps,
            scale_factor=SCALE_FACTOR,
            least_scale=LEAST_SCALE,
        )
        blocks = -(-rows * count // WARPS)
        self._module.launch("place_heads", blocks=blocks, shared_bytes=0, arguments=(given,))


def can_place(parts: Tensor) -> bool:
    """Return whether the kernel reads heads [T, n, D] where they are."""
    aligned = parts.data_ptr() % _PAIR_BYTES == 0 and parts.stride(0) % 2 == 0 and parts.shape[2] % 2 == 0
    return aligned and parts.dtype == torch.bfloat16 and parts.stride()[1:] == (parts.shape[2], 1)


def _address(weight: Tensor | None) -> int | None:
    return None if weight is None else weight.data_ptr()


class _Heads(ctypes.Structure):
    """``Heads`` of place_heads.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("heads", "turns", "slots", "pool", "scales", "query_norm", "key_norm", "value_norm")
        ),
        *((name, ctypes.c_int) for name in ("rows", "stride", "queries", "keys", "entries", "dim", "turned")),
        *((name, ctypes.c_float) for name in ("eps", "scale_factor", "least_scale")),
    )
