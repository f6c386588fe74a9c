"""Pools of latent attention: one vector per token, whose first dimensions are the value."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from edgepipe.backend.step_layout import RowLayout
from edgepipe.backend.types import BlockCopy
from edgepipe.spec.layer_spec import Attention
from edgepipe_mlx.kv import KVPool, NewestPart, Paged, RestArrays, copied_slots, head_rows, independent, read_tokens
from edgepipe_mlx.kv_codes import FourBits, KVCodes, codes_of


class LatentStorage:
    """Arrays [1, slots, n], one slot per token: vectors, or their codes and scales. See ``KVPool``."""

    def __init__(
        self,
        arrays: Sequence[mx.array],
        codes: KVCodes | None,
        *,
        value_width: int,
        block_size: int,
        dtype: mx.Dtype,
    ) -> None:
        """
        arrays  vectors; or codes, and scales
        codes   their form; None: vectors
        dtype   of what ``read`` returns
        """
        self._pools = tuple(arrays)
        self._codes = codes
        self._value_width = value_width
        self._block_size = block_size
        self._dtype = dtype
        self._heads = head_rows(1)
        mx.eval(self._pools)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Vectors, or codes and scales."""
        return self._pools

    @property
    def paged(self) -> Paged:
        """See ``KVPool``."""
        keys, *scales = self._pools
        return Paged(keys, keys, (scales[0], scales[0]) if scales else None)

    def write(self, slots: mx.array, keys: mx.array, values: mx.array, rests: RestArrays | None) -> None:
        """Write keys [T, 1, 1, D] to ``slots`` [T]; ``values`` are a part of them. See ``KVPool``."""
        own = keys.squeeze(2).swapaxes(0, 1)
        made = (own,) if self._codes is None else self._codes.encode(own)
        for pool, written in zip(self._pools, made, strict=True):
            pool[self._heads, slots] = written

    def read(self, row: RowLayout, first: int, blocks: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return keys [1, 1, length - first, D] and the values among them. See ``KVPool``."""
        found = [read_tokens(pool, row, first, blocks, self._block_size)[None] for pool in self._pools]
        keys = found[0] if self._codes is None else self._codes.decoded(found[0], found[1], self._dtype)
        return keys, keys[..., : self._value_width]

    def turned(self, vectors: mx.array) -> mx.array:
        """See ``KVPool.turned``."""
        return vectors if self._codes is None else self._codes.turned(vectors)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks. See ``KVStorage.copy``."""
        for wave in independent(copies):
            sources, targets = copied_slots(wave, self._block_size)
            copied = [pool[self._heads, sources] for pool in self._pools]
            mx.eval(copied)
            for pool, values in zip(self._pools, copied, strict=True):
                pool[self._heads, targets] = values


class FourBitLatentStorage(LatentStorage):
    """4-bit codes and their scales, and the lower bits of the newest tokens. See ``SpanPool``."""

    def __init__(
        self, arrays: Sequence[mx.array], codes: FourBits, *, value_width: int, block_size: int, dtype: mx.Dtype
    ) -> None:
        super().__init__(arrays, codes, value_width=value_width, block_size=block_size, dtype=dtype)
        self._form = codes
        self._made: mx.array | None = None  # lower bits of the last ``write``

    def write(self, slots: mx.array, keys: mx.array, values: mx.array, rests: RestArrays | None) -> None:
        """Write codes to ``slots`` [T], and lower bits to those of ``rests``."""
        assert rests is not None
        codes, scales = self._pools
        made = self._form.encode_whole(keys.squeeze(2).swapaxes(0, 1))
        codes[self._heads, slots], scales[self._heads, slots], self._made = made
        codes[self._heads, rests.slots] = mx.take(self._made, rests.tokens, axis=1)

    def rests_at(self, slots: mx.array) -> tuple[mx.array]:
        """See ``SpanPool``."""
        return (self._pools[0][self._heads, slots],)

    def rests_of(self, first: int, end: int) -> tuple[mx.array]:
        """See ``SpanPool``."""
        assert self._made is not None
        return (self._made[:, first:end],)

    def read_newest(
        self, row: RowLayout, first: int, blocks: mx.array | None, newest: NewestPart
    ) -> tuple[mx.array, mx.array]:
        """See ``SpanPool``."""
        codes, scales = (read_tokens(pool, row, first, blocks, self._block_size)[None] for pool in self._pools)
        (rests,) = newest.rests
        keys = self._form.decoded_newest(
            codes, scales, rests[None], newest.begin - first, self._dtype, twice=newest.twice
        )
        return keys, keys[..., : self._value_width]


def latent_pool(spec: Attention, *, num_blocks: int, block_size: int, dtype: mx.Dtype, form: str) -> KVPool:
    """Make a layer's pool; ``form``: of ``KV_FORMS``, or empty."""
    slots = (1, num_blocks * block_size)
    codes = codes_of(form, spec.head_dim, spec.latent_width) if form else None
    kinds = [(spec.head_dim, dtype)] if codes is None else codes.kinds
    arrays = [mx.zeros((*slots, width), kind) for width, kind in kinds]
    if isinstance(codes, FourBits):
        return FourBitLatentStorage(arrays, codes, value_width=spec.latent_width, block_size=block_size, dtype=dtype)
    return LatentStorage(arrays, codes, value_width=spec.latent_width, block_size=block_size, dtype=dtype)
