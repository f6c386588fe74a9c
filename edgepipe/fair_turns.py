"""Round robin between owners of waiting work. PURE."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from edgepipe.errors import QueueFull

ItemT = TypeVar("ItemT", bound=Hashable)


class FairTurns(Generic[ItemT]):
    """Starts items in turns: one of each owner that waits, then the next of each.

    Items of one owner start in the order of their arrival. So an item at the head of its owner's line waits until a
    running item ends, and then for at most one item of each other owner, however many items the others have.
    """

    def __init__(self, *, max_running: int = 1, max_waiting: int) -> None:
        """``max_running``: items of all owners at once. ``max_waiting``: waiting items of one owner."""
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._running: set[ItemT] = set()
        self._lines: OrderedDict[str, deque[ItemT]] = OrderedDict()  # owners with waiting items, the next one first
        self._owners: dict[ItemT, str] = {}  # of the waiting items

    @property
    def num_waiting(self) -> int:
        """Number of waiting items of all owners."""
        return len(self._owners)

    def enter(self, owner: str, item: ItemT) -> bool:
        """Add an item. Return whether it runs at once. Raises QueueFull if too many of its owner's items wait."""
        if not self._lines and len(self._running) < self._max_running:
            self._running.add(item)
            return True
        line = self._lines.get(owner, ())
        if len(line) >= self._max_waiting:
            raise QueueFull(
                "too much work of this user waits for its turn",
                fact=f"{len(line)} items wait, at most {self._max_waiting} of one user may",
                next_step="try again in a moment",
            )
        self._lines.setdefault(owner, deque()).append(item)
        self._owners[item] = owner
        return False

    def leave(self, item: ItemT) -> list[ItemT]:
        """Remove an item that ended or gave up. Return the items that run from now on."""
        if item in self._running:
            self._running.remove(item)
        else:
            owner = self._owners.pop(item)
            self._lines[owner].remove(item)
            if not self._lines[owner]:
                del self._lines[owner]
        started: list[ItemT] = []
        while self._lines and len(self._running) < self._max_running:
            started.append(self._start_next())
        return started

    def _start_next(self) -> ItemT:
        owner, line = next(iter(self._lines.items()))
        item = line.popleft()
        del self._owners[item]
        if line:
            self._lines.move_to_end(owner)
        else:
            del self._lines[owner]
        self._running.add(item)
        return item
