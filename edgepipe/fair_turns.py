"""Round robin between owners of waiting work. PURE."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from edgepipe.errors import QueueFull

ItemT = TypeVar("ItemT", bound=Hashable)


class FairTurns(Generic[ItemT]):
    """Starts items in rounds: one of each owner in a round, and the items of an owner in order of arrival.

    An owner that had no item in this round is next, in order of arrival. So beside one owner's flood, another owner's
    item waits for a running item to end, and not for any that waits. Where ``max_of_owner`` is less than
    ``max_running``, it waits for none. (Start-time fair queueing with items of equal cost: Goyal, Vin and Cheng 1996.)
    """

    def __init__(self, *, max_running: int = 1, max_of_owner: int | None = None, max_waiting: int) -> None:
        """
        max_running   items of all owners at once
        max_of_owner  running items of one owner; None: as many as may run
        max_waiting   waiting items of one owner
        """
        self._max_running = max_running
        self._max_of_owner = max_of_owner or max_running
        self._max_waiting = max_waiting
        self._running: dict[ItemT, str] = {}  # running items and their owners
        self._lines: OrderedDict[str, deque[ItemT]] = OrderedDict()  # owners with waiting items
        self._owners: dict[ItemT, str] = {}  # owners of the waiting items
        self._round = 0  # round of the item that started last
        self._next_rounds: dict[str, int] = {}  # owners that wait or had an item in this round: of their next item

    @property
    def num_waiting(self) -> int:
        """Number of waiting items of all owners."""
        return len(self._owners)

    def enter(self, owner: str, item: ItemT) -> bool:
        """Add an item. Return whether it runs at once. Raises QueueFull if too many of its owner's items wait."""
        line = self._lines.get(owner)
        if line is not None and len(line) >= self._max_waiting:
            raise QueueFull(
                "too much work of this user waits for its turn",
                fact=f"{len(line)} items wait, at most {self._max_waiting} of one user may",
                next_step="try again in a moment",
            )
        if line is None:
            self._lines[owner] = deque()
            self._next_rounds[owner] = max(self._round, self._next_rounds.get(owner, 0))
        self._lines[owner].append(item)
        self._owners[item] = owner
        return item in self._start()

    def leave(self, item: ItemT) -> list[ItemT]:
        """Remove an item that ended or gave up. Return the items that run from now on."""
        if item in self._running:
            del self._running[item]
        else:
            owner = self._owners.pop(item)
            self._lines[owner].remove(item)
            if not self._lines[owner]:
                del self._lines[owner]
        return self._start()

    def _start(self) -> list[ItemT]:
        started: list[ItemT] = []
        while len(self._running) < self._max_running and (owners := self._startable()):
            owner = min(owners, key=self._next_rounds.__getitem__)  # among equal rounds, the owner that came first
            started.append(self._start_one(owner))
        return started

    def _startable(self) -> list[str]:
        """Return the owners with a waiting item of which one more may run, in order of arrival."""
        running = Counter(self._running.values())
        return [owner for owner in self._lines if running[owner] < self._max_of_owner]

    def _start_one(self, owner: str) -> ItemT:
        line = self._lines[owner]
        item = line.popleft()
        del self._owners[item]
        if line:
            self._lines.move_to_end(owner)
        else:
            del self._lines[owner]
        self._running[item] = owner
        self._round = self._next_rounds[owner]
        self._next_rounds[owner] = self._round + 1
        self._next_rounds = {
            each: next_round
            for each, next_round in self._next_rounds.items()
            if each in self._lines or next_round > self._round
        }
        return item
