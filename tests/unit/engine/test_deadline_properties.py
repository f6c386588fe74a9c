"""Whatever steps a ring computes, however slow its devices are: none that works is taken for hung."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.backend.cost import AttentionCost, SliceCost, StepWork
from edgepipe.engine.micro_batches import MicroBatches
from edgepipe.engine.settings import EngineTimeouts
from edgepipe.engine.watch import Deadlines, StepWatch
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler import ScheduledStep
from edgepipe.stage.step_times import StepTimes
from edgepipe.testing.clock import START_S
from edgepipe.wire.reports import StepTiming
from tests.support.engine.virtual_ring import in_virtual_time

JITTER = (0.7, 1.5)  # of a step's time
DATA_SHEET = (1 / 8, 8.0)  # how much a device differs from its data sheet in each of its parts
UPLOAD_S = 0.002


@dataclass(frozen=True)
class Wanted:
    """A step that is to be sent: one chunk of a prompt, or decodes."""

    tokens: int
    rows: int
    position: int
    after_idle: bool  # sent when nothing is in flight

    def scheduled(self, number: int) -> ScheduledStep:
        counts = (self.tokens,) if self.rows == 1 else (1,) * self.rows
        return ScheduledStep(
            step=StepId(number),
            sequences=tuple(SequenceId(row) for row in range(self.rows)),
            positions=(self.position,) * self.rows,
            num_tokens=counts,
            samples=(1,) * self.rows,
            token_ids=(1,) * sum(counts),
            block_rows=(),
            block_starts=(),
            block_counts=(),
            registers=(),
            frees=(),
        )


@dataclass
class Device:
    """Computes steps in order, two submitted at once. Seconds are ``a + b * tokens + c * pairs``, with jitter."""

    a: float
    b: float
    c: float
    draw: random.Random
    times: StepTimes = field(default_factory=StepTimes)
    queue: deque[tuple[int, StepWork]] = field(default_factory=deque)
    outstanding: deque[tuple[int, StepWork]] = field(default_factory=deque)

    def data_sheet(self) -> SliceCost:
        a, b, c = (value * self.draw.uniform(*DATA_SHEET) for value in (self.a, self.b, self.c))
        return SliceCost(
            read_s=a,
            token_s=b,
            head_read_s=0.0,
            head_row_s=0.0,
            attention=(AttentionCost(window=None, kv_token_s=0.0, pair_s=c),),
            step_overhead_s=0.0,
            row_overhead_s=0.0,
            tile_steps=(),
        )

    def step_s(self, work: StepWork) -> float:
        seconds = self.a + self.b * work.tokens + self.c * work.attention_pairs
        return seconds * self.draw.uniform(*JITTER)


class Ring:
    """Sends steps round the devices; asserts at each of them that neither the engine nor a daemon gives up."""

    def __init__(self, devices: list[Device], *, micro_batches: int, steps: list[Wanted]) -> None:
        costs = {index: device.data_sheet() for index, device in enumerate(devices)}
        self._devices = devices
        self._most = micro_batches
        self._wanted = deque(enumerate(steps, start=1))
        self._known = MicroBatches(slices=[[i] for i in costs], row_bytes=1, fixed=micro_batches, costs=costs)
        self._deadlines = Deadlines(EngineTimeouts())
        self._in_flight: deque[tuple[int, int]] = deque()  # step and its tokens
        self._oldest_since_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._now_s = START_S
        self._count = 0
        for index, device in enumerate(devices):
            device.times.expect({index: costs[index]})

    def run(self) -> None:
        self._send()
        while self._events:
            self._now_s, _, happen = heapq.heappop(self._events)
            happen()
        assert not self._wanted
        assert not self._in_flight

    def _at(self, seconds: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self._now_s + seconds, self._count, happen))

    def _send(self) -> None:
        while self._wanted and len(self._in_flight) < self._most:
            number, wanted = self._wanted[0]
            if wanted.after_idle and self._in_flight:
                return
            self._wanted.popleft()
            step = wanted.scheduled(number)
            self._known.sent(step, self._now_s)
            work = StepWork.of_rows(step.positions, step.num_tokens, logit_rows=step.num_samples)
            if not self._in_flight:
                self._oldest_since_s = self._now_s
            self._in_flight.append((number, work.tokens))
            self._arrive(0, number, work)

    def _arrive(self, index: int, number: int, work: StepWork) -> None:
        self._devices[index].queue.append((number, work))
        self._submit(index)

    def _submit(self, index: int) -> None:
        device = self._devices[index]
        while device.queue and len(device.outstanding) < 2:
            number, work = device.queue.popleft()
            device.times.starts(index, work)
            device.times.submitted()
            device.outstanding.append((number, work))
            if len(device.outstanding) == 1:
                self._begin(index)

    def _begin(self, index: int) -> None:
        device = self._devices[index]
        seconds = device.step_s(device.outstanding[0][1])
        assert device.times.limit_s > seconds, "its daemon kills the stage"
        self._at(seconds, lambda: self._collect(index, seconds))

    def _collect(self, index: int, seconds: float) -> None:
        device = self._devices[index]
        number, work = device.outstanding.popleft()
        device.times.ended(seconds)
        timing = StepTiming(
            step=StepId(number),
            slice_index=index,
            num_tokens=work.tokens,
            num_rows=work.rows,
            started_us=0,
            compute_us=round(seconds * 1e6),
        )
        self._known.note_timing(index, timing)
        if device.outstanding:
            self._begin(index)
        self._submit(index)
        if index + 1 < len(self._devices):
            self._at(UPLOAD_S, lambda: self._arrive(index + 1, number, work))
        else:
            self._retire(number)

    def _retire(self, number: int) -> None:
        turn_s = self._known.turn_s([StepId(step) for step, _ in self._in_flight])
        oldest, tokens = self._in_flight.popleft()
        assert oldest == number
        waited_s = self._now_s - self._oldest_since_s
        assert waited_s < self._deadlines.limit_s(tokens, turn_s), "the engine ends the epoch"
        self._deadlines.note(tokens, waited_s)
        self._known.retired(StepId(number), self._now_s, sequences=1)
        self._oldest_since_s = self._now_s
        self._send()


chunks = st.builds(Wanted, st.integers(1, 2048), st.just(1), st.integers(0, 32_000), st.booleans())
decodes = st.builds(
    lambda rows, position, idle: Wanted(rows, rows, position, idle),
    st.integers(1, 64),
    st.integers(0, 32_000),
    st.sampled_from([False] * 9 + [True]),
)
histories = st.lists(chunks | decodes, min_size=1, max_size=40) | st.lists(decodes, min_size=1, max_size=60)


def check(stages: int, per_stage: float, seed: int, history: list[Wanted]) -> None:
    draw = random.Random(seed)
    devices = [
        Device(slower * 0.005, slower * 3e-5, slower * draw.choice((0.0, 1e-9)), draw)
        for slower in (10 ** draw.uniform(0, 4) for _ in range(stages))
    ]
    Ring(devices, micro_batches=max(1, round(per_stage * stages)), steps=history).run()


@settings(max_examples=40)
@given(st.integers(1, 16), st.floats(0, 3), st.integers(0, 1 << 30), histories)
def test_no_step_of_a_ring_that_works_counts_as_hung(
    stages: int, per_stage: float, seed: int, history: list[Wanted]
) -> None:
    check(stages, per_stage, seed, history)


@pytest.mark.long
@settings(max_examples=1000)
@given(st.integers(1, 16), st.floats(0, 3), st.integers(0, 1 << 30), histories)
def test_no_step_of_many_rings_that_work_counts_as_hung(
    stages: int, per_stage: float, seed: int, history: list[Wanted]
) -> None:
    check(stages, per_stage, seed, history)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 2048), st.floats(0.001, 4.9)), max_size=20),
    st.integers(1, 2048),
    st.floats(0, 500.0),
)
def test_a_step_that_is_lost_is_found_when_its_limit_has_passed(
    retired: list[tuple[int, float]], tokens: int, turn_s: float
) -> None:
    late_s: list[float] = []
    expected = Deadlines(EngineTimeouts())

    async def history() -> None:
        loop, found = asyncio.get_running_loop(), asyncio.Event()
        watch = StepWatch(timeouts=EngineTimeouts(), turn_s=lambda: turn_s, on_late=lambda *_: found.set())
        for number, (size, seconds) in enumerate(retired):
            watch.oldest_is(StepId(number), size)
            await asyncio.sleep(seconds)
            watch.retired()
        for size, seconds in retired:
            expected.note(size, seconds)
        watch.oldest_is(StepId(len(retired)), tokens)
        began_s = loop.time()
        await found.wait()
        late_s.append(loop.time() - began_s)
        watch.close()

    in_virtual_time(history())
    assert late_s == [pytest.approx(expected.limit_s(tokens, turn_s))]
