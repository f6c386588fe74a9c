"""Keeps which tokens a draft model has computed, and in which blocks. PURE.

A question brings all of a sequence's tokens. The slot whose tokens begin like them goes on: the tokens that differ,
such as guesses that were wrong, are dropped, and their places are written again. So a question needs no sequence, and
cancelled answers, second turns and new processes need no message. Other sequences' slots stay until blocks run out;
then the slot that was used least recently gives its blocks back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import BlockRun

Tokens = npt.NDArray[np.int32]

_MOST_SLOTS = 8
_MOST_DROPPED = 16  # tokens that a sequence drops at most: more than a window has drafts
_GROWTH_TOKENS = 256  # a slot gets blocks for so many tokens at once, so that its blocks are neighbours


@dataclass(slots=True, eq=False)
class Slot:
    """Tokens of one sequence whose keys and values the draft model has."""

    number: int
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, np.int32))
    blocks: list[int] = field(default_factory=list[int])
    used_at: int = 0  # number of the question that used it last

    @property
    def runs(self) -> tuple[BlockRun, ...]:
        """The block table from token 0, neighbours merged."""
        return tuple(_runs(self.blocks))


class DraftSlots:
    """The slots of one draft model's KV pool."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = list(range(num_blocks))  # ascending
        self._num_blocks = num_blocks
        self.slots: list[Slot] = []
        self._questions = 0

    def begin(self, tokens: Tokens, room: int) -> Slot | None:
        """Return the slot for a sequence, with blocks for ``room`` tokens. Its tokens are a part of ``tokens`` then.

        At least the last one of ``tokens`` is left to compute. None if the pool is smaller than ``room`` tokens.
        """
        if -(-room // self._block_size) > self._num_blocks:
            return None
        self._questions += 1
        slot = self._chosen(tokens)
        slot.used_at = self._questions
        slot.tokens = slot.tokens[: min(_common(slot.tokens, tokens), len(tokens) - 1)]
        self._give_blocks(slot, room)
        return slot

    def _chosen(self, tokens: Tokens) -> Slot:
        """Return the slot that goes on, else a new one, else the one used least recently."""
        nearest = max(self.slots, key=lambda slot: _common(slot.tokens, tokens), default=None)
        if nearest is not None and len(nearest.tokens) - _common(nearest.tokens, tokens) <= _MOST_DROPPED:
            return nearest
        if len(self.slots) < _MOST_SLOTS:
            self.slots.append(Slot(len(self.slots)))
            return self.slots[-1]
        return min(self.slots, key=lambda slot: slot.used_at)

    def _give_blocks(self, slot: Slot, room: int) -> None:
        lacking = -(-room // self._block_size) - len(slot.blocks)
        if lacking <= 0:
            return
        for other in sorted(self.slots, key=lambda each: each.used_at):
            if len(self._free) >= lacking:
                break
            if other is not slot:
                self._drop(other)
        count = min(len(self._free), max(lacking, _GROWTH_TOKENS // self._block_size))
        slot.blocks += self._free[:count]
        del self._free[:count]

    def _drop(self, slot: Slot) -> None:
        self._free = sorted([*self._free, *slot.blocks])
        slot.tokens, slot.blocks = slot.tokens[:0], []


def _common(a: Tokens, b: Tokens) -> int:
    """Return the number of equal tokens at the beginning."""
    shorter = min(len(a), len(b))
    other = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(other[0]) if len(other) else shorter


def _runs(blocks: Iterable[int]) -> list[BlockRun]:
    runs: list[BlockRun] = []
    for block in blocks:
        if runs and runs[-1].start + runs[-1].count == block:
            runs[-1] = BlockRun(runs[-1].start, runs[-1].count + 1)
        else:
            runs.append(BlockRun(block, 1))
    return runs
