"""Pipeline schedules from naive to DualPipe: published formulas and simulated runs. PURE.

Formulas after "Pipeline Parallelism: From GPipe to DualPipe": P stages, M micro-batches, V slices (virtual stages) per
device. For V > 1 and for DualPipe the published figure is idle time over busy time. The share of the whole time is
smaller, so a simulated run gives it. Forward and backward of a slice take equally long.

None of these bubbles applies to decoding, which is a ring: a sequence's next token enters when its last token has left.
There the devices wait only if M is too small for the ring's turn; see ``cyclic_decode``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from edgepipe.errors import ConfigInvalid

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "dualpipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Results of the published formulas."""

    bubble: float  # share as published: of the whole time; for interleaved and DualPipe relative to the busy time
    peak_activations: int  # micro-batches whose activations a device keeps


class Op(NamedTuple):
    """One slice's pass over one micro-batch."""

    backward: bool
    micro_batch: int
    slice: int  # 0 to P * V - 1, in the order of a forward pass
    stream: int = 0  # 1: DualPipe's second stream, from the other end


class Span(NamedTuple):
    """Time of an op on a device; one slice's pass takes 1 / V."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)  # no slots, which cached_property forbids
class Timeline:
    """Simulated run of a schedule."""

    devices: tuple[tuple[Span, ...], ...]

    @property
    def length(self) -> float:
        """Time from the first start to the last end."""
        return max(spans[-1].end for spans in self.devices)

    @property
    def idle(self) -> float:
        """Idle share of all devices' time."""
        busy = sum(span.end - span.start for spans in self.devices for span in spans)
        return 1 - busy / (self.length * len(self.devices))

    @cached_property
    def _first_stream(self) -> int:
        """Number of micro-batches that enter at the first device."""
        return 1 + max(span.op.micro_batch for span in self.devices[0] if not span.op.stream)

    def number(self, op: Op) -> int:
        """Return a pass's micro-batch number; those of the second stream follow the first stream's."""
        return op.micro_batch + (self._first_stream if op.stream else 0)

    @property
    def peak_activations(self) -> int:
        """Peak number of micro-batches that one device keeps between forward and backward pass, in whole stages."""
        return max(_peak(spans) for spans in self.devices)


def published(schedule: str, *, stages: int, micro_batches: int, slices: int = 1) -> Published:
    """Evaluate the formulas. Raises ConfigInvalid for an unknown schedule or a count below 1."""
    _check(schedule, stages, micro_batches, slices)
    p, m, v = stages, micro_batches, slices
    return {
        "naive": Published(bubble=(p - 1) / p, peak_activations=1),
        "gpipe": Published(bubble=(p - 1) / (p - 1 + m), peak_activations=m),
        "1f1b": Published(bubble=(p - 1) / (p - 1 + m), peak_activations=p),
        "interleaved": Published(bubble=(p - 1) / (m * v), peak_activations=p),
        "dualpipe": Published(bubble=(p - 1) / (2 * m), peak_activations=2 * p),
    }[schedule]


def run_schedule(schedule: str, *, stages: int, micro_batches: int, slices: int = 1) -> Timeline:
    """Simulate a schedule with equal stages and free links. ``naive`` runs all micro-batches as one.

    Raises ConfigInvalid if M is not a multiple of P, which interleaving needs.
    """
    _check(schedule, stages, micro_batches, slices)
    if schedule == "dualpipe":
        return Timeline(devices=tuple(map(tuple, _BothEnds(stages, micro_batches).result())))
    count = 1 if schedule == "naive" else micro_batches
    slices = slices if schedule == "interleaved" else 1
    if slices > 1 and count % stages:
        raise ConfigInvalid(
            f"{count} micro-batches cannot be interleaved over {stages} stages",
            fact="they go in groups of one per stage",
        )
    orders = [_order(schedule, device, stages, count, slices) for device in range(stages)]
    return Timeline(devices=tuple(map(tuple, _run_orders(orders, stages=stages, slices=slices))))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRing:
    """A ring of P equal stages that decodes."""

    stages: int
    weights: float  # share of reading weights in a step with all sequences
    hop: float  # latency and upload to the next stage, relative to such a step

    def step(self, rows: float) -> float:
        """Return the time of a step with the share ``rows`` of all sequences."""
        return self.weights + (1 - self.weights) * rows


class CyclicDecode(NamedTuple):
    """Performance of a ring with M micro-batches."""

    idle: float  # idle share of a device's time
    rate: float  # tokens per unit of time; 1: all sequences in one step of one device, back to back


def cyclic_decode(ring: DecodeRing, *, micro_batches: int, kv_bound: bool) -> CyclicDecode:
    """Return the performance of steady decoding.

    ``kv_bound``: all M micro-batches share a fixed number of sequences, so each further one reads the weights again
    for fewer rows. Otherwise each is as large as the single one.
    """
    rows = 1 / micro_batches if kv_bound else 1.0
    step = ring.step(rows)
    turn = ring.stages * (step + ring.hop)
    cycle = max(micro_batches * step, turn)
    return CyclicDecode(idle=1 - micro_batches * step / cycle, rate=micro_batches * rows / cycle)


