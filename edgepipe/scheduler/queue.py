"""Queue of sequences that wait for admission: interactive ones first, none for ever."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from edgepipe.scheduler.kv import Key
from edgepipe.scheduler.sequence import Phase, Sequence
from edgepipe.scheduler.types import Priority


class WaitingQueue:
    """Priority queue, ordered by arrival within a priority. It drops ended sequences when they reach the head.

    A *parked* sequence waits for a block that another sequence computes; meanwhile the sequences behind it may pass.
    """

    def __init__(self) -> None:
        self._heaps: dict[Priority, list[tuple[int, Sequence]]] = {priority: [] for priority in Priority}
        self._parked: dict[Key, list[Sequence]] = {}  # sequences by the key of the block that they await
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_entries(self) -> int:
        """Number of entries: waiting sequences, and ended ones not yet dropped."""
        return sum(map(len, self._heaps.values())) + sum(map(len, self._parked.values()))

    @property
    def any_parked(self) -> bool:
        """Whether sequences wait for blocks that others compute."""
        return bool(self._parked)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence at the place of its arrival: a preempted sequence goes before later ones."""
        sequence.phase = Phase.WAITING
        heapq.heappush(self._heaps[sequence.priority], (sequence.arrival, sequence))
        self._num_waiting += 1

    def first(self) -> Sequence | None:
        """Return the next sequence that is not parked, or None."""
        return self._first_of(Priority.INTERACTIVE) or self._first_of(Priority.BATCH)

    def pop(self) -> Sequence:
        """Remove and return the next sequence; age the batch sequence that it passes. Raises IndexError if empty."""
        sequence = self._take()
        self._num_waiting -= 1
        if sequence.priority is Priority.INTERACTIVE:
            self._age()
        return sequence

    def park(self, key: Key) -> None:
        """Park the next sequence until ``wake`` has this key."""
        self._parked.setdefault(key, []).append(self._take())

    def wake(self, keys: Iterable[Key]) -> None:
        """Requeue the sequences that wait for blocks with these keys, which are computed or given up."""
        for key in keys:
            for sequence in self._parked.pop(key, ()):
                heapq.heappush(self._heaps[sequence.priority], (sequence.arrival, sequence))

    def note_ended(self) -> None:
        """Count a waiting sequence that ended. Drops ended entries once they are the majority, to bound memory."""
        self._num_waiting -= 1
        if self.num_entries > 2 * self._num_waiting + 64:
            for heap in self._heaps.values():
                heap[:] = [entry for entry in heap if entry[1].phase is Phase.WAITING]
                heapq.heapify(heap)
            for key, parked in list(self._parked.items()):
                self._parked[key] = [sequence for sequence in parked if sequence.phase is Phase.WAITING]

    def _take(self) -> Sequence:
        sequence = self.first()
        if sequence is None:
            raise IndexError("no sequence waits")
        heapq.heappop(self._heaps[sequence.priority])
        return sequence

    def _age(self) -> None:
        """Count the pass for the first batch sequence."""
        batch = self._first_of(Priority.BATCH)
        if batch is None:
            return
        batch.note_overtaken()
        if batch.priority is Priority.INTERACTIVE:
            heapq.heappop(self._heaps[Priority.BATCH])
            heapq.heappush(self._heaps[Priority.INTERACTIVE], (batch.arrival, batch))

    def _first_of(self, priority: Priority) -> Sequence | None:
        heap = self._heaps[priority]
        while heap and heap[0][1].phase is not Phase.WAITING:
            heapq.heappop(heap)
        return heap[0][1] if heap else None
