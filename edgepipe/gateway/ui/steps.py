"""Steps of an engine for the page's Gantt chart: asked for while a page shows them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from edgepipe.errors import EdgepipeError
from edgepipe.gateway.engine_types import RoutedModel
from edgepipe.link.channels import make_channel, translated
from edgepipe.security.mutual_tls import Security
from edgepipe.wire.codec import from_wire
from edgepipe.wire.engines import EngineTrace, StepTrace
from edgepipe.wire.step_clocks import clock_offsets_s
from edgepipe.wire.v1 import engine_pb2, engine_pb2_grpc

MOST_STEPS = 60  # newest steps in an event; four events a second stay below 40 KB/s
_EVERY_S = 0.25
_AGAIN_S = 1.0  # pause after an error
_TRACE_S = 2.0
_UNTIMED_STEPS = 64  # steps that may lack a stage's report while newer ones have all


class NewSteps:
    """Finds the new steps of a trace, on the engine's clock (PURE)."""

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self.after = 0  # ask for steps beyond this one
        self._sent: set[int] = set()

    def take(self, trace: EngineTrace) -> dict[str, Any] | None:
        """Return the event of the steps that all stages have reported and that were not sent; None without any."""
        whole = [step for step in trace.steps if len(step.spans) == self._num_stages]
        new = [step for step in whole if step.step not in self._sent][-MOST_STEPS:]
        self._go_on(trace, whole)
        if not new:
            return None
        offsets = [round(offset_s * 1e6) for offset_s in clock_offsets_s([step.spans for step in whole])]
        return {"now_us": trace.now_us, "steps": [_row(step, offsets) for step in new]}

    def _go_on(self, trace: EngineTrace, whole: Sequence[StepTrace]) -> None:
        """Set ``after``: a step without all reports is asked for again, for a while."""
        if not whole:
            return
        newest = whole[-1].step
        known = {step.step for step in whole}
        open_steps = [step.step for step in trace.steps if step.step not in known]
        first_open = next((step for step in open_steps if step > newest - _UNTIMED_STEPS), newest + 1)
        self.after = min(newest, first_open - 1)
        self._sent = {step for step in self._sent | known if step > self.after}


def _row(step: StepTrace, offsets_us: Sequence[int]) -> list[Any]:
    """Return a step: number, decode rows, prompt tokens, M, time of its plan, KV blocks, then begin and length of each
    stage's work; times in microseconds of the engine's clock."""
    spans: list[int] = []
    for span, offset_us in zip(step.spans, offsets_us, strict=True):
        spans += (span.begin_us - offset_us, span.end_us - span.begin_us)
    return [
        step.step,
        step.decode_rows,
        step.prefill_tokens,
        step.micro_batches,
        step.planned_us,
        step.used_blocks,
        *spans,
    ]


async def follow_steps(
    served: Callable[[], RoutedModel | None], security: Security, *, tell: Callable[[dict[str, Any]], None]
) -> None:
    """Ask the engine of a model for its steps until cancelled. ``served``: None while the model has no engine."""
    while True:
        if (model := served()) is not None and model.ring is not None:
            try:
                await _follow(model, NewSteps(len(model.ring.stages)), served, security, tell)
            except EdgepipeError:
                pass  # the engine recovers, or another takes its place
        await asyncio.sleep(_AGAIN_S)


async def _follow(
    model: RoutedModel,
    news: NewSteps,
    served: Callable[[], RoutedModel | None],
    security: Security,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    async with make_channel(model.address, security.to_process(model.certificate)) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        while (now := served()) is not None and (now.address, now.epoch) == (model.address, model.epoch):
            with translated(f"the engine of '{model.name}'"):
                reply = await stub.Trace(engine_pb2.TraceEngine(after_step=news.after), timeout=_TRACE_S)
            if (found := news.take(from_wire(reply, EngineTrace))) is not None:
                tell({"model": model.name, "epoch": model.epoch.counter, **found})
            await asyncio.sleep(_EVERY_S)
