"""One layer's keys and values as codes. Attention reads widened codes, also of the step's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from edgepipe.backend.step_layout import RowLayout
from edgepipe.backend.types import BlockCopy
from edgepipe_mlx.kv import NewestPart, Paged, RestArrays, copied_slots, head_rows, independent, read_tokens
from edgepipe_mlx.kv_codes import FourBits, KVCodes, codes_of


class PackedKVStorage:
    """Codes and scales [kv heads, slots, n] of keys and of values. See ``KVPool``."""

    def __init__(
        self,
        *,
        num_kv_heads: int,
        num_blocks: int,
        block_size: int,
        dtype: mx.Dtype,
        codes: KVCodes,
    ) -> None:
        """``dtype``: of what ``read`` returns, float32 or bfloat16. ``codes``: the form."""
        self._block_size = block_size
        self._dtype = dtype
        self._codes = codes
        self._heads = head_rows(num_kv_heads)
        slots = (num_kv_heads, num_blocks * block_size)
        self._keys, self._key_scales = (mx.zeros((*slots, width), kind) for width, kind in self._codes.kinds)
        self._values, self._value_scales = (mx.zeros((*slots, width), kind) for width, kind in self._codes.kinds)
        mx.eval(self.arrays)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Codes and scales."""
        return self._keys, self._values, self._key_scales, self._value_scales

    @property
    def paged(self) -> Paged:
        """See ``KVPool``."""
        return Paged(self._keys, self._values, (self._key_scales, self._value_scales))

    def write(self, slots: mx.array, keys: mx.array, values: mx.array, rests: RestArrays | None) -> None:
        """Write the codes of keys and values [T, kv heads, 1, D] to ``slots`` [T]. See ``KVPool``."""
        at = self._heads, slots
        self._keys[at], self._key_scales[at] = self._codes.encode(keys.squeeze(2).swapaxes(0, 1))
        self._values[at], self._value_scales[at] = self._codes.encode(values.squeeze(2).swapaxes(0, 1))

    def read(self, row: RowLayout, first: int, blocks: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return widened keys and values [1, kv heads, length - first, D]. See ``KVPool``."""
        keys, values, key_scales, value_scales = (self._tokens(pool, row, first, blocks) for pool in self.arrays)
        widen = self._codes.decoded
        return widen(keys, key_scales, self._dtype), widen(values, value_scales, self._dtype)

    def _tokens(self, pool: mx.array, row: RowLayout, first: int, blocks: mx.array | None) -> mx.array:
        return read_tokens(pool, row, first, blocks, self._block_size)[None]

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


class FourBitKVStorage(PackedKVStorage):
    """4-bit codes, and the lower bits of the newest tokens. See ``SpanPool``."""

    def __init__(
        self, *, num_kv_heads: int, num_blocks: int, block_size: int, dtype: mx.Dtype, codes: FourBits
    ) -> None:
        super().__init__(
            num_kv_heads=num_kv_heads, num_blocks=num_blocks, block_size=block_size, dtype=dtype, codes=codes
        )
        self._form = codes
        self._made: tuple[mx.array, mx.array] | None = None  # lower bits of the last ``write``

    def write(self, slots: mx.array, keys: mx.array, values: mx.array, rests: RestArrays | None) -> None:
        """Write codes to ``slots`` [T], and lower bits to those of ``rests``."""
        assert rests is not None
        at, later = (self._heads, slots), (self._heads, rests.slots)
        self._keys[at], self._key_scales[at], lower_keys = self._form.encode_whole(keys.squeeze(2).swapaxes(0, 1))
        self._values[at], self._value_scales[at], lower = self._form.encode_whole(values.squeeze(2).swapaxes(0, 1))
        self._keys[later], self._values[later] = (mx.take(each, rests.tokens, axis=1) for each in (lower_keys, lower))
        self._made = lower_keys, lower

    def rests_at(self, slots: mx.array) -> tuple[mx.array, mx.array]:
        """See ``SpanPool``."""
        return self._keys[self._heads, slots], self._values[self._heads, slots]

    def rests_of(self, first: int, end: int) -> tuple[mx.array, mx.array]:
        """See ``SpanPool``."""
        assert self._made is not None
        keys, values = self._made
        return keys[:, first:end], values[:, first:end]

    def read_newest(
        self, row: RowLayout, first: int, blocks: mx.array | None, newest: NewestPart
    ) -> tuple[mx.array, mx.array]:
        """See ``SpanPool``."""
        keys, values, key_scales, value_scales = (self._tokens(pool, row, first, blocks) for pool in self.arrays)
        pairs = zip(((keys, key_scales), (values, value_scales)), newest.rests, strict=True)
        wide_keys, wide_values = (
            self._form.decoded_newest(codes, scales, lower[None], newest.begin - first, self._dtype, twice=newest.twice)
            for (codes, scales), lower in pairs
        )
        return wide_keys, wide_values


def packed_pool(
    *, num_kv_heads: int, head_dim: int, num_blocks: int, block_size: int, dtype: mx.Dtype, form: str
) -> PackedKVStorage:
    """Make a layer's pool; ``form``: of ``KV_FORMS``. Raises ConfigInvalid for heads that the form does not keep."""
    codes = codes_of(form, head_dim)
    sizes = {"num_kv_heads": num_kv_heads, "num_blocks": num_blocks, "block_size": block_size}
    if isinstance(codes, FourBits):
        return FourBitKVStorage(**sizes, dtype=dtype, codes=codes)
    return PackedKVStorage(**sizes, dtype=dtype, codes=codes)