def _check(schedule: str, stages: int, micro_batches: int, slices: int) -> None:
    if schedule not in SCHEDULES:
        raise ConfigInvalid(f"no schedule is called '{schedule}'", fact=f"there are {', '.join(SCHEDULES)}")
    if min(stages, micro_batches, slices) < 1:
        raise ConfigInvalid("a schedule has at least one stage, one micro-batch and one slice")


def _peak(spans: Sequence[Span]) -> int:
    """Return the peak of forward passes without their backward pass, in whole stages (V slices each)."""
    kept = most = 0.0
    for span in spans:
        kept += -(span.end - span.start) if span.op.backward else span.end - span.start
        most = max(most, kept)
    return max(1, round(most))


def _order(schedule: str, device: int, stages: int, micro_batches: int, slices: int) -> list[Op]:
    """Return a device's order: some forward passes, then forward and backward alternately, then the rest."""
    groups = range(0, micro_batches, stages)
    members = [range(first, min(first + stages, micro_batches)) for first in groups]
    depths = range(slices)
    forward = [
        Op(False, micro_batch, depth * stages + device)
        for group in members
        for depth in depths
        for micro_batch in group
    ]
    backward = [
        Op(True, micro_batch, depth * stages + device)
        for group in members
        for depth in reversed(depths)
        for micro_batch in group
    ]
    ahead = len(forward)
    if schedule in ("1f1b", "interleaved"):
        waits = stages - 1 - device
        ahead = min(ahead, waits if slices == 1 else 2 * waits + (slices - 1) * stages)
    order = forward[:ahead]
    for late, early in zip(forward[ahead:], backward, strict=False):
        order += [late, early]
    return order + backward[len(forward) - ahead :]


def _run_orders(orders: Sequence[Sequence[Op]], *, stages: int, slices: int) -> list[list[Span]]:
    """Run each device's passes in order, each as soon as its input is ready."""
    last = stages * slices - 1
    ends: dict[Op, float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    at = [0] * len(orders)
    while any(done < len(order) for done, order in zip(at, orders, strict=True)):
        for device, order in enumerate(orders):
            while at[device] < len(order):
                op = order[at[device]]
                needs = _input(op, last)
                if needs is not None and needs not in ends:
                    break
                free = spans[device][-1].end if spans[device] else 0.0
                start = max(free, ends[needs] if needs is not None else 0.0)
                ends[op] = start + 1 / slices
                spans[device].append(Span(op, start, ends[op]))
                at[device] += 1
    return spans


def _input(op: Op, last: int) -> Op | None:
    """Return the pass whose output a pass needs; None if it needs none."""
    if not op.backward:
        return op._replace(slice=op.slice - 1) if op.slice else None
    return op._replace(slice=op.slice + 1) if op.slice < last else op._replace(backward=False)


class _BothEnds:
    """DualPipe-like schedule: half of the micro-batches enter at either end, so every device holds two stages.

    A free device takes a backward pass if one is ready, else a forward pass while it keeps few enough.
    """

    def __init__(self, stages: int, micro_batches: int) -> None:
        self._stages = stages
        self._counts = (micro_batches + 1) // 2, micro_batches // 2
        self._ready: list[dict[Op, float]] = [{} for _ in range(stages)]  # pass -> time its input is ready
        self._spans: list[list[Span]] = [[] for _ in range(stages)]
        self._kept = [0] * stages
        for stream, count in enumerate(self._counts):
            for micro_batch in range(count):
                self._offer(Op(False, micro_batch, 0, stream), 0.0)

    def result(self) -> list[list[Span]]:
        """Run the schedule to its end."""
        for _ in range(2 * sum(self._counts) * self._stages):
            device, op, start = min(self._candidates(), key=lambda candidate: (candidate[2], candidate[0]))
            self._take(device, op, start)
        return self._spans

    def _candidates(self) -> Iterator[tuple[int, Op, float]]:
        for device, ready in enumerate(self._ready):
            allowed = [op for op in ready if op.backward or self._kept[device] <= self._stages]
            if not allowed:
                continue
            free = self._spans[device][-1].end if self._spans[device] else 0.0
            start = max(free, min(ready[op] for op in allowed))
            startable = [op for op in allowed if ready[op] <= start]
            yield device, min(startable, key=lambda op: (not op.backward, op.micro_batch, op.stream)), start

    def _offer(self, op: Op, at: float) -> None:
        self._ready[self._stages - 1 - op.slice if op.stream else op.slice][op] = at

    def _take(self, device: int, op: Op, start: float) -> None:
        del self._ready[device][op]
        end = start + 1
        self._spans[device].append(Span(op, start, end))
        self._kept[device] += -1 if op.backward else 1
        step = -1 if op.backward else 1
        if not op.backward and op.slice == self._stages - 1:
            self._offer(op._replace(backward=True), end)
        elif 0 <= op.slice + step < self._stages:
            self._offer(op._replace(slice=op.slice + step), end)
