"""Simulates a workload on a modelled ring with the engines' own scheduler. PURE, seeded, no real time.

Time jumps from event to event: a request arrives, or a step comes back. No other events exist in a ring whose steps
never overtake each other. While the scheduler has nothing to decide (``steady_steps``), the simulator repeats the same
steps and informs the scheduler once, with the same results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from math import inf

from edgepipe.backend.cost import StepWork
from edgepipe.backend.drafting import Drafts, ImaginedDrafts
from edgepipe.errors import EdgepipeError
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler import Event, Policy, ScheduledStep, Scheduler, SequenceSpec, TokenSampled
from edgepipe.scheduler.batch_ways import make_way
from edgepipe.scheduler.pacing import Pacer
from edgepipe.simulation.drafts import SimulatedDrafts
from edgepipe.simulation.fast_forward import FastForwardScheduler
from edgepipe.simulation.imagined import Imagined
from edgepipe.simulation.interleaved import InterleavedTraffic
from edgepipe.simulation.report import ObservedRequest, RunFacts, RunReport, StepRecord, make_report
from edgepipe.simulation.ring import Course, Repeated, RingTraffic
from edgepipe.simulation.sizing_feed import SizingFeed
from edgepipe.simulation.workload import Workload, WorkloadRequest

_WORTHWHILE = 2  # minimum of turns to repeat; fewer are as fast step by step
_MOST_REPEATED = 4096  # steps at once, which bounds the memory of their records
_TOKEN = 0  # id of every sampled token; results do not depend on it
_ROW = (_TOKEN,)  # tokens of a sampling row


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a comparison."""

    cluster: Imagined
    workload: Workload
    policy: Policy
    micro_batches: int = 0  # 0: adapted during the run
    batch_way: str = ""  # how steps are filled while all requests are batch requests; empty: by the policy
    itl_goal_s: float | None = 0.1  # time that prompts may add to a decode's turn; None: no bound
    drafts: ImaginedDrafts | None = None  # None: nothing is drafted
    label: str = ""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])  # settings that the report shows


ChooseWay = Callable[[Scheduler, float, str], str | None]
"""Maps the scheduler, the time and the way in use to another one, or None; called whenever a request has ended."""


def simulate(run: Run, choose_way: ChooseWay | None = None) -> RunReport:
    """Serve the whole workload. The report counts rejected requests with their error."""
    return _Simulation(run, choose_way).result()


@dataclass(slots=True, kw_only=True)
class _Underway:
    """A submitted request."""

    request: WorkloadRequest
    arrival_s: float
    token_times_s: list[float] = field(default_factory=list[float])
    cached_tokens: int | None = None  # None: not yet scheduled
    error: str = ""


@dataclass(slots=True)
class _Flight:
    """A step in flight."""

    step: StepId
    scheduled: ScheduledStep
    work: StepWork
    course: Course
    samplers: list[_Underway]  # requests that get a token when it is back
    ids: Sequence[tuple[int, ...]]  # tokens of each of them
    drafts: Sequence[Drafts]  # tokens that may follow these
    looked_at: bool = False  # its times were measured


