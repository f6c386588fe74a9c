"""A real pump and scheduler over stages in virtual time, each with a daemon that kills it when it seems to hang."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from edgepipe.backend.cost import SliceCost, StepWork
from edgepipe.daemon.processes.hang_watch import HangWatch
from edgepipe.engine.micro_batches import MicroBatches
from edgepipe.engine.pump import Pump, StepNews
from edgepipe.engine.settings import EngineTimeouts
from edgepipe.engine.sites import StageSite
from edgepipe.ids import EngineId, Epoch, NodeId, SequenceId, StepId
from edgepipe.sampling import SamplingParams
from edgepipe.scheduler import Scheduler, SchedulerLimits, SequenceEnded, SequenceSpec, ThrottledPolicy, TokenSampled
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.stage.step_times import StepTimes
from edgepipe.testing.clock import START_S, FakeClock
from edgepipe.wire.children import ChildProgress
from edgepipe.wire.registrations import Registration
from edgepipe.wire.reports import StageTimings, StepDone, StepTiming
from edgepipe.wire.v1 import stage_pb2

LOOK_S = 0.5  # pause between two looks of a daemon
T = TypeVar("T")

CONTEXT = 65_536
EPOCH = Epoch(1, EngineId("engine"))


class _Jump(selectors.SelectSelector):
    """Waits for nothing: the loop's time moves on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeps take no time."""

    def __init__(self) -> None:
        self.jump = _Jump()
        super().__init__(self.jump)

    def time(self) -> float:
        return self.jump.now_s


