"""Idle KV of one epoch on one stage: what the device's places hold, and the tiers in host memory and on disk below."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from edgepipe.backend.types import TierMove
from edgepipe.errors import RemoteProtocolError
from edgepipe.stage.disk_tier import DiskTier
from edgepipe.stage.held_keys import BegunMove, HeldKeys
from edgepipe.stage.host_watch import HostWatch
from edgepipe.stage.reports import Reports
from edgepipe.wire.pipelines import PipelineSpec
from edgepipe.wire.plans import StepPlan
from edgepipe.wire.tiers import DiskCopies, HostRoom, NewKeys, PlacesBack, place_keys


class EpochTiers:
    """Obeys the engine's commands for idle KV. Runs on the loop, but for ``ended``."""

    def __init__(
        self,
        spec: PipelineSpec,
        tasks: asyncio.TaskGroup,
        reports: Reports,
        *,
        disk: DiskTier | None,
        host: HostWatch | None,
        held: HeldKeys | None,
        cannot_obey: Callable[[Exception], None],
    ) -> None:
        """
        disk         below host memory; None: without one
        host         watches host memory below the device; None: it keeps its size
        held         what this stage keeps; None: no engine asks
        cannot_obey  takes the error of a command that fails later
        """
        self._spec = spec
        self._tasks = tasks
        self._reports = reports
        self._disk, self._host, self._held = disk, host, held
        self._cannot_obey = cannot_obey
        self._closed = False
        if disk is not None:
            disk.begin_epoch()

    def start(self) -> None:
        """Watch host memory from now on."""
        if self._host is not None:
            self._tasks.create_task(self._host.run(self.report_host_room), name="stage-host-memory")

    async def report_held(self) -> None:
        """Report what this stage holds, if the engine asks for it."""
        if self._spec.asks_held and self._held is not None:
            for page in await asyncio.to_thread(self._held.pages, self._spec.epoch):
                self._reports.held(page)

    def report_host_room(self) -> None:
        """Report how much of host memory may be used."""
        if (host := self._host) is not None:
            room = HostRoom(epoch=self._spec.epoch, permille=host.permille, available_bytes=host.available_bytes)
            self._reports.host_room(room)

    def copy(self, copies: DiskCopies) -> None:
        """Copy places between host memory and disk, and report when that is done. Raises RemoteProtocolError."""
        if self._disk is None:
            raise RemoteProtocolError("the engine names places on disk, and this stage has none")
        if self._host is not None and copies.memory_class < len(self._spec.host_places):
            self._host.copied(copies)
        self._tasks.create_task(self._perform(self._disk, copies), name="stage-disk")

    async def _perform(self, disk: DiskTier, copies: DiskCopies) -> None:
        try:
            copied = await disk.perform(copies)
        except RemoteProtocolError as exc:
            self._cannot_obey(exc)
            return
        if not self._closed:
            self._reports.disk(copied)

    def give_back(self, back: PlacesBack) -> None:
        """Give the memory of places back to the system. Raises RemoteProtocolError."""
        if self._host is None:
            raise RemoteProtocolError("the engine names places to give back, and this stage has none")
        self._host.give_back(back)
        if self._held is not None:
            self._held.give_back(back.memory_class, back.places)

    def name(self, new: NewKeys) -> None:
        """Note the keys of what places hold."""
        if self._held is not None:
            self._held.name(place_keys(new.key_class, new.key_place, new.keys))

    def planned(self, plan: StepPlan) -> None:
        """Note the keys that a plan brings."""
        if self._held is not None and plan.keys:
            self._held.name(plan.keys)

    def moved(self, moves: Sequence[TierMove]) -> None:
        """Note moves that a step of this stage performs."""
        if self._host is not None and moves:
            self._host.moved(moves)

    def ended(self, moves: Sequence[BegunMove]) -> None:
        """Note moves that a computed step has performed. Called on the compute thread."""
        if self._held is not None and moves:
            self._held.end(moves)

    def close(self) -> None:
        """Leave copies that have not begun. Another epoch may have begun when a second call comes."""
        if self._disk is not None and not self._closed:
            self._disk.begin_epoch()
        self._closed = True
