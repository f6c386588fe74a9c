"""Turns of work that one process or a few threads do for all users: ``FairTurns`` for tasks of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from edgepipe.errors import QueueFull
from edgepipe.fair_turns import FairTurns

MAX_WAITING = 256  # items of one owner: as many requests of one key run at a time
WAIT_S = 60.0  # longest wait; clients give up by then


class UserTurns:
    """Lets tasks work in turns, one of each owner in a round."""

    def __init__(
        self,
        *,
        max_running: int = 1,
        max_of_owner: int | None = None,
        max_waiting: int = MAX_WAITING,
        wait_s: float = WAIT_S,
    ) -> None:
        """See ``FairTurns``. ``wait_s``: longest wait for a turn."""
        self._fair = FairTurns[asyncio.Event](
            max_running=max_running, max_of_owner=max_of_owner, max_waiting=max_waiting
        )
        self._wait_s = wait_s

    @property
    def num_waiting(self) -> int:
        """Number of waiting tasks of all owners."""
        return self._fair.num_waiting

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncGenerator[None]:
        """Wait for the owner's turn, and hold it. Raises QueueFull if its line is full or does not move in time."""
        begun = asyncio.Event()
        runs = self._fair.enter(owner, begun)
        try:
            if not runs:
                await self._wait(begun)
            yield
        finally:
            for other in self._fair.leave(begun):
                other.set()

    async def _wait(self, begun: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await begun.wait()
        except TimeoutError as exc:
            raise QueueFull(
                "this user's work did not get its turn in time",
                fact=f"it waited {self._wait_s:g} s, and {self.num_waiting} items of all users wait",
                next_step="try again in a moment",
            ) from exc
