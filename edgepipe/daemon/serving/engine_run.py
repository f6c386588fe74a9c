"""One engine of this node, from its request to its stop, over all its processes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from edgepipe.daemon.processes.children import Child
from edgepipe.daemon.serving.restarts import SHORT_PAUSE_S
from edgepipe.errors import EdgepipeError, StageLost
from edgepipe.ids import PipelineId
from edgepipe.wire.engines import Advice, EngineState, Quarantined, ServeSpec, StagePlacement, StageState
from edgepipe.wire.serving import StartEngineRequest


@dataclass(slots=True, kw_only=True)
class EngineRun:
    """What an engine's host knows of it."""

    number: int
    request: StartEngineRequest
    model_config: str
    model_weights: str = ""
    spec: ServeSpec
    state: EngineState
    advice: Advice | None = None  # a better placement than the one in ``spec``
    # The engine's quarantines, each until a time on the loop's clock.
    avoided: tuple[tuple[float, Quarantined], ...] = ()
    child: Child | None = None
    paused: bool = False  # its process has ended, the next one is not due yet
    launching: asyncio.Task[EdgepipeError | None] | None = None  # the newest start of a process
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the host has forgotten the engine

    @property
    def pipeline_id(self) -> PipelineId:
        """The pipeline that the engine drives."""
        return self.request.pipeline_id

    def note_placement(self, *, now_s: float) -> None:
        """Keep the stages and the avoided nodes that the engine reports: only the engine knows them."""
        self.avoided = tuple((now_s + left_out.seconds, left_out) for left_out in self.state.left_out)
        if self.state.state == "ready":
            self.spec = replace(self.spec, stages=tuple(_placement(stage) for stage in self.state.stages))

    def set_advice(self, advice: Advice | None) -> None:
        """Publish a better placement with the state; None withdraws it."""
        self.advice, self.state = advice, replace(self.state, advice=advice)

    def show_pause(self, error: EdgepipeError, *, left_s: float, wall_s: float) -> None:
        """Show that the engine ended, and when it starts again. Requests wait for a short pause only."""
        long = left_s > SHORT_PAUSE_S
        self.paused, self.child = True, None
        self.state = replace(
            self.state,
            state="waiting" if long else "recovering",
            error=self._crash(error) if long else None,
            message=f"starting the engine again{f' in {left_s:.0f} s' if left_s else ''}",
            progress=0.0,
            address="",
            starts_at_us=int((wall_s + left_s) * 1e6) if left_s else 0,
        )

    def show_start(self) -> None:
        """Show that the next process starts, if the engine was paused."""
        if self.paused:
            self.paused = False
            self.state = replace(
                self.state, state="recovering", error=None, message="starting the engine again", starts_at_us=0
            )

    def _crash(self, error: EdgepipeError) -> EdgepipeError:
        """Return what a person reads while a crashed engine pauses."""
        return StageLost(
            f"the engine of '{self.spec.model}' ended again and again",
            fact=f"the last time: {'; '.join(error.lines()[:2])}",
            next_step=f"it starts again by itself; at once with: edgepipe serve {self.spec.model}",
            node=error.node,
        )


def _placement(stage: StageState) -> StagePlacement:
    """Return a reported stage as the placement that prepares it again."""
    return StagePlacement(node_id=stage.node_id, slices=stage.slices, ram_percent=stage.ram_percent)
