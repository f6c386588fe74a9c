"""PURE: whether a stage may compute a step before an older one.

Steps use KV blocks and slots of states. Two steps that use the same one keep the order of their plans if either of them
writes to it, and so do two steps of one sequence, whose sampler goes on from token to token. All others give the same
numbers in any order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from edgepipe.backend.types import BlockCopy, BlockRun, StepRow, TierMove
from edgepipe.spec.memory_classes import WindowPool

_CLASS_PLACES = 1 << 40  # more blocks than a pool has: each memory class has a range of places of its own


class _Places:
    """A set of places of blocks and slots, as ascending spans ``[start, end)`` that do not touch."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(spans):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def meets(self, other: _Places) -> bool:
        """Return whether both have a place."""
        few, many = sorted((self, other), key=lambda places: len(places._starts))
        for start, end in zip(few._starts, few._ends, strict=True):
            after = bisect_right(many._ends, start)  # the first span that ends behind ``start``
            if after < len(many._starts) and many._starts[after] < end:
                return True
        return False


class StepUses:
    """What a step reads and writes on a stage."""

    def __init__(
        self,
        rows: Sequence[StepRow],
        copies: Sequence[BlockCopy],
        moves: Sequence[TierMove] = (),
        *,
        block_size: int,
        windows: Sequence[WindowPool] = (),
        rest_tokens: int = 0,
    ) -> None:
        """
        windows      the windowed memory classes, in the order of the rows' tables
        rest_tokens  slots behind a row's last token that it may write and read, see ``kv_forms``
        """
        self._rows = rows
        self._copies = copies
        self._moves = moves
        self._block_size = block_size
        self._windows = windows
        self._rest_tokens = rest_tokens

    def may_pass(self, older: StepUses) -> bool:
        """Return whether this step may be computed before ``older``, whose plan came first."""
        return not (
            self._sequences & older._sequences or self._written.meets(older._used) or older._written.meets(self._used)
        )

    @cached_property
    def _sequences(self) -> frozenset[int]:
        return frozenset(row.sequence for row in self._rows)

    @cached_property
    def _written(self) -> _Places:
        return _Places(self._writes())

    @cached_property
    def _used(self) -> _Places:
        return _Places([*self._reads(), *self._writes()])

    def _writes(self) -> Iterator[tuple[int, int]]:
        for copy in self._copies:
            yield copy.target, copy.target + 1
        for move in self._moves:
            yield self._host_place(move) if move.out else self._device_place(move)
        for row in self._rows:
            first, last = row.position // self._block_size, self._last(row)
            yield from _part(row.runs, 0, first, last)
            for number, table in enumerate(row.windows, start=1):
                yield from _part(table.runs, number, first - table.first, last - table.first)
            if row.state is not None:
                yield from (self._slot(write.slot) for write in row.state.writes)

    def _reads(self) -> Iterator[tuple[int, int]]:
        for copy in self._copies:
            yield copy.source, copy.source + 1
        for move in self._moves:
            yield self._device_place(move) if move.out else self._host_place(move)
        for row in self._rows:
            last = self._last(row)
            yield from _part(row.runs, 0, 0, last)
            for number, (pool, table) in enumerate(zip(self._windows, row.windows, strict=True), start=1):
                first = pool.first_block(row.position) - table.first
                yield from _part(table.runs, number, max(0, first), last - table.first)
            if row.state is not None and row.state.read is not None:
                yield self._slot(row.state.read)

    def _last(self, row: StepRow) -> int:
        """Return the place in a sequence of the last block that a row uses."""
        return (row.position + row.num_tokens + self._rest_tokens - 1) // self._block_size

    def _slot(self, slot: int) -> tuple[int, int]:
        start = (1 + len(self._windows)) * _CLASS_PLACES + slot
        return start, start + 1

    @staticmethod
    def _device_place(move: TierMove) -> tuple[int, int]:
        start = move.number * _CLASS_PLACES + move.place
        return start, start + 1

    def _host_place(self, move: TierMove) -> tuple[int, int]:
        start = (2 + len(self._windows) + move.number) * _CLASS_PLACES + move.kept
        return start, start + 1


def _part(runs: Sequence[BlockRun], number: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of a table's blocks ``first`` to ``last``, in the memory class ``number``."""
    begin = 0
    for run in runs:
        skipped, end = max(0, first - begin), min(run.count, last + 1 - begin)
        if skipped < end:
            start = number * _CLASS_PLACES + run.start
            yield start + skipped, start + end
        begin += run.count
