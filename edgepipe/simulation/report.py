"""Report of a run, with the same figures for a simulation and a bench of the real runtime. PURE.

``make_report`` builds a ``RunReport`` from records of requests and steps; it converts to a plain dict and back.
All times are seconds since the start of the run, on one clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

STEADY = (0.2, 0.8)
"""Shares of the output tokens between which the run is neither filling up nor draining."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRequest:
    """One request, as its client saw it."""

    index: int
    arrival_s: float
    prompt_tokens: int
    token_times_s: tuple[float, ...]  # arrival of each output token
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    error: str = ""  # reason of a failure; "" for a complete request

    @property
    def output_tokens(self) -> int:
        """Number of tokens received."""
        return len(self.token_times_s)


class StepRecord(NamedTuple):
    """One step's record. A tuple, since a simulation creates very many."""

    step: int
    decode_rows: int  # sequences with one token
    prefill_tokens: int
    micro_batches: int  # M when it was planned
    planned_s: float
    stages: tuple[tuple[float, float], ...]  # start and end of each stage on its device
    used_blocks: int = 0  # used blocks of the KV pool when the step was planned

    @property
    def num_tokens(self) -> int:
        """Number of its tokens, the rows of its activations."""
        return self.decode_rows + self.prefill_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Distribution of a figure; all zero without values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """Figures of one stage."""

    name: str
    busy: float  # share of the span of all steps in which its device computed
    step_s: float  # mean

    @property
    def bubble(self) -> float:
        """Share of the span in which its device waited."""
        return 1.0 - self.busy


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Description of a run, and the driver's counts."""

    label: str  # distinguishes it from the compared runs: "policy=throttled"
    settings: Mapping[str, str]  # devices, model, link, policy, workload, ...
    stage_names: tuple[str, ...]
    num_blocks: int  # blocks of the KV pool
    preemptions: int = 0
    real_s: float = 0.0  # wall time of the run or of its simulation; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """All figures of a run, and the records behind them."""

    facts: RunFacts
    num_requests: int
    num_failed: int
    prompt_tokens: int
    output_tokens: int
    duration_s: float  # time from the first arrival to the last token
    output_tokens_per_s: float  # rate over the duration
    steady_tokens_per_s: float  # output between the first and last fifth of the tokens: ring full, all users active
    requests_per_s: float
    ttft_s: Percentiles  # time from request to first token
    itl_s: Percentiles  # gaps between consecutive tokens, of all requests
    tpot_s: Percentiles  # mean gap of each request after its first token
    stages: tuple[StageReport, ...]
    bubble: float  # mean over the stages
    num_steps: int
    step_tokens_mean: float  # tokens per micro-batch
    step_tokens_deviation: float
    decode_rows_deviation: float  # standard deviation of decodes within a turn's micro-batches, mean over the turns
    micro_batches: tuple[tuple[float, int], ...]  # M over time: (time of change, new M)
    kv_mean: float  # share of the pool in use
    kv_peak: float
    cached_tokens: int  # prompt tokens found in the prefix cache
    requests: tuple[ObservedRequest, ...] = ()
    steps: tuple[StepRecord, ...] = ()

    @property
    def prefix_hits(self) -> float:
        """Share of all prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def micro_batches_mean(self) -> float:
        """Mean of M over the span of the steps."""
        if not self.micro_batches:
            return 0.0
        times = [moment for moment, _ in self.micro_batches] + [self.duration_s]
        spans = [max(0.0, end - start) for start, end in pairwise(times)]
        total = sum(spans)
        if not total:
            return float(self.micro_batches[-1][1])
        return sum(span * count for span, (_, count) in zip(spans, self.micro_batches, strict=True)) / total

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain dicts, lists and numbers, without the long records of requests and steps."""
        facts = replace(self.facts, settings=dict(self.facts.settings))
        value = asdict(replace(self, requests=(), steps=(), facts=facts))
        value["prefix_hits"] = self.prefix_hits
        del value["requests"], value["steps"]
        return value


