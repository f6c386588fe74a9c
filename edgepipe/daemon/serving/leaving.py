"""Moves stages and engines to other nodes before this node stops or its machine sleeps, as far as time allows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from edgepipe.daemon.offers import PublishedState
from edgepipe.daemon.serving.drain import Drain

logger = logging.getLogger(__name__)

_STOP_S = 30.0  # service managers kill after 90 s (systemd), and people wait
_OUTLOOK_S = 3.0  # time to find out whether others have room, before the answer to 'node stop'
_SLEEP_S = 4.0  # operating systems delay sleep by at most 5 s, if at all


class Leaving:
    """Drains the node before it stops or sleeps."""

    def __init__(
        self,
        *,
        drain: Drain,
        stopping: asyncio.Event,
        tasks: asyncio.TaskGroup,
        announce_sleep: Callable[[], None],
        local: PublishedState,
    ) -> None:
        """``stopping`` is set when the node may stop; ``announce_sleep`` tells other nodes that the machine sleeps."""
        self.sleeps_soon = False  # part of the node's state: a machine may sleep before it announces that
        self._drain = drain
        self._stopping = stopping
        self._tasks = tasks
        self._announce_sleep = announce_sleep
        self._local = local
        self.winding_down = False  # set by the first request to stop

    def stop(self) -> None:
        """Move stages and engines to other nodes, then stop the node; a second call stops it at once."""
        if self.winding_down or not self._drain.is_needed:
            self._stopping.set()
            return
        self.winding_down = True
        self._local.refresh()
        logger.info("stages and engines move to other nodes first, for at most %.0f s", _STOP_S)
        self._tasks.create_task(self._wind_down(), name="wind-down")

    async def outlook(self) -> str:
        """Return what becomes of this node's work when it stops now; empty without work that others could take.

        The node takes no new work from then on.
        """
        if self.winding_down or not self._drain.is_needed:
            return ""
        try:
            async with asyncio.timeout(_OUTLOOK_S):
                ends = await self._drain.outlook()
        except TimeoutError:
            ends = ""
        return ends or (
            f"its work moves to other machines first, for at most {_STOP_S:.0f} s; "
            "a second 'edgepipe node stop' does not wait"
        )

    def sleep(self) -> None:
        """Drain, then announce sleep: the machine is about to sleep."""
        if not self.sleeps_soon:
            self.sleeps_soon = True
            self._local.refresh()
            self._tasks.create_task(self._fall_asleep(), name="fall-asleep")

    def stays(self) -> None:
        """Take work again: the machine has woken, or does not sleep after all."""
        if self.sleeps_soon:
            self.sleeps_soon = False
            self._drain.undo()

    async def _wind_down(self) -> None:
        try:
            await self._drain.run_within(_STOP_S)
        finally:
            self._stopping.set()

    async def _fall_asleep(self) -> None:
        if self._drain.is_needed:
            await self._drain.run_within(_SLEEP_S)
        if self.sleeps_soon:
            self._announce_sleep()
