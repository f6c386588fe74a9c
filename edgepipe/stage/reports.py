"""A stage's reports to its engine, in order, over one Control stream."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc.aio

from edgepipe.errors import EdgepipeError
from edgepipe.ids import Epoch
from edgepipe.link.serving import Replies
from edgepipe.wire.codec import to_wire
from edgepipe.wire.common import epoch_to_wire
from edgepipe.wire.errors import error_to_wire
from edgepipe.wire.reports import Drafted, HomeTokens, LinkSample, StageTimings, StepDone, StepTiming, done_to_wire
from edgepipe.wire.tiers import DiskCopied, HeldPlaces, HostRoom
from edgepipe.wire.v1 import stage_pb2

TIMINGS_EVERY_S = 0.1
_MAX_TIMINGS = 1024  # most timings between two reports; drops the oldest


class Reports:
    """Queue of reports for the stream's writer. The steps in flight bound its length."""

    def __init__(self) -> None:
        self._reports: deque[stage_pb2.StageReport] = deque()
        self._due = asyncio.Event()
        self._ends = False
        self._timings: deque[StepTiming] = deque(maxlen=_MAX_TIMINGS)
        self._links: deque[LinkSample] = deque(maxlen=_MAX_TIMINGS)
        self._home: deque[HomeTokens] = deque(maxlen=_MAX_TIMINGS)
        self._timer: asyncio.TimerHandle | None = None

    def opened(self, epoch: Epoch, *, kv_since: Epoch) -> None:
        """Report that the stage accepts plans. Its KV holds all that the engine's steps wrote since ``kv_since``."""
        opened = stage_pb2.Opened(epoch=epoch_to_wire(epoch), kv_since=epoch_to_wire(kv_since))
        self._put(stage_pb2.StageReport(opened=opened))

    def held(self, page: HeldPlaces) -> None:
        """Report what some places below the device hold."""
        self._put(stage_pb2.StageReport(held=to_wire(page, stage_pb2.HeldPlaces)))

    def home_opened(self, epoch: Epoch) -> None:
        """Report that the stage that embeds takes this stage's tokens."""
        self._put(stage_pb2.StageReport(home_opened=stage_pb2.HomeOpened(epoch=epoch_to_wire(epoch))))

    def disk(self, copied: DiskCopied) -> None:
        """Report what became of copies between host memory and the disk."""
        self._put(stage_pb2.StageReport(disk=to_wire(copied, stage_pb2.DiskCopied)))

    def host_room(self, room: HostRoom) -> None:
        """Report how much of its host memory the stage may use."""
        self._put(stage_pb2.StageReport(host_room=to_wire(room, stage_pb2.HostRoom)))

    def done(self, done: StepDone) -> None:
        """Report a retired step."""
        self._put(done_to_wire(done))

    def drafted(self, drafted: Drafted) -> None:
        """Report drafts for windows in flight."""
        self._put(stage_pb2.StageReport(drafted=to_wire(drafted, stage_pb2.Drafted)))

    def timing(self, timing: StepTiming) -> None:
        """Report a computed step's timing, within 100 ms."""
        self._timings.append(timing)
        self._arm()

    def link(self, sample: LinkSample) -> None:
        """Report a step's arrival at the next stage, within 100 ms."""
        self._links.append(sample)
        self._arm()

    def home(self, tokens: HomeTokens) -> None:
        """Report the tokens that came for the steps after one, within 100 ms."""
        self._home.append(tokens)
        self._arm()

    def fault(
        self,
        error: EdgepipeError,
        *,
        crashed_step: int = 0,
        device_failed: bool = False,
        next_unreached: bool = False,
    ) -> None:
        """Report the end of the epoch and its reason. This is the last report."""
        fault = error_to_wire(error)
        self._put(
            stage_pb2.StageReport(
                fault=fault, crashed_step=crashed_step, device_failed=device_failed, next_unreached=next_unreached
            )
        )
        self.finish()

    def finish(self) -> None:
        """End the reports."""
        self._ends = True
        self._due.set()

    async def write_to(self, replies: Replies) -> None:
        """Write reports until the last one is written or the stream breaks."""
        try:
            while self._reports or not self._ends:
                while self._reports:
                    await replies.write(self._reports.popleft())
                if not self._ends:
                    self._due.clear()
                    await self._due.wait()
        except (grpc.aio.AioRpcError, grpc.aio.BaseError):
            return  # the reader also sees the stream's end

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TIMINGS_EVERY_S, self._flush)

    def _flush(self) -> None:
        self._timer = None
        report = StageTimings(timings=tuple(self._timings), links=tuple(self._links), home=tuple(self._home))
        timings = to_wire(report, stage_pb2.StageTimings)
        for reported in (self._timings, self._links, self._home):
            reported.clear()
        self._put(stage_pb2.StageReport(timings=timings))

    def _put(self, report: Any) -> None:
        self._reports.append(report)
        self._due.set()
