"""Records the newest steps: their plan, and when each stage's device worked on them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgepipe.clock import Clock
from edgepipe.scheduler import ScheduledStep
from edgepipe.wire.engines import DeviceSpan, StepTrace
from edgepipe.wire.reports import StepTiming

_STEPS_KEPT = 4096  # a minute of a fast pipeline; about 3 MB


@dataclass(slots=True, kw_only=True)
class _Recorded:
    decode_rows: int
    prefill_tokens: int
    micro_batches: int
    planned_us: int
    used_blocks: int
    # Start and end of each stage's work.
    spans: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])


class StepRecorder:
    """Bounded record of steps; drops the oldest first."""

    def __init__(self, clock: Clock, *, kept: int = _STEPS_KEPT) -> None:
        self._clock = clock
        self._kept = kept
        self._steps: OrderedDict[int, _Recorded] = OrderedDict()

    def planned(self, step: ScheduledStep, *, micro_batches: int, used_blocks: int) -> None:
        """Record a step that is sent to the stages. ``used_blocks``: KV blocks that sequences hold now."""
        decodes = step.num_tokens
        if decodes != step.samples:
            rows = zip(step.num_tokens, step.samples, strict=True)
            decodes = [count for count, samples in rows if samples == count]
        self._steps[step.step] = _Recorded(
            decode_rows=len(decodes),
            prefill_tokens=len(step.token_ids) - sum(decodes),
            micro_batches=micro_batches,
            planned_us=int(self._clock.monotonic_s() * 1e6),
            used_blocks=used_blocks,
        )
        if len(self._steps) > self._kept:
            self._steps.popitem(last=False)

    def timed(self, stage: int, timing: StepTiming) -> None:
        """Record a stage's timing of one slice. Several slices of a stage form one span."""
        begin_us, end_us = timing.started_us, timing.started_us + timing.compute_us
        if recorded := self._steps.get(timing.step):
            known = recorded.spans.get(stage, (begin_us, end_us))
            recorded.spans[stage] = (min(known[0], begin_us), max(known[1], end_us))

    def steps(self, *, after: int) -> Sequence[StepTrace]:
        """Return the recorded steps after step ``after``, oldest first."""
        return [
            StepTrace(
                step=number,
                decode_rows=step.decode_rows,
                prefill_tokens=step.prefill_tokens,
                micro_batches=step.micro_batches,
                planned_us=step.planned_us,
                used_blocks=step.used_blocks,
                spans=tuple(DeviceSpan(*step.spans[stage]) for stage in sorted(step.spans)),
            )
            for number, step in self._steps.items()
            if number > after
        ]

    def now_us(self) -> int:
        """Return the current time on the clock of ``planned_us``."""
        return int(self._clock.monotonic_s() * 1e6)
