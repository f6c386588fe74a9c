"""One layer's keys and values in 8 bits: an int8 code per value, a float16 scale per token and kv head.

A token's codes depend on that token alone, so chunks of a prompt, truncation and copies of blocks leave the same codes.
A value is ``code * scale``, rounded once to the compute dtype; attention reads such values, also of the step's own
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import mlx.core as mx

from edgepipe.backend.step_layout import RowLayout
from edgepipe.backend.types import BlockCopy
from edgepipe_mlx.kv import copied_slots, head_rows, independent, read_tokens

_HIGHEST_CODE = 127
_SCALE_MARGIN = 1 + 2**-11  # covers the rounding of a normal float16, so that no code exceeds the highest
_LEAST_SCALE = 2**-24  # the smallest float16: the scale of zeros; covers the rounding of scales near it


def _widened(dtype: mx.Dtype, codes: mx.array, scales: mx.array) -> mx.array:
    return (codes.astype(mx.float32) * scales.astype(mx.float32)).astype(dtype)


_WIDEN: Mapping[mx.Dtype, Callable[[mx.array, mx.array], mx.array]] = {
    dtype: mx.compile(partial(_widened, dtype), shapeless=True)  # one kernel on Metal
    for dtype in (mx.float32, mx.bfloat16)
}


class PackedKVStorage:
    """Codes [kv heads, slots, D] and scales [kv heads, slots, 1] of keys and of values. See ``KVPool``."""

    def __init__(self, *, num_kv_heads: int, head_dim: int, num_blocks: int, block_size: int, dtype: mx.Dtype) -> None:
        """``dtype``: of what ``read`` returns, float32 or bfloat16."""
        self._block_size = block_size
        self._widen = _WIDEN[dtype]
        self._heads = head_rows(num_kv_heads)
        slots = (num_kv_heads, num_blocks * block_size)
        self._keys, self._values = mx.zeros((*slots, head_dim), mx.int8), mx.zeros((*slots, head_dim), mx.int8)
        self._key_scales, self._value_scales = mx.zeros((*slots, 1), mx.float16), mx.zeros((*slots, 1), mx.float16)
        mx.eval(self.arrays)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Codes and scales."""
        return self._keys, self._values, self._key_scales, self._value_scales

    def write(self, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        """Write the codes of keys and values [T, kv heads, 1, D] to ``slots`` [T]."""
        at = self._heads, slots
        self._keys[at], self._key_scales[at] = encode(keys.squeeze(2).swapaxes(0, 1))
        self._values[at], self._value_scales[at] = encode(values.squeeze(2).swapaxes(0, 1))

    def read(self, row: RowLayout, first: int, blocks: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return widened keys and values [1, kv heads, length - first, D]. See ``KVPool``."""
        keys, values, key_scales, value_scales = (
            read_tokens(pool, row, first, blocks, self._block_size)[None] for pool in self.arrays
        )
        return self._widen(keys, key_scales), self._widen(values, value_scales)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks. See ``KVStorage.copy``."""
        for wave in independent(copies):
            sources, targets = copied_slots(wave, self._block_size)
            copied = [pool[self._heads, sources] for pool in self.arrays]
            mx.eval(copied)
            for pool, values in zip(self.arrays, copied, strict=True):
                pool[self._heads, targets] = values


def decoded(codes: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return values [..., D] for codes [..., D] and scales [..., 1]; ``dtype``: float32 or bfloat16."""
    return _WIDEN[dtype](codes, scales)


def encode(values: mx.array) -> tuple[mx.array, mx.array]:
    """Return codes [..., D] and scales [..., 1] of values [..., D], rounded within half a scale.

    A head with a NaN or an infinity gets the scale NaN.
    """
    wide = values.astype(mx.float32)
    highest = mx.abs(wide).max(axis=-1, keepdims=True)
    scales = (highest * (_SCALE_MARGIN / _HIGHEST_CODE) + _LEAST_SCALE).astype(mx.float16)
    scales = scales + (scales - scales)  # NaN where infinite
    return mx.round(wide / scales.astype(mx.float32)).astype(mx.int8), scales
