"""One layer's keys and values as codes. Attention reads widened codes, also of the step's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from edgepipe.backend.step_layout import RowLayout
from edgepipe.backend.types import BlockCopy
from edgepipe.spec.kv_forms import KV_8BIT
from edgepipe_mlx.kv import copied_slots, head_rows, independent, read_tokens
from edgepipe_mlx.kv_codes import codes_of


class PackedKVStorage:
    """Codes and scales [kv heads, slots, n] of keys and of values. See ``KVPool``."""

    def __init__(
        self,
        *,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: mx.Dtype,
        form: str = KV_8BIT,
    ) -> None:
        """``dtype``: of what ``read`` returns, float32 or bfloat16. ``form``: of ``KV_FORMS``."""
        self._block_size = block_size
        self._dtype = dtype
        self._codes = codes_of(form, head_dim)
        self._heads = head_rows(num_kv_heads)
        slots = (num_kv_heads, num_blocks * block_size)
        self._keys, self._key_scales = (mx.zeros((*slots, width), kind) for width, kind in self._codes.kinds)
        self._values, self._value_scales = (mx.zeros((*slots, width), kind) for width, kind in self._codes.kinds)
        mx.eval(self.arrays)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Codes and scales."""
        return self._keys, self._values, self._key_scales, self._value_scales

    def write(self, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        """Write the codes of keys and values [T, kv heads, 1, D] to ``slots`` [T]."""
        at = self._heads, slots
        self._keys[at], self._key_scales[at] = self._codes.encode(keys.squeeze(2).swapaxes(0, 1))
        self._values[at], self._value_scales[at] = self._codes.encode(values.squeeze(2).swapaxes(0, 1))

    def read(self, row: RowLayout, first: int, blocks: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return widened keys and values [1, kv heads, length - first, D]. See ``KVPool``."""
        keys, values, key_scales, value_scales = (
            read_tokens(pool, row, first, blocks, self._block_size)[None] for pool in self.arrays
        )
        widen = self._codes.decoded
        return widen(keys, key_scales, self._dtype), widen(values, value_scales, self._dtype)

    def turned(self, vectors: mx.array) -> mx.array:
        """See ``KVPool.turned``."""
        return self._codes.turned(vectors)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks. See ``KVStorage.copy``."""
        for wave in independent(copies):
            sources, targets = copied_slots(wave, self._block_size)
            copied = [pool[self._heads, sources] for pool in self.arrays]
            mx.eval(copied)
            for pool, values in zip(self.arrays, copied, strict=True):
                pool[self._heads, targets] = values
