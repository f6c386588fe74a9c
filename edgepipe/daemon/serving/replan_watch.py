"""Checks whether running models are still placed well; advises a better placement with its gain, or moves there.

``placement_review`` decides. Changes of the cluster drive the checks; no timer does.
"""

from __future__ import annotations

import asyncio
import logging

from edgepipe.clock import Clock
from edgepipe.daemon.offers import PublishedState
from edgepipe.daemon.serving.engines import EngineHost
from edgepipe.daemon.serving.placement_review import (
    Advise,
    Cancel,
    Event,
    FoundPlacement,
    Learn,
    Learned,
    Looked,
    Move,
    PlacementReview,
    RunningRing,
    SearchPlacement,
)
from edgepipe.daemon.serving.replanning import Replanner
from edgepipe.errors import EdgepipeError

logger = logging.getLogger(__name__)


class ReplanWatch:
    """Checks the placements of the engines beside this daemon."""

    def __init__(
        self,
        *,
        engines: EngineHost,
        replanner: Replanner,
        clock: Clock,
        local: PublishedState,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._engines = engines
        self._replanner = replanner
        self._clock = clock
        self._local = local
        self._tasks = tasks
        self._review = PlacementReview()
        self._open: dict[int, asyncio.Task[None]] = {}  # keys are the tasks' numbers

    async def run(self) -> None:
        """Check every ready model after each change, until cancelled."""
        async for _ in self._local.watch():
            for work in self._happens(Looked()):
                task = self._tasks.create_task(self._work(work), name=f"replan:{work.pipeline_id}")
                self._open[work.task] = task
                task.add_done_callback(lambda _, number=work.task: self._open.pop(number, None))

    def _rings(self) -> dict[str, RunningRing]:
        return {
            pipeline_id: RunningRing(
                spec=spec,
                usable=self._replanner.usable(spec, own=pipeline_id) - self._engines.avoided(pipeline_id).nodes,
                state=self._engines.state_of(pipeline_id),
            )
            for pipeline_id, spec in self._engines.ready()
        }

    def _happens(self, event: Event) -> list[Learn | SearchPlacement]:
        """Carry out what takes no time; return the rest."""
        try:
            commands = self._review.handle(event, self._rings(), self._clock.monotonic_s())
        except EdgepipeError as error:
            logger.info("not planned again: %s", error)
            return []
        for command in commands:
            match command:
                case Cancel():
                    if (task := self._open.get(command.task)) is not None:
                        task.cancel()
                case Advise():
                    self._engines.advise(command.pipeline_id, command.advice)
                case Move():
                    self._engines.move(command.pipeline_id, self._replanner.made(command.spec, command.placed))
                case Learn() | SearchPlacement():
                    pass
        return [command for command in commands if isinstance(command, Learn | SearchPlacement)]

    async def _work(self, work: Learn | SearchPlacement) -> None:
        """Learn or search, and go on with what follows from that."""
        following = self._happens(await (self._learn(work) if isinstance(work, Learn) else self._search(work)))
        for next_work in following:
            self._open[next_work.task] = self._open.pop(work.task)
            await self._work(next_work)

    async def _learn(self, work: Learn) -> Learned:
        try:
            known = await self._replanner.known(work.pipeline_id, work.spec, measure=work.joined)
        except EdgepipeError as error:
            logger.info("nothing is known of the cluster for model=%s: %s", work.spec.model, error)
            known = None
        return Learned(task=work.task, known=known)

    async def _search(self, work: SearchPlacement) -> FoundPlacement:
        fetch_bytes = self._replanner.fetch_bytes(work.known.model)
        try:
            avoided = self._engines.avoided(work.pipeline_id)
            placed = await self._replanner.search(work.known, work.spec, avoided)
        except EdgepipeError as error:
            logger.info("not planned again model=%s: %s", work.spec.model, error)
            placed = None
        return FoundPlacement(task=work.task, placed=placed, fetch_bytes=fetch_bytes)
