"""Feeds the engine's sizer with a modelled ring's measurements. PURE."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.backend.cost import StepWork
from edgepipe.scheduler.sizing import LinkCurve, RingMeasurements, Sizer, StageCurve
from edgepipe.simulation.ring import Course, RingModel


class SizingFeed:
    """Chooses the next M after a step's return."""

    def __init__(self, ring: RingModel, *, row_bytes: int) -> None:
        self._model = ring
        self._newest: StepWork | None = None  # newest pure decode step, for the ring's latency
        self._curves = [StageCurve() for _ in ring.stages]
        devices: dict[str, list[StageCurve]] = {}
        for index, (stage, curve) in enumerate(zip(ring.stages, self._curves, strict=True)):
            devices.setdefault(stage.device or str(index), []).append(curve)
        self._ring = RingMeasurements(
            stages=list(devices.values()),
            links=[LinkCurve() for _ in self._curves[1:]],
            row_bytes=row_bytes,
            latency_s=0.0,
        )
        self._sizer = Sizer(num_stages=len(devices))

    def retired(self, work: StepWork, course: Course, *, running: int) -> bool:
        """Record a step's times while ``running`` sequences run. Return whether to call ``micro_batches``."""
        num_tokens = work.tokens
        for curve, (start_s, end_s) in zip(self._curves, course.stages, strict=True):
            curve.note(num_rows=work.rows, num_tokens=num_tokens, seconds=end_s - start_s)
        for link, seconds in zip(self._ring.links, course.uploads_s, strict=False):  # the last link carries ids
            link.note_upload(num_bytes=num_tokens * self._ring.row_bytes, seconds=seconds)
        if num_tokens == work.rows:
            self._newest = work
        return self._sizer.due(sequences=running)

    def micro_batches(self, *, running: int) -> int:
        """Return the M to use now, with ``running`` sequences in the ring."""
        latency_s = self._model.latency_s(self._newest) if self._newest is not None else 0.0
        return self._sizer.decide(replace(self._ring, latency_s=latency_s), sequences=running).micro_batches
