"""Feeds the engine's sizer with what an imagined ring measures. PURE."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.backend.cost import StepWork
from edgepipe.planner.ring import Course, RingModel
from edgepipe.scheduler.sizing import LinkCurve, Ring, Sizer, StageCurve

_SMOOTHING = 0.05  # weight of the newest turn's latency, as the engine has it


class SizingFeed:
    """Tells which M to use next, once a step has come back."""

    def __init__(self, ring: RingModel, *, row_bytes: int) -> None:
        self._model = ring
        self._latency_s: float | None = None
        self._curves = [StageCurve() for _ in ring.stages]
        devices: dict[str, list[StageCurve]] = {}
        for index, (stage, curve) in enumerate(zip(ring.stages, self._curves, strict=True)):
            devices.setdefault(stage.device or str(index), []).append(curve)
        self._ring = Ring(
            stages=list(devices.values()),
            links=[LinkCurve() for _ in self._curves[1:]],
            row_bytes=row_bytes,
            latency_s=0.0,
        )
        self._sizer = Sizer(num_stages=len(devices))

    def retired(self, work: StepWork, course: Course, *, running: int) -> bool:
        """Take a step's times, while so many sequences run; whether it is time to ask for ``micro_batches``."""
        num_tokens = work.tokens
        for curve, (start_s, end_s) in zip(self._curves, course.stages, strict=True):
            curve.note(num_rows=work.rows, num_tokens=num_tokens, seconds=end_s - start_s)
        for link, seconds in zip(self._ring.links, course.uploads_s, strict=False):  # the last way carries ids
            link.note_upload(num_bytes=num_tokens * self._ring.row_bytes, seconds=seconds)
        if num_tokens == work.rows:
            self._note_latency(self._model.latency_s(work))
        return self._sizer.due(sequences=running)

    def micro_batches(self, *, running: int) -> int:
        """The M to use now, with ``running`` sequences sharing the ring."""
        ring = replace(self._ring, latency_s=self._latency_s or 0.0)
        return self._sizer.decide(ring, sequences=running).micro_batches

    def _note_latency(self, seconds: float) -> None:
        known_s = seconds if self._latency_s is None else self._latency_s
        self._latency_s = known_s + _SMOOTHING * (seconds - known_s)