class _Simulation:
    """One run; use an instance once."""

    def __init__(self, run: Run, choose_way: ChooseWay | None) -> None:
        cluster = run.cluster
        limits = replace(
            cluster.limits,
            micro_batches=run.micro_batches or cluster.limits.micro_batches,
            max_waiting=max(cluster.limits.max_waiting, len(run.workload.requests)),  # clients retry instead of failing
        )
        self._run = run
        self._choose_way = choose_way
        self._scheduler = FastForwardScheduler(limits, run.policy)
        self._pacer = Pacer(
            cluster.ring.times(),
            most_tokens=run.policy.most_prefill_tokens,
            goal_s=run.itl_goal_s,
            most_in_flight_tokens=limits.slack_tokens if limits.windows else None,
        )
        self._scheduler.set_pacer(self._pacer)
        self._way = run.batch_way
        if run.batch_way:
            self._set_way(run.batch_way)
        self._drafts: SimulatedDrafts | None = None
        if run.drafts is not None:
            self._drafts = SimulatedDrafts(
                run.drafts,
                cluster.ring.times(),
                in_flight=lambda: min(self._scheduler.micro_batches, self._scheduler.num_running),
                seed=cluster.ring.seed,
            )
            self._scheduler.set_drafting(self._drafts.drafting())
            if run.drafts.goes_on and not cluster.ring.interleaved:
                self._scheduler.plan_ahead()  # so windows may follow one another in flight
        self._traffic = InterleavedTraffic(cluster.ring) if cluster.ring.interleaved else RingTraffic(cluster.ring)
        self._feed = None if run.micro_batches else SizingFeed(cluster.ring, row_bytes=cluster.row_bytes)
        self._requests: dict[SequenceId, _Underway] = {}
        self._waiting = deque(run.workload.requests)  # requests that are not yet submitted
        self._in_flight: deque[_Flight] = deque()
        self._wanted = 0  # new M, when it must change
        self._steps: list[StepRecord] = []

    def _set_way(self, name: str) -> None:
        limits, lengths = self._run.cluster.limits, self._scheduler.answer_lengths
        kv_tokens = limits.num_blocks * limits.block_size
        way = make_way(name, self._pacer, lengths, kv_tokens=kv_tokens, knows_limits=False)
        self._scheduler.set_batch_way(way)
        self._way = name

    def result(self) -> RunReport:
        """Run to the end and report."""
        for _ in range(self._run.workload.concurrency or 0):
            self._next_request(0.0)
        self._fill(0.0)
        while self._waiting or self._in_flight:
            self._fill(self._next_event())
        return make_report(
            self._facts(), [self._request_record(underway) for underway in self._requests.values()], self._steps
        )

    def _next_event(self) -> float:
        """Process the next event: a step's return, drafts, or all arrivals at one moment. Return its time."""
        arrival_s = self._next_arrival_s()
        back_s = self._in_flight[0].course.back_s if self._in_flight else inf
        if self._drafts is not None and (ready_s := self._drafts.ready_s) < min(back_s, arrival_s):
            lot = self._drafts.take()
            self._scheduler.add_drafts(lot.sequence, lot.drafts, position=lot.position, step=lot.step)
            return ready_s
        if back_s <= arrival_s and self._in_flight:
            self._retire(back_s)
            return back_s
        if arrival_s == inf:
            raise RuntimeError("the scheduler holds requests and schedules none of them")
        while self._next_arrival_s() == arrival_s:
            self._next_request(arrival_s)
        return arrival_s

    def _next_arrival_s(self) -> float:
        """Return the next scheduled arrival; infinite if none, as in a closed loop."""
        if not self._waiting or (arrival_s := self._waiting[0].arrival_s) is None:
            return inf
        return arrival_s

    def _next_request(self, now_s: float) -> None:
        """Submit the next request. In a closed loop, a refused user submits the one after it."""
        while self._waiting:
            request = self._waiting.popleft()
            sequence = SequenceId(request.index + 1)
            self._requests[sequence] = underway = _Underway(request=request, arrival_s=now_s)
            prompt = self._run.workload.prompt_ids(request)
            try:
                spec = SequenceSpec(
                    sequence=sequence,
                    prompt=prompt,
                    max_tokens=request.output_tokens,
                    priority=self._run.workload.priority,
                    may_fly=self._run.drafts is not None and self._run.drafts.goes_on,
                )
                self._scheduler.submit([spec])
                return
            except EdgepipeError as error:
                underway.error = str(error)
                if request.arrival_s is not None:
                    return

    def _retire(self, now_s: float) -> None:
        flight = self._in_flight.popleft()
        events = self._scheduler.retire(flight.step, flight.ids, flight.drafts, now_s=now_s)
        if self._drafts is not None:
            self._drafts.retired(flight.scheduled, flight.ids, now_s)
        self._note(events, now_s)
        if not flight.looked_at and self._look(flight.work, flight.course):
            self._scheduler.set_micro_batches(self._wanted)

    def _look(self, work: StepWork, course: Course) -> bool:
        """Measure a returned step. Return whether M must change."""
        running = self._scheduler.num_running
        if self._feed is None or not self._feed.retired(work, course, running=running):
            return False
        self._wanted = self._feed.micro_batches(running=running)
        return self._wanted != self._scheduler.micro_batches

    def _note(self, events: Sequence[Event], now_s: float) -> None:
        for event in events:
            if isinstance(event, TokenSampled):
                self._requests[event.sequence].token_times_s.append(now_s)
            else:
                if self._run.workload.concurrency:
                    self._next_request(now_s)
                if self._choose_way is not None and (way := self._choose_way(self._scheduler, now_s, self._way)):
                    self._set_way(way)

    def _fill(self, now_s: float) -> None:
        while (step := self._scheduler.next_step()) is not None:
            self._note_cached(step)
            work = StepWork.of_rows(step.positions, step.num_tokens, logit_rows=step.num_samples)
            course = self._traffic.send(work, self._begins_s(step, now_s))
            samplers = [self._requests[sequence] for sequence in compress(step.sequences, step.samples)]
            ids: Sequence[tuple[int, ...]] = [_ROW] * len(samplers)
            drafts: Sequence[Drafts] = ()
            if self._drafts is not None:
                ids, drafts = self._drafts.sampled(step), self._drafts.next_drafts(step)
                course = course._replace(back_s=course.back_s + self._drafts.seconds(step))
            self._in_flight.append(_Flight(step.step, step, work, course, samplers, ids, drafts))
            decode_rows = work.rows
            if work.tokens != decode_rows:
                rows = zip(step.samples, step.num_tokens, strict=True)
                decode_rows = sum([count for samples, count in rows if samples == count])
            self._record(step.step, work.tokens, decode_rows, now_s, course, self._scheduler.used_blocks)
        self._repeat()

    def _begins_s(self, step: ScheduledStep, now_s: float) -> float:
        """Return when a step begins: one that was planned ahead waits for the tokens of the step that it follows."""
        followed = (flight.course.back_s for flight in self._in_flight if flight.step == step.after)
        return max(now_s, next(followed, now_s))

    def _repeat(self) -> None:
        """Repeat steps while the scheduler has nothing to decide, and inform it once."""
        if not isinstance(self._traffic, RingTraffic):
            return
        flights = list(self._in_flight)
        most = 0 if not flights or flights[0].looked_at else self._scheduler.steady_steps()
        if most < _WORTHWHILE * len(flights):
            return
        again = self._traffic.repeat(
            [flight.work for flight in flights],
            [flight.course for flight in flights],
            most=min(most, _MOST_REPEATED),
            until_s=self._next_arrival_s(),
            stop=None if self._feed is None else self._look,
        )
        if again.planned_s:
            self._take(flights, again, self._scheduler.repeat(len(again.planned_s), _TOKEN))
        if again.stopped:
            self._in_flight[0].looked_at = True
            self._scheduler.set_micro_batches(self._wanted)

    def _take(self, flights: Sequence[_Flight], again: Repeated, used_blocks: Sequence[int]) -> None:
        """Record repeated steps as if each had been scheduled individually."""
        count, first = len(flights), flights[-1].step + 1
        for number, (now_s, course) in enumerate(zip(again.planned_s, again.courses, strict=True)):
            rows = flights[number % count].work.rows
            self._record(first + number, rows, rows, now_s, course, used_blocks[number])
        for index, flight in enumerate(flights):
            came_s = again.planned_s[index::count]
            for underway in flight.samplers:
                underway.token_times_s.extend(came_s)
            if came_s:
                newest = index + (len(came_s) - 1) * count
                flight.work = flight.work.later(len(came_s))
                flight.course, flight.step = again.courses[newest], StepId(first + newest)
        self._in_flight.rotate(-(len(again.planned_s) % count))

    def _record(
        self, step: int, num_tokens: int, decode_rows: int, now_s: float, course: Course, used_blocks: int
    ) -> None:
        self._steps.append(
            StepRecord(
                step,
                decode_rows,
                num_tokens - decode_rows,
                self._scheduler.micro_batches,
                now_s,
                course.stages,
                used_blocks,
            )
        )

    def _note_cached(self, step: ScheduledStep) -> None:
        """Record cached prompt tokens: a prompt's first row begins after them."""
        if not step.registers:
            return
        first = dict(zip(reversed(step.sequences), reversed(step.positions), strict=True))
        for sequence in step.registers:
            underway = self._requests[sequence]
            if underway.cached_tokens is None:
                underway.cached_tokens = first[sequence]

    def _facts(self) -> RunFacts:
        return RunFacts(
            label=self._run.label,
            settings=self._run.settings,
            stage_names=tuple(stage.name for stage in self._run.cluster.ring.stages),
            num_blocks=self._run.cluster.limits.num_blocks,
            preemptions=self._scheduler.stats().preemptions,
        )

    def _request_record(self, underway: _Underway) -> ObservedRequest:
        return ObservedRequest(
            index=underway.request.index,
            arrival_s=underway.arrival_s,
            prompt_tokens=underway.request.prompt_tokens,
            token_times_s=tuple(underway.token_times_s),
            cached_tokens=underway.cached_tokens or 0,
            error=underway.error,
        )
