"""A ring of devices and links with exact times, which reports as stages do: their clocks are hours apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from edgepipe.engine.micro_batches import MicroBatches
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler import ScheduledStep
from edgepipe.testing.clock import START_S
from edgepipe.wire.reports import LinkSample, StepTiming

ROW_BYTES = 10_240
PIECE_BYTES = 512 << 10


@dataclass(kw_only=True)
class RingModel:
    """Drives a ``MicroBatches`` as a pump does. Times in ms; change them while it runs."""

    reads_ms: list[float]  # per stage, whatever the rows
    sizes: MicroBatches
    row_ms: float = 0.05
    step_ms: Callable[[int], float] | None = None  # on each stage, by tokens; instead of the two
    expert_share: Callable[[int], float] | None = None  # share that a step reads, by tokens
    bytes_per_ms: float = 125_000.0
    one_way_ms: float = 0.0
    return_ms: float = 0.0
    buffered: bool = False  # links take an upload at once and carry it later, as sockets do
    now_ms: float = 1e3 * START_S
    steps: int = 0
    in_flight: deque[tuple[float, ScheduledStep]] = field(default_factory=deque)
    one_way_s: list[float] = field(default_factory=list)  # as measured, newest last
    _ready: int = 0
    _device_free: list[float] = field(default_factory=list)
    _link_free: list[float] = field(default_factory=list)
    _uploads_ms: list[float] = field(default_factory=list)  # uploads of the step before

    def __post_init__(self) -> None:
        self._device_free = [0.0] * len(self.reads_ms)
        self._link_free = [0.0] * len(self.reads_ms)
        self._uploads_ms = [0.0] * len(self.reads_ms)

    def run(self, *, sequences: int, steps: int, prompt: int = 0) -> list[int]:
        """Retire so many steps; gives M after each. With ``prompt``, the first step holds that many tokens of one."""
        self._ready = sequences - sum(step.num_rows for _, step in self.in_flight)
        found: list[int] = []
        while len(found) < steps:
            self._fill(sequences, prompt)
            prompt = 0
            self.now_ms, step = self.in_flight.popleft()
            self.sizes.retired(step.step, self.now_ms / 1e3, sequences=sequences)
            if self._ready + sum(each.num_rows for _, each in self.in_flight) < sequences:
                self._ready += step.num_rows
            found.append(self.sizes.sizing.micro_batches)
        return found

    def _fill(self, sequences: int, prompt: int) -> None:
        limit = self.sizes.sizing.micro_batches
        while len(self.in_flight) < limit and self._ready > 0:
            rows = min(self._ready, -(-sequences // limit))
            self._ready -= rows
            self._send(rows, rows - 1 + prompt if prompt else rows)
            prompt = 0

    def _send(self, rows: int, tokens: int) -> None:
        self.steps += 1
        step = scheduled(self.steps, rows, tokens)
        self.sizes.sent(step, self.now_ms / 1e3)
        at, last = self.now_ms, len(self.reads_ms) - 1
        for stage in range(last + 1):
            at = self._compute(stage, step, tokens, at)
            if stage < last:
                at = self._upload(stage, step, tokens, at)
        self.in_flight.append((at + self.return_ms, step))

    def _compute(self, stage: int, step: ScheduledStep, tokens: int, at: float) -> float:
        begun = max(at, self._device_free[stage])
        took = self.step_ms(tokens) if self.step_ms else self.reads_ms[stage] + self.row_ms * tokens
        self._device_free[stage] = begun + took
        timing = StepTiming(
            step=step.step,
            slice_index=stage,
            num_tokens=tokens,
            num_rows=step.num_rows,
            started_us=int(begun * 1e3) + stage * 10**10,
            compute_us=round(took * 1e3),
            queued_us=round((begun - at) * 1e3),
            upload_us=1 if self.buffered else round(self._uploads_ms[stage] * 1e3),
            upload_bytes=round(self._uploads_ms[stage] * self.bytes_per_ms),
            expert_share=self.expert_share(tokens) if self.expert_share else 0.0,
        )
        self.sizes.note_timing(stage, timing)
        self._uploads_ms[stage] = tokens * ROW_BYTES / self.bytes_per_ms
        return begun + took

    def _upload(self, stage: int, step: ScheduledStep, tokens: int, at: float) -> float:
        begun = max(at, self._link_free[stage])
        num_bytes = tokens * ROW_BYTES
        self._link_free[stage] = left = begun + num_bytes / self.bytes_per_ms
        sent_us, offset_us = round(begun * 1e3) + stage * 3_600_000_000, 3_600_000_000
        first = begun + min(num_bytes, PIECE_BYTES) / self.bytes_per_ms + self.one_way_ms
        arrived = left + self.one_way_ms
        sample = LinkSample(
            step=step.step,
            num_bytes=num_bytes,
            first_sent_us=sent_us,
            first_received_us=sent_us + round((first - begun) * 1e3) + offset_us,
            last_received_us=sent_us + round((arrived - begun) * 1e3) + offset_us,
            told_us=sent_us + round((arrived - begun) * 1e3) + offset_us + 700,
            acknowledged_us=sent_us + round((arrived - begun + self.one_way_ms) * 1e3) + 700,
            spread_bytes=max(0, num_bytes - PIECE_BYTES),
        )
        self.one_way_s.append(self.sizes.note_link(stage, sample))
        return arrived


def scheduled(step: int, rows: int, tokens: int) -> ScheduledStep:
    """A step whose first row takes the tokens that are more than rows."""
    return ScheduledStep(
        step=StepId(step),
        sequences=tuple(SequenceId(i) for i in range(rows)),
        positions=(0,) * rows,
        num_tokens=(tokens - rows + 1,) + (1,) * (rows - 1),
        samples=(1,) * rows,
        token_ids=(1,) * tokens,
        block_rows=(),
        block_starts=(),
        block_counts=(),
        registers=(),
        frees=(),
    )
