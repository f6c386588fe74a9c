"""Compare schedules, including the decode ring: published formulas against simulated runs. PURE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from edgepipe.errors import ConfigInvalid
from edgepipe.simulation.schedules import (
    SCHEDULES,
    DecodeRing,
    Op,
    Span,
    Timeline,
    cyclic_decode,
    published,
    run_schedule,
)

DECODE = "decode"
KINDS = (*SCHEDULES, DECODE)
"""Names of comparable schedules."""
MOST_STAGES, MOST_MICRO_BATCHES, MOST_SLICES = 32, 256, 32

RING_WEIGHTS, RING_HOP = 0.8, 0.1  # shares of a step with all sequences: memory-bound decoding over a home network
_TURNS = 3  # turns of the decode ring: one fills it, one is drawn, one ends the measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRun:
    """Figures of one schedule."""

    name: str
    bubble: float  # result of the formula; see ``Published``
    idle: float | None  # idle share of all devices' time in a run; None: this size cannot run
    peak_published: int | None  # activations, in micro-batches; None: decoding keeps none
    peak: int | None
    length: float | None  # length of the run, in passes of one micro-batch through one stage
    rate: float | None  # decoding rate relative to one micro-batch of all sequences on the same ring
    timeline: Timeline | None
    note: str  # reason for a missing run, or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of stages P, micro-batches M and slices V."""

    stages: int
    micro_batches: int
    slices: int


def read_schedules(text: str) -> tuple[str, ...]:
    """Parse ``all`` or comma-separated names. Raises ConfigInvalid."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if names == ("all",):
        return KINDS
    for name in names:
        if name not in KINDS:
            raise ConfigInvalid(f"no schedule is called '{name}'", fact=f"there are {', '.join(KINDS)}, or all")
    return names


def compare_schedules(names: Sequence[str], sizes: Sizes) -> tuple[ScheduleRun, ...]:
    """Compare formulas and runs. Raises ConfigInvalid for sizes out of bounds, or if no named schedule can run."""
    for value, most, label in (
        (sizes.stages, MOST_STAGES, "stages"),
        (sizes.micro_batches, MOST_MICRO_BATCHES, "micro-batches"),
        (sizes.slices, MOST_SLICES, "slices"),
    ):
        if not 1 <= value <= most:
            raise ConfigInvalid(f"{value} {label} cannot be drawn", fact=f"the range is 1 to {most}")
    runs = tuple(run for name in names for run in (_decoding(sizes) if name == DECODE else [_training(name, sizes)]))
    if all(run.timeline is None for run in runs):
        raise ConfigInvalid(runs[0].note, next_step=f"give --micro-batches {sizes.stages} or a multiple of it")
    return runs


def run_decode(ring: DecodeRing, *, micro_batches: int, kv_bound: bool) -> Timeline:
    """Run every micro-batch a few times around the ring; a step starts when its device and input are ready."""
    step = ring.step(1 / micro_batches if kv_bound else 1.0)
    ready = [0.0] * micro_batches
    spans: list[list[Span]] = [[] for _ in range(ring.stages)]
    for turn, micro_batch, stage in product(range(_TURNS), range(micro_batches), range(ring.stages)):
        free = spans[stage][-1].end if spans[stage] else 0.0
        start = max(free, ready[micro_batch])
        spans[stage].append(Span(Op(False, micro_batch, turn * ring.stages + stage), start, start + step))
        ready[micro_batch] = start + step + ring.hop
    return Timeline(devices=tuple(map(tuple, spans)))


def steady_idle(timeline: Timeline, *, micro_batches: int) -> float:
    """Return the first device's idle share during one turn, once the ring is full."""
    spans = timeline.devices[0][-2 * micro_batches :]
    whole = spans[micro_batches].start - spans[0].start
    return 1 - sum(span.end - span.start for span in spans[:micro_batches]) / whole


def _training(name: str, sizes: Sizes) -> ScheduleRun:
    stages, count = sizes.stages, sizes.micro_batches
    slices = sizes.slices if name == "interleaved" else 1
    formula = published(name, stages=stages, micro_batches=count, slices=slices)
    timeline, note = None, ""
    try:
        timeline = run_schedule(name, stages=stages, micro_batches=count, slices=slices)
    except ConfigInvalid as error:
        note = ": ".join(part for part in (error.what, error.fact) if part)
    passes = count if name == "naive" else 1  # naive runs all micro-batches as one
    return ScheduleRun(
        name=f"{name}, V={slices}" if name == "interleaved" else name,
        bubble=formula.bubble,
        idle=timeline.idle if timeline else None,
        peak_published=formula.peak_activations * passes,
        peak=timeline.peak_activations * passes if timeline else None,
        length=timeline.length * passes if timeline else None,
        rate=None,
        timeline=timeline,
        note=note,
    )


def _decoding(sizes: Sizes) -> Iterator[ScheduleRun]:
    """Run decoding twice: each micro-batch as large as the single one, then all sharing its sequences (KV bound)."""
    ring, count = DecodeRing(stages=sizes.stages, weights=RING_WEIGHTS, hop=RING_HOP), sizes.micro_batches
    for kv_bound, name in ((False, "decode, KV M-fold"), (True, "decode, KV shared")):
        formula = cyclic_decode(ring, micro_batches=count, kv_bound=kv_bound)
        alone = cyclic_decode(ring, micro_batches=1, kv_bound=kv_bound)
        timeline = run_decode(ring, micro_batches=count, kv_bound=kv_bound)
        yield ScheduleRun(
            name=name,
            bubble=formula.idle,
            idle=steady_idle(timeline, micro_batches=count),
            peak_published=None,
            peak=None,
            length=None,
            rate=formula.rate / alone.rate,
            timeline=timeline,
            note="",
        )
