"""Sequences that wait for admission: interactive ones first, and nobody for ever."""

from __future__ import annotations

import heapq

from edgepipe.scheduler.sequence import Phase, Sequence
from edgepipe.scheduler.types import Priority

_MAX_OVERTAKEN = 8  # a batch sequence lets this many interactive ones pass, then it counts as one


class WaitingQueue:
    """By arrival within a priority. Ended sequences are dropped when they come up."""

    def __init__(self) -> None:
        self._heaps: dict[Priority, list[tuple[int, Sequence]]] = {priority: [] for priority in Priority}
        self._num_waiting = 0
        self._overtaken = 0  # how often the first of the batch sequences was passed

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_entries(self) -> int:
        """Waiting sequences and ended ones that are still to be dropped."""
        return sum(map(len, self._heaps.values()))

    def push(self, sequence: Sequence) -> None:
        """Let it wait, by its arrival: who was preempted is before those who came later."""
        sequence.phase = Phase.WAITING
        heapq.heappush(self._heaps[sequence.priority], (sequence.arrival, sequence))
        self._num_waiting += 1

    def first(self) -> Sequence | None:
        """Who is next."""
        return self._first_of(Priority.INTERACTIVE) or self._first_of(Priority.BATCH)

    def pop(self) -> Sequence:
        """Take who is next. Raises IndexError if nobody waits."""
        sequence = self.first()
        if sequence is None:
            raise IndexError("nobody waits")
        heapq.heappop(self._heaps[sequence.priority])
        self._num_waiting -= 1
        self._age(sequence)
        return sequence

    def note_ended(self) -> None:
        """One that waits has ended. Drops such before those who submit and cancel all day make the queue grow."""
        self._num_waiting -= 1
        if self.num_entries > 2 * self._num_waiting + 64:
            for heap in self._heaps.values():
                heap[:] = [entry for entry in heap if entry[1].phase is Phase.WAITING]
                heapq.heapify(heap)

    def _age(self, admitted: Sequence) -> None:
        overtaken = None if admitted.priority is Priority.BATCH else self._first_of(Priority.BATCH)
        self._overtaken = 0 if overtaken is None else self._overtaken + 1
        if overtaken is not None and self._overtaken >= _MAX_OVERTAKEN:
            heapq.heappop(self._heaps[Priority.BATCH])
            overtaken.priority = Priority.INTERACTIVE
            heapq.heappush(self._heaps[Priority.INTERACTIVE], (overtaken.arrival, overtaken))
            self._overtaken = 0

    def _first_of(self, priority: Priority) -> Sequence | None:
        heap = self._heaps[priority]
        while heap and heap[0][1].phase is not Phase.WAITING:
            heapq.heappop(heap)
        return heap[0][1] if heap else None
