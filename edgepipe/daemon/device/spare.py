"""A stage process that has measured its device and imported its backend, ready to load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from edgepipe.backend.types import DeviceProfile
from edgepipe.daemon.machine.backends import NONE
from edgepipe.daemon.offers import ChildSetup, PublishedState
from edgepipe.daemon.processes.children import Child, Children
from edgepipe.errors import BackendUnavailable, EdgepipeError

logger = logging.getLogger(__name__)

# Shortest and longest pause between attempts while a spare crashes at its start.
_RESTART_MIN_S, _RESTART_MAX_S = 0.5, 30.0
# Pause after a backend that cannot run: its driver may load later, or a package may be installed.
_UNAVAILABLE_S = 600.0
SETTLED_S = 3.0  # another spare starts only after a pipeline's first steps, or a recovery's


@dataclass(kw_only=True, eq=False)
class SpareStage:
    """Keeps a spare while the device holds nothing, and beside serving stages where memory allows."""

    node_name: str
    backend: str
    children: Children
    setup: ChildSetup
    tasks: asyncio.TaskGroup
    on_measured: Callable[[DeviceProfile], None]  # takes the device's profile when a new spare has reported it
    local: PublishedState
    settled_s: float = SETTLED_S  # pause before another spare starts
    unavailable_s: float = _UNAVAILABLE_S  # pause before a backend is tried that cannot run

    def __post_init__(self) -> None:
        self._child: Child | None = None
        self._profile: DeviceProfile | None = None
        self._error: EdgepipeError | None = None
        self._taken = asyncio.Event()
        self._alone = asyncio.Event()  # a spare has measured the device while the device held nothing
        self._vacant = asyncio.Event()  # the device holds nothing
        self._vacant.set()
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._closed = False

    @property
    def child(self) -> Child | None:
        """The spare process, once it is ready."""
        return self._child

    @property
    def profile(self) -> DeviceProfile | None:
        """The device's newest profile; None before the first measurement."""
        return self._profile

    @property
    def error(self) -> EdgepipeError | None:
        """Why the device cannot compute; None if it can, or has not been tried."""
        return self._error

    async def keep(self) -> None:
        """Start a spare whenever one is wanted, until cancelled."""
        wait_s = _RESTART_MIN_S
        while self.backend != NONE and not self._closed:
            await self._wanted.wait()
            if not self._vacant.is_set():
                await asyncio.sleep(self.settled_s)
                if self._closed or not self._wanted.is_set():
                    continue
            try:
                await self._life()
                wait_s = _RESTART_MIN_S
            except EdgepipeError as error:
                if self._closed:
                    return
                if self._is_lasting(error.on_node(self.node_name)):
                    await asyncio.sleep(self.unavailable_s)
                else:
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, _RESTART_MAX_S)

    def holding(self, *, anything: bool, spare_wanted: bool) -> None:
        """Take a change of the held stages."""
        for event, holds in ((self._vacant, not anything), (self._wanted, spare_wanted)):
            if holds:
                event.set()
            else:
                event.clear()

    async def alone(self, within_s: float) -> Child | None:
        """Return the spare of a device that holds nothing; wait while it starts. Return None while the device holds
        something or cannot compute, and when no spare comes in time."""
        if self._vacant.is_set() and self._error is None and not self._closed:
            await _first_of(self._alone, timeout_s=within_s)
        return self._child if self._alone.is_set() else None

    async def take(self) -> Child:
        """Take the spare, or start a new process without one. Raises the reason of its end."""
        spare = self._vacate()
        self._taken.set()
        return spare or await self._start()

    def close(self) -> None:
        """Start no further spare."""
        self._closed = True

    async def _life(self) -> None:
        """Start a spare and wait until it is taken or replaced. Raises the reason if its process ends before."""
        beside = not self._vacant.is_set()
        spare = await self._start()
        self._error = None
        self._taken.clear()
        self._child = spare
        if not beside:
            self._alone.set()
        assert self._profile is not None
        self.on_measured(self._profile)
        self.local.refresh()
        while not spare.exited.is_set():
            await _first_of(spare.exited, self._taken, *([self._vacant] if beside else ()))
            if self._child is not spare:
                return
            await _first_of(spare.exited, self._taken, timeout_s=self.settled_s)
            if self._child is spare and self._vacant.is_set() and not spare.exited.is_set():
                self._vacate()  # free memory may have changed meanwhile: the next spare measures it
                self.local.refresh()
                await self.children.stop(spare)
                return
        if self._child is spare:
            self._vacate()
            raise spare.error()

    def _vacate(self) -> Child | None:
        """Forget the spare and return it."""
        spare, self._child = self._child, None
        self._alone.clear()
        return spare

    async def _start(self) -> Child:
        """Start a process that measures the device. Beside a stage it takes the known profile, so as not to disturb."""
        settings = self.setup.child_settings("stage")
        if not self._vacant.is_set() and self._profile is not None:
            settings = replace(settings, device_profile=self._profile)
        child = await self.children.start(settings, self.tasks)
        self._profile = (await self.children.wait_started(child)).profile
        return child

    def _is_lasting(self, error: EdgepipeError) -> bool:
        """Note why no spare has started; return whether another attempt can wait long."""
        if not self._vacant.is_set():  # the device works; only some resource is short
            logger.warning("no spare stage backend=%s: %s", self.backend, error)
            return False
        known = self._error is not None and (self._error.code, self._error.fact) == (error.code, error.fact)
        logger.log(logging.DEBUG if known else logging.ERROR, "device failed backend=%s: %s", self.backend, error)
        self._error = error
        self.local.refresh()
        return isinstance(error, BackendUnavailable)


async def _first_of(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Wait until one of the events is set, at most ``timeout_s``."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