def make_report(facts: RunFacts, requests: Sequence[ObservedRequest], steps: Sequence[StepRecord]) -> RunReport:
    """Compute all figures of a run."""
    duration_s = _duration_s(requests)
    output_tokens = sum(record.output_tokens for record in requests)
    ended = [record for record in requests if record.token_times_s]
    step_tokens = np.array([record.num_tokens for record in steps] or [0], dtype=np.float64)
    stages = _stages(facts.stage_names, steps)
    used = np.array([record.used_blocks for record in steps] or [0], dtype=np.float64) / max(facts.num_blocks, 1)
    return RunReport(
        facts=facts,
        num_requests=len(requests),
        num_failed=sum(1 for record in requests if record.error),
        prompt_tokens=sum(record.prompt_tokens for record in requests),
        output_tokens=output_tokens,
        duration_s=duration_s,
        output_tokens_per_s=_per(output_tokens, duration_s),
        steady_tokens_per_s=steady_rate(requests),
        requests_per_s=_per(sum(1 for record in requests if not record.error), duration_s),
        ttft_s=percentiles([record.token_times_s[0] - record.arrival_s for record in ended]),
        itl_s=percentiles(np.concatenate([np.diff(record.token_times_s) for record in ended] or [np.zeros(0)])),
        tpot_s=percentiles([_tpot_s(record) for record in ended if record.output_tokens > 1]),
        stages=stages,
        bubble=1.0 - _per(sum(stage.busy for stage in stages), len(stages)) if stages else 0.0,
        num_steps=len(steps),
        step_tokens_mean=float(step_tokens.mean()),
        step_tokens_deviation=float(step_tokens.std()),
        decode_rows_deviation=_decode_deviation(steps),
        micro_batches=_changes(steps),
        kv_mean=float(used.mean()),
        kv_peak=float(used.max()),
        cached_tokens=sum(record.cached_tokens for record in requests),
        requests=tuple(requests),
        steps=tuple(steps),
    )


def percentiles(values: Sequence[float] | np.ndarray[Any, np.dtype[np.float64]]) -> Percentiles:
    """Compute percentiles of any number of values; zeros for an empty sequence."""
    if not len(values):
        return Percentiles(mean=0.0, p50=0.0, p90=0.0, p95=0.0, p99=0.0, max=0.0, count=0)
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p95, p99 = (float(value) for value in np.percentile(array, (50, 90, 95, 99)))
    return Percentiles(
        mean=float(array.mean()), p50=p50, p90=p90, p95=p95, p99=p99, max=float(array.max()), count=len(array)
    )


def steady_rate(requests: Sequence[ObservedRequest]) -> float:
    """Return output tokens per second while the run was neither filling up nor draining."""
    times = np.sort(np.array([moment for record in requests for moment in record.token_times_s], dtype=np.float64))
    if len(times) < 2:
        return 0.0
    first, last = (round(share * (len(times) - 1)) for share in STEADY)
    return _per(last - first, float(times[last] - times[first]))


def _duration_s(requests: Sequence[ObservedRequest]) -> float:
    last = max((record.token_times_s[-1] for record in requests if record.token_times_s), default=0.0)
    return max(0.0, last - min((record.arrival_s for record in requests), default=0.0))


def _tpot_s(record: ObservedRequest) -> float:
    return (record.token_times_s[-1] - record.token_times_s[0]) / (record.output_tokens - 1)


def _stages(names: Sequence[str], steps: Sequence[StepRecord]) -> tuple[StageReport, ...]:
    timed = [record.stages for record in steps if len(record.stages) == len(names)]
    if not timed or not names:
        return tuple(StageReport(name=name, busy=0.0, step_s=0.0) for name in names)
    spans = np.array(timed, dtype=np.float64)  # [steps, stages, 2]
    whole_s = float(spans[:, :, 1].max() - spans[:, :, 0].min())
    busy_s = (spans[:, :, 1] - spans[:, :, 0]).sum(axis=0)
    return tuple(
        StageReport(name=name, busy=min(1.0, _per(float(seconds), whole_s)), step_s=float(seconds) / len(timed))
        for name, seconds in zip(names, busy_s, strict=True)
    )


def _decode_deviation(steps: Sequence[StepRecord]) -> float:
    """Return the standard deviation of decode rows within each M steps, as a mean over these; 0 where none have M."""
    spreads: list[float] = []
    place = 0
    while place < len(steps):
        turn = steps[place : place + steps[place].micro_batches]
        place += steps[place].micro_batches
        if len(turn) > 1 and all(step.decode_rows for step in turn):
            spreads.append(float(np.std([step.decode_rows for step in turn])))
    return float(np.mean(spreads)) if spreads else 0.0


def _changes(steps: Sequence[StepRecord]) -> tuple[tuple[float, int], ...]:
    changes: list[tuple[float, int]] = []
    for record in steps:
        if not changes or changes[-1][1] != record.micro_batches:
            changes.append((record.planned_s, record.micro_batches))
    return tuple(changes)


def _per(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0