def in_virtual_time(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it; hours pass in milliseconds."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


class LoopClock(FakeClock):
    """The loop's time."""

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


class Killed(Exception):
    """A daemon takes its stage for hung."""


@dataclass
class VirtualStage:
    """A device that takes ``step_s`` and holds two steps at once, as CUDA does, and the watch of its daemon."""

    site: StageSite
    step_s: Callable[[StepWork], float]
    report: Callable[[StageSite, StageTimings], None]
    on_done: Callable[[StepId, StepWork, StepTiming], None]  # the step leaves
    times: StepTimes = field(default_factory=StepTimes)
    sent: Callable[[stage_pb2.Plan], None] = lambda _: None
    hung: str = ""  # what its daemon would kill it for
    longest_step_s: float = 0.0
    hung_since_s: float = 0.0  # 0: it works
    _loses: bool = False
    _hangs: bool = False
    _queue: deque[tuple[StepId, StepWork]] = field(default_factory=deque)
    _outstanding: deque[tuple[StepId, StepWork]] = field(default_factory=deque)
    _started: int = 0
    _finished: int = 0

    def send(self, messages: Sequence[stage_pb2.ControlMessage]) -> None:
        """Plans of the pump, behind what they register."""
        for message in messages:
            for plan in [message.plan, *message.next_plans] if message.HasField("plan") else []:
                self.sent(plan)

    def arrive(self, step: StepId, work: StepWork) -> None:
        """The step's inputs are there."""
        if self._loses:
            return
        self._queue.append((step, work))
        self._submit()

    def lose_steps(self) -> None:
        """What arrives from now on is never computed, and no daemon knows."""
        self._loses = True

    def hang_at_next_decode(self) -> None:
        """Compute the next step without prompt tokens for ever."""
        self._hangs = True

    async def guard(self) -> None:
        """What its daemon does."""
        loop = asyncio.get_running_loop()
        watch = HangWatch(hang_s=5.0, now=loop.time())
        while not self.hung:
            await asyncio.sleep(LOOK_S)
            limit_ms = round(self.times.limit_s * 1e3)
            progress = ChildProgress(started=self._started, finished=self._finished, limit_ms=limit_ms)
            watch.report(progress, now=loop.time())
            self.hung = watch.why_hung(now=loop.time(), every_s=LOOK_S)

    def _submit(self) -> None:
        while self._queue and len(self._outstanding) < 2:
            step, work = self._queue.popleft()
            self._started += 1
            self.times.starts(self.site.index, work)
            self.times.submitted()
            self._outstanding.append((step, work))
            if len(self._outstanding) == 1:
                self._begin()

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        work = self._outstanding[0][1]
        if self._hangs and work.tokens == work.rows:
            self.hung_since_s = loop.time()
            return
        seconds = self.step_s(work)
        self.longest_step_s = max(self.longest_step_s, seconds)
        loop.call_later(seconds, self._collect, seconds)

    def _collect(self, seconds: float) -> None:
        step, work = self._outstanding.popleft()
        self._finished += 1
        self.times.ended(seconds)
        if self._outstanding:
            self._begin()
        self._submit()
        timing = StepTiming(
            step=step,
            slice_index=self.site.index,
            num_tokens=work.tokens,
            num_rows=work.rows,
            started_us=0,
            compute_us=round(seconds * 1e6),
        )
        self.report(self.site, StageTimings(timings=(timing,), links=()))
        self.on_done(step, work, timing)


class VirtualRing:
    """Devices in a row, driven by a pump."""

    def __init__(
        self,
        devices: Sequence[Callable[[StepWork], float]],
        *,
        costs: Mapping[int, SliceCost] | None = None,
        upload_s: float = 0.0,
        micro_batches: int = 0,
    ) -> None:
        """``costs``: what the engine and the stages know of the devices beforehand. ``upload_s``: of every hop."""
        self._upload_s = upload_s
        self.pump = Pump(
            scheduler=Scheduler(
                SchedulerLimits(
                    num_blocks=4 * CONTEXT // 16, block_size=16, context_length=CONTEXT, micro_batches=len(devices)
                ),
                ThrottledPolicy(),
            ),
            micro_batches=MicroBatches(
                slices=[[index] for index in range(len(devices))], row_bytes=1, fixed=micro_batches, costs=costs
            ),
            epoch=EPOCH,
            num_slices=len(devices),
            vocab_size=10,
            clock=LoopClock(),
            timeouts=EngineTimeouts(),
        )
        slices = make_slices([LayerRange(index, index + 1) for index in range(len(devices))], len(devices))
        self.stages = [
            VirtualStage(_site(index, slices[index]), step_s, self._report, self._pass_on)
            for index, step_s in enumerate(devices)
        ]
        for stage in self.stages:
            known = (costs or {}).get(stage.site.index)
            stage.times.expect({stage.site.index: known} if known is not None else {})
        self.stages[-1].sent = self._planned  # the last that a plan is sent to
        self.tokens: dict[SequenceId, int] = {}  # sampled so far
        self.ended: set[SequenceId] = set()
        self._waiting: dict[SequenceId, asyncio.Event] = {}
        self._works: dict[StepId, StepWork] = {}

    async def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Drive the ring until ``coroutine`` is done. Raises what ends the epoch, the word of a daemon included."""
        stages: Any = self.stages
        self.pump.connect(stages, registration=_registration, on_news=self._news, on_over=lambda: None)
        tasks = [asyncio.create_task(self.pump.run())]
        tasks += [asyncio.create_task(self._guard(stage)) for stage in self.stages]
        tasks.append(asyncio.create_task(coroutine))
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        await asyncio.wait(tasks)
        for task in done:
            task.result()

    async def ask(self, sequence: int, *, prompt: int, output: int) -> None:
        """One request from beginning to end."""
        number = SequenceId(sequence)
        self._waiting[number] = asyncio.Event()
        self.pump.submit([SequenceSpec(sequence=number, prompt=(number,) * prompt, max_tokens=output)])
        await self._waiting[number].wait()

    async def _guard(self, stage: VirtualStage) -> None:
        await stage.guard()
        raise Killed(f"stage {stage.site.index}: {stage.hung}")

    def _planned(self, plan: stage_pb2.Plan) -> None:
        work = StepWork.of_rows(plan.position, plan.num_tokens, logit_rows=sum(plan.sample))
        step = StepId(plan.step)
        self._works[step] = work
        self.stages[0].arrive(step, work)

    def _pass_on(self, step: StepId, work: StepWork, timing: StepTiming) -> None:
        loop = asyncio.get_running_loop()
        following = timing.slice_index + 1
        if following < len(self.stages):
            loop.call_later(self._upload_s, self.stages[following].arrive, step, work)
        else:
            done = StepDone(epoch=EPOCH, step=step, ids=((0,),) * work.logit_rows, timings=())
            self.pump.on_report(self.stages[-1].site, done)

    def _report(self, site: StageSite, timings: StageTimings) -> None:
        self.pump.on_report(site, timings)

    def _news(self, news: StepNews) -> None:
        for event in news.events:
            if isinstance(event, TokenSampled):
                self.tokens[event.sequence] = self.tokens.get(event.sequence, 0) + 1
            elif isinstance(event, SequenceEnded):
                self.ended.add(event.sequence)
                self._waiting[event.sequence].set()


def _site(index: int, part: Any) -> StageSite:
    return StageSite(
        index=index,
        node_id=NodeId(f"node{index}"),
        node_name=f"node{index}",
        address="",
        slices=(part,),
        backend="virtual",
        device="",
        weight_bytes=0,
        kv_block_bytes=0,
        max_blocks=0,
    )


def _registration(sequence: SequenceId, tokens: Sequence[int]) -> Registration:
    return Registration(sequence=sequence, sampling=SamplingParams(), choice=0, prompt_tokens=len(tokens))
