"""Weights of K types as the Metal kernels read them, made with numpy alone. See ``products.metal``.

Codes are packed as ``mx.quantize`` does, so that MLX's own products can read them, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgepipe.spec.packed import Packed
from edgepipe_mlx.packing import Words, pack_bits, row_chunks

BLOCK = 256  # inputs that share a base


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForm:
    """What the kernels are compiled for."""

    bits: int  # bits of a code: 4, 5 or 6
    group: int  # inputs that share a factor: 16 or 32
    added: bool  # groups have offsets
    zero: int  # subtracted from codes; 0 with offsets

    @property
    def groups(self) -> int:
        """Groups of a block."""
        return BLOCK // self.group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockWeight:
    """A weight [O, I]; B blocks of a row."""

    form: BlockForm
    words: Words  # [O, I * bits / 32]
    factors: npt.NDArray[
        Any
    ]  # [O, B * groups] uint8 or int8; with offsets [O, B * 2 * groups], theirs behind a block's
    bases: npt.NDArray[np.float16]  # [O, B]; with offsets [O, B * 2], theirs behind


def lay_out_blocks(packed: Packed) -> BlockWeight:
    """Convert a weight of which ``keeps_blocks`` is true, without rounding."""
    form, rows = packed.form, packed.shape[0]
    blocks = packed.shape[1] // BLOCK
    if form.bits == 4:
        words = packed.low.view(np.uint32)  # the same order
    else:
        words = np.empty((rows, packed.shape[1] * form.bits // 32), np.uint32)
        for chunk in row_chunks(packed.shape):
            words[chunk] = pack_bits(packed.rows(chunk).codes(), form.bits)
    values = [packed.scale] if packed.offset is None else [packed.scale, packed.offset]
    factors = [each.factor.reshape(rows, blocks, -1) for each in values if each.factor is not None]
    zero = packed.zero or 0
    assert isinstance(zero, int)
    return BlockWeight(
        form=BlockForm(bits=form.bits, group=form.group, added=packed.offset is not None, zero=zero),
        words=words,
        factors=np.concatenate(factors, axis=2).reshape(rows, -1),
        bases=np.stack([each.base for each in values], axis=2).reshape(rows, -1),
    )
