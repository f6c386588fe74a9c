"""Acts before and after sleep: reports it to other nodes, and stops work that was replaced meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from edgepipe.cluster.sleep import BootClock, SleepWatch

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_FALL_ASLEEP_S = 30.0  # a machine that announced sleep and has not slept by then stays awake


class SleepGuard:
    """Detects sleep by the clocks (``run``); the system announces it in advance (``announce``)."""

    def __init__(
        self, clock: BootClock, *, tell: Callable[[bool], None], on_wake: Callable[[float], Awaitable[None]]
    ) -> None:
        """``tell(sleeping)``: reports to the other nodes; ``on_wake(slept_s)``: the machine has slept and is back."""
        self._clock = clock
        self._watch = SleepWatch(clock)
        self._tell = tell
        self._on_wake = on_wake
        self._announced_at_s: float | None = None

    def announce(self) -> None:
        """Report that the machine is about to sleep."""
        logger.info("the machine is about to sleep")
        self._announced_at_s = self._clock.monotonic_s()
        self._tell(True)

    async def run(self) -> None:
        """Check the clocks until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Check the clocks once, and act on what they show."""
        slept_s = self._watch.slept_s()
        announced_at_s = self._announced_at_s
        stays_awake = announced_at_s is not None and self._clock.monotonic_s() - announced_at_s >= _FALL_ASLEEP_S
        if self._announced_at_s is not None and (slept_s or stays_awake):
            self._announced_at_s = None
            self._tell(False)
        if slept_s:
            logger.warning("the machine slept for %.0f s", slept_s)
            await self._on_wake(slept_s)
