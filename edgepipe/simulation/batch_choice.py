"""Choose the way to fill steps of a batch: simulate each way with the batch's own lengths and take the fastest. PURE.

The engine's expected times of steps are sketched as tables, since a child process compares the ways. The simulator
chooses for its own batches with the same code, and other seeds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from edgepipe.backend.cost import StepWork
from edgepipe.scheduler import Priority, Scheduler, SchedulerLimits, ThrottledPolicy
from edgepipe.scheduler.batch_ways import THROTTLED, WAYS
from edgepipe.scheduler.lengths import Lengths
from edgepipe.scheduler.pacing import RingTimes
from edgepipe.simulation.imagined import Imagined
from edgepipe.simulation.report import RunReport
from edgepipe.simulation.ring import RingModel, RingStage
from edgepipe.simulation.simulator import Run, simulate
from edgepipe.simulation.workload import Arrivals, Workload, WorkloadRequest
from edgepipe.units import LinkShape

_SIZES = (1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 384, 512, 768, 1024, 2048)
_CONTEXT = 4096  # tokens, for the time of attention
_ROWS, _TOKENS = 16, 256  # rows and tokens of the steps that show it
_JITTER = 0.05  # coefficient of variation of step times
_TURNOVERS = 3  # times that the running sequences are replaced in a simulation
_MOST_REQUESTS, _LEAST_REQUESTS = 896, 48  # fewer than four times those of a batch under way favour its beginning
_FIRST_ENDED, _MORE = 24, 4  # answers until the first choice; factor until the next one
_BETWEEN_S = 60.0  # least time between two choices
_GAIN = 0.02  # predicted gain for which another way is worth a change; less is chance


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSketch:
    """Times of steps on one device, as tables."""

    decode_s: tuple[float, ...]  # entries for ``_SIZES`` rows, without attention
    chunk_s: tuple[float, ...]  # entries for ``_SIZES`` prompt tokens, without attention
    row_s: float  # more for each row of logits beside prompt tokens
    kv_token_s: float  # attention: more for each token whose keys and values are read
    pair_s: float  # attention: the same for each pair of tokens; the longer of both counts

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of a step."""
        if work.tokens == work.logit_rows:
            seconds = _between(self.decode_s, work.tokens)
        else:
            seconds = _between(self.chunk_s, work.tokens) + self.row_s * work.logit_rows
        return seconds + max(self.kv_token_s * work.kv_tokens, self.pair_s * work.attention_pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSketch:
    """A ring's expected times."""

    devices: tuple[DeviceSketch, ...]
    upload_token_s: tuple[float, ...]  # time of each link for each token of a step
    latency_s: float  # latency of a whole turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFacts:
    """What a choice depends on."""

    ring: RingSketch
    num_blocks: int
    block_size: int
    context_length: int
    max_running: int
    lengths: tuple[Lengths, ...]  # lengths of ended requests
    sequences: int  # sequences of the batch, running and waiting
    micro_batches: int  # M in use: following the load in each simulation would take as long as the rest
    seed: int = 0


class ChoiceTimes:
    """When to choose: once enough answers have ended, then whenever these are four times as many."""

    def __init__(self) -> None:
        self._next_ended = _FIRST_ENDED
        self._not_before_s = 0.0

    def due(self, *, num_ended: int, now_s: float) -> bool:
        """Return whether to choose now. ``num_ended``: answers of batches; ``now_s``: on any clock."""
        return num_ended >= self._next_ended and now_s >= self._not_before_s

    def note(self, *, num_ended: int, now_s: float) -> None:
        """Record a choice."""
        self._next_ended, self._not_before_s = _MORE * num_ended, now_s + _BETWEEN_S


def facts_of(scheduler: Scheduler, limits: SchedulerLimits, times: RingTimes, *, seed: int = 0) -> ChoiceFacts | None:
    """Return what a choice for the scheduler's batch depends on; None while the times of steps are not known."""
    ring = sketch_ring(times)
    if ring is None:
        return None
    return ChoiceFacts(
        ring=ring,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        context_length=limits.context_length,
        max_running=limits.max_running,
        lengths=tuple(scheduler.batch_lengths()),
        sequences=scheduler.num_sequences,
        micro_batches=scheduler.micro_batches,
        seed=seed,
    )


def simulate_auto(run: Run) -> RunReport:
    """Simulate a run whose batch way is chosen in the run, from lengths of ended answers and with other seeds."""
    times, ring = ChoiceTimes(), run.cluster.ring

    def choose(scheduler: Scheduler, now_s: float, way: str) -> str | None:
        num_ended = scheduler.answer_lengths.num_ended
        if not times.due(num_ended=num_ended, now_s=now_s):
            return None
        times.note(num_ended=num_ended, now_s=now_s)
        facts = facts_of(scheduler, run.cluster.limits, ring.times(), seed=ring.seed + 1 + num_ended)
        chosen = way if facts is None else choose_way(facts, way)[0]
        return chosen if chosen != way else None

    return simulate(replace(run, batch_way=THROTTLED), choose)


def sketch_ring(times: RingTimes) -> RingSketch | None:
    """Return a ring's times as tables; None while a stage's are not known, and for interleaved slices."""
    if len(times.uploads) != len(times.stages) - 1:
        return None
    devices = [_sketch_device(slices) for slices in times.stages]
    known = [device for device in devices if device is not None]
    if len(known) < len(devices):
        return None
    uploads = tuple(upload_s(_TOKENS) / _TOKENS for upload_s in times.uploads)
    return RingSketch(devices=tuple(known), upload_token_s=uploads, latency_s=times.latency_s())


def _sketch_device(slices: Sequence[Callable[[StepWork], float]]) -> DeviceSketch | None:
    def step_s(*, tokens: int, rows: int, at: int = 0) -> float:
        """``rows`` decodes if they are all tokens; else one chunk, and logits after ``rows`` rows."""
        decodes = tokens == rows
        read = tokens * at if decodes else at
        work = StepWork(tokens, rows if decodes else 1, read, float(at * tokens), rows)
        return sum(each(work) for each in slices)

    if not step_s(tokens=1, rows=1):
        return None
    plain = step_s(tokens=_TOKENS, rows=1)
    attended_s = step_s(tokens=_ROWS, rows=_ROWS, at=_CONTEXT) - step_s(tokens=_ROWS, rows=_ROWS)
    pairs_s = step_s(tokens=_TOKENS, rows=1, at=_CONTEXT) - plain
    return DeviceSketch(
        decode_s=tuple(step_s(tokens=size, rows=size) for size in _SIZES),
        chunk_s=tuple(step_s(tokens=size, rows=0) for size in _SIZES),
        row_s=max(0.0, step_s(tokens=_TOKENS, rows=1 + _ROWS) - plain) / _ROWS,
        kv_token_s=max(0.0, attended_s / (_ROWS * _CONTEXT)),
        pair_s=max(0.0, pairs_s / (_TOKENS * _CONTEXT)),
    )


def _between(seconds: Sequence[float], size: int) -> float:
    """Return the time of a size: linear between the table's sizes, and beyond them with its last slope."""
    above = min(max(1, bisect_left(_SIZES, size)), len(_SIZES) - 1)
    low, high = _SIZES[above - 1], _SIZES[above]
    return seconds[above - 1] + (size - low) / (high - low) * (seconds[above] - seconds[above - 1])


def choose_way(facts: ChoiceFacts, current: str) -> tuple[str, Mapping[str, float]]:
    """Return the fastest way, and the predicted output tokens per second of each.

    ``current``: the way in use, which stays unless another one is clearly faster.
    """
    rates = {name: predicted_rate(facts, name) for name in WAYS}
    best = max(rates, key=lambda name: rates[name])
    keep = current if current in rates else THROTTLED
    return (best if rates[best] > rates[keep] * (1 + _GAIN) else keep), rates


def predicted_rate(facts: ChoiceFacts, way: str) -> float:
    """Return the output tokens per second of one way while requests wait."""
    run = Run(
        cluster=_cluster(facts),
        workload=_workload(facts),
        policy=ThrottledPolicy(),
        micro_batches=facts.micro_batches,
        itl_goal_s=None,
        batch_way=way,
    )
    return _filled_rate(simulate(run), _prompt_share(facts))


def _filled_rate(report: RunReport, prompt_share: float) -> float:
    """Return output tokens per second until the last request begins. The rest is no sign of a batch that goes on.

    By then all prompts are computed, but not all answers. Both count by their share of the work.
    """
    whole = [each for each in report.requests if each.token_times_s]
    until_s = max(each.token_times_s[0] for each in whole)
    answered = sum(bisect_right(each.token_times_s, until_s) for each in whole)
    total = sum(each.output_tokens for each in whole)
    return (prompt_share * total + (1 - prompt_share) * answered) / until_s


def _prompt_share(facts: ChoiceFacts) -> float:
    """Return the share of prompts in the time of the slowest device."""
    rows = max(1, round(_running(facts) / len(facts.ring.devices)))
    prompt, output = (float(np.mean(column)) for column in zip(*facts.lengths, strict=True))
    context = round(prompt + output / 2)
    decodes = StepWork.of_rows((context,) * rows, (1,) * rows, logit_rows=rows)
    shares: list[tuple[float, float]] = []
    for device in facts.ring.devices:
        decode_s = output * device.step_s(decodes) / rows
        prompt_s = prompt * device.chunk_s[-1] / _SIZES[-1]
        shares.append((decode_s + prompt_s, prompt_s / (decode_s + prompt_s)))
    return max(shares)[1]


def _running(facts: ChoiceFacts) -> int:
    """Return about how many sequences run at a time."""
    held = sum(each.prompt_tokens + each.output_tokens / 2 for each in facts.lengths) / len(facts.lengths)
    fit = facts.num_blocks * facts.block_size / held
    return max(1, int(min(fit, facts.max_running, facts.sequences)))


def _workload(facts: ChoiceFacts) -> Workload:
    """Return requests with the lengths of ended ones, each about equally often, in a random order."""
    count = min(max((1 + _TURNOVERS) * _running(facts), _LEAST_REQUESTS), _MOST_REQUESTS)
    generator = np.random.default_rng(facts.seed)
    order = [
        int(place)
        for _ in range(-(-count // len(facts.lengths)))
        for place in generator.permutation(len(facts.lengths))
    ]
    requests = tuple(
        WorkloadRequest(
            index=index,
            arrival_s=None,
            prompt_tokens=facts.lengths[place].prompt_tokens,
            output_tokens=facts.lengths[place].output_tokens,
        )
        for index, place in enumerate(order[:count])
    )
    return Workload(
        arrivals=Arrivals.CLOSED,
        requests=requests,
        seed=facts.seed,
        description="",
        concurrency=max(1, facts.sequences),
        priority=Priority.BATCH,
    )


def _cluster(facts: ChoiceFacts) -> Imagined:
    ring = facts.ring
    rates = [1 / token_s if token_s else inf for token_s in ring.upload_token_s]
    links = [LinkShape(bytes_per_s=rate) for rate in rates] + [LinkShape(one_way_s=ring.latency_s)]
    stages = [
        RingStage(
            name=str(index),
            step_s=device.step_s,
            link=link,
            token_bytes=int(index < len(ring.devices) - 1),
            jitter=_JITTER,
            first_layer=index,
        )
        for index, (device, link) in enumerate(zip(ring.devices, links, strict=True))
    ]
    limits = SchedulerLimits(
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        context_length=facts.context_length,
        micro_batches=len(stages),
        max_running=facts.max_running,
    )
    return Imagined(ring=RingModel(stages=stages, seed=facts.seed), limits=limits, row_bytes=1)
