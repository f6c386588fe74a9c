"""Before and after the machine sleeps: others are told, and on waking nothing runs on that was replaced meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from edgepipe.cluster.sleep import BootClock, SleepWatch

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_FALL_ASLEEP_S = 30.0  # announced and not slept by then: it stays awake


class SleepGuard:
    """``run`` looks at the clocks; ``announce`` is the system's word that sleep is near."""

    def __init__(
        self, clock: BootClock, *, tell: Callable[[bool], None], on_wake: Callable[[float], Awaitable[None]]
    ) -> None:
        """``tell(sleeping)``: others shall know; ``on_wake(slept_s)``: the machine has slept and is back."""
        self._clock = clock
        self._watch = SleepWatch(clock)
        self._tell = tell
        self._on_wake = on_wake
        self._announced_at_s: float | None = None

    def announce(self) -> None:
        """The machine is about to sleep."""
        logger.info("the machine is about to sleep")
        self._announced_at_s = self._clock.monotonic_s()
        self._tell(True)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """One look at the clocks, and what follows from it."""
        slept_s = self._watch.slept_s()
        announced_at_s = self._announced_at_s
        stays_awake = announced_at_s is not None and self._clock.monotonic_s() - announced_at_s >= _FALL_ASLEEP_S
        if self._announced_at_s is not None and (slept_s or stays_awake):
            self._announced_at_s = None
            self._tell(False)
        if slept_s:
            logger.warning("the machine slept for %.0f s", slept_s)
            await self._on_wake(slept_s)
