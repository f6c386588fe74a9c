"""Sequences that wait for admission: interactive ones first, and none for ever."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from edgepipe.scheduler.kv import Key
from edgepipe.scheduler.sequence import Phase, Sequence
from edgepipe.scheduler.types import Priority


class WaitingQueue:
    """By arrival within a priority. Ended sequences are dropped when they come up.

    A *parked* sequence waits for a block that another one computes; meanwhile those behind it are first.
    """

    def __init__(self) -> None:
        self._heaps: dict[Priority, list[tuple[int, Sequence]]] = {priority: [] for priority in Priority}
        self._parked: dict[Key, list[Sequence]] = {}  # by the block that they wait for
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_entries(self) -> int:
        """Waiting sequences and ended ones that are still to be dropped."""
        return sum(map(len, self._heaps.values())) + sum(map(len, self._parked.values()))

    @property
    def any_parked(self) -> bool:
        """Whether some wait for blocks that others compute."""
        return bool(self._parked)

    def push(self, sequence: Sequence) -> None:
        """Let it wait, by its arrival: who was preempted is before those who came later."""
        sequence.phase = Phase.WAITING
        heapq.heappush(self._heaps[sequence.priority], (sequence.arrival, sequence))
        self._num_waiting += 1

    def first(self) -> Sequence | None:
        """Who is next among those that are not parked."""
        return self._first_of(Priority.INTERACTIVE) or self._first_of(Priority.BATCH)

    def pop(self) -> Sequence:
        """Take who is next; batch sequences that it passes get older. Raises IndexError if none waits."""
        sequence = self._take()
        self._num_waiting -= 1
        if sequence.priority is Priority.INTERACTIVE:
            self._age()
        return sequence

    def park(self, key: Key) -> None:
        """Set who is next aside until ``wake`` finds that the block with this key is not awaited any more."""
        self._parked.setdefault(key, []).append(self._take())

    def wake(self, is_coming: Callable[[Key], bool]) -> bool:
        """Put those back in their places whose blocks are not coming any more: computed, or given up. Whether any."""
        over = [key for key in self._parked if not is_coming(key)]
        for key in over:
            for sequence in self._parked.pop(key):
                heapq.heappush(self._heaps[sequence.priority], (sequence.arrival, sequence))
        return bool(over)

    def note_ended(self) -> None:
        """One that waits has ended. Drops such before those who submit and cancel all day make the queue grow."""
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
        """The first of the batch sequences was passed."""
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
