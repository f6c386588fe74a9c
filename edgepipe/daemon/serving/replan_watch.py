"""Checks whether running models are still placed well; advises a better placement with its gain, or moves there.

A plan rests on measurements of idle devices and links. When the running ring's times differ for a while, or a machine
joins, the search runs again with the newer numbers. Changes of the cluster drive the checks; no timer does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field

from edgepipe.clock import Clock
from edgepipe.daemon.serving.engines import EngineHost
from edgepipe.daemon.serving.replanning import Known, Replanner, placed_of, seen_experts
from edgepipe.errors import EdgepipeError
from edgepipe.planner.drift import Departure, Seen, corrected
from edgepipe.planner.forecast import Ring
from edgepipe.planner.moving import LEAST_GAIN, MoveCost, move_cost, worth_moving
from edgepipe.planner.placement import Placed
from edgepipe.planner.plan import Plan, describe
from edgepipe.planner.preview import plan_text
from edgepipe.planner.steadiness import Steadiness
from edgepipe.units import format_duration_s
from edgepipe.wire.engines import Advice, EngineState, ServeSpec, StagePlacement

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two checks of one ring's times
_AWHILE_S = 30.0  # between two tries to learn the cluster's speeds
_SETTLED_S = 10.0  # after an epoch began, until times belong to that epoch
_REST_S = 300.0  # between two moves of one model


@dataclass(slots=True, kw_only=True)
class _Watched:
    """One running model in its present placement."""

    stages: tuple[StagePlacement, ...]
    since_s: float
    usable: frozenset[str]  # nodes that were usable at the placement or at the last check
    looked_s: float = float("-inf")
    known: Known | None = None  # the cluster's speeds, corrected by the ring's times
    steadiness: Steadiness = field(default_factory=Steadiness)
    task: asyncio.Task[None] | None = None  # learns the speeds, or searches
    left: tuple[Departure, ...] = ()


class ReplanWatch:
    """Checks the placements of the engines beside this daemon."""

    def __init__(
        self,
        *,
        engines: EngineHost,
        replanner: Replanner,
        clock: Clock,
        changes: Callable[[], AsyncIterator[None]],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._engines = engines
        self._replanner = replanner
        self._clock = clock
        self._changes = changes
        self._tasks = tasks
        self._watched: dict[str, _Watched] = {}
        self._moved_s: dict[str, float] = {}  # when stages last moved automatically

    async def run(self) -> None:
        """Check every ready model after each change, until cancelled."""
        async for _ in self._changes():
            ready = self._engines.ready()
            for pipeline_id in self._watched.keys() - {pipeline_id for pipeline_id, _ in ready}:
                self._forget(pipeline_id)
            for pipeline_id, spec in ready:
                self._look(pipeline_id, spec)

    def _forget(self, pipeline_id: str) -> None:
        watched = self._watched.pop(pipeline_id)
        if watched.task is not None:
            watched.task.cancel()

    def _look(self, pipeline_id: str, spec: ServeSpec) -> None:
        now_s = self._clock.monotonic_s()
        usable = self._replanner.usable(spec, own=pipeline_id) - self._engines.avoided(pipeline_id).nodes
        watched = self._watched.get(pipeline_id)
        if watched is None or watched.stages != spec.stages:
            if watched is not None:
                self._forget(pipeline_id)
                self._engines.advise(pipeline_id, None)
            watched = self._watched[pipeline_id] = _Watched(stages=spec.stages, since_s=now_s, usable=usable)
        if watched.task is not None and not watched.task.done():
            return
        if watched.known is None:
            if now_s - watched.looked_s >= _AWHILE_S:
                watched.looked_s = now_s
                self._start(pipeline_id, watched, self._learn(watched, pipeline_id, spec))
            return
        joined = usable - watched.usable
        if watched.usable - usable:
            self._engines.advise(pipeline_id, None)  # the advice may name a node that is draining or gone
        watched.usable = usable
        if joined:
            self._start(pipeline_id, watched, self._search(watched, pipeline_id, spec, joined=joined))
        elif now_s - watched.looked_s >= _LOOK_S and now_s - watched.since_s >= _SETTLED_S:
            watched.looked_s = now_s
            self._compare(pipeline_id, watched, spec, now_s)

    def _compare(self, pipeline_id: str, watched: _Watched, spec: ServeSpec, now_s: float) -> None:
        """Start a search once the ring's times have differed from the plan steadily."""
        placed = placed_of(spec)
        seen = _seen(self._engines.state_of(pipeline_id), placed)
        watched.known = self._with_experts(pipeline_id, watched.known)
        ring = _ring(watched.known, placed)
        if seen is None or ring is None:
            return  # an idle ring shows no times; earlier differences stay valid
        planned = ring.of(seen.micro_batches, seen.sequences)
        lasting = watched.steadiness.add(planned, seen, now_s=now_s)
        if lasting is not None:
            watched.left = lasting.departures
            self._start(pipeline_id, watched, self._search(watched, pipeline_id, spec, seen=lasting.seen))

    def _start(self, pipeline_id: str, watched: _Watched, work: Coroutine[None, None, None]) -> None:
        watched.task = self._tasks.create_task(work, name=f"replan:{pipeline_id}")

    async def _learn(self, watched: _Watched, pipeline_id: str, spec: ServeSpec) -> None:
        """Load the measurements that the plan rests on."""
        try:
            watched.known = await self._replanner.known(pipeline_id, spec)
        except EdgepipeError as error:
            logger.info("nothing is known of the cluster for model=%s: %s", spec.model, error)

    async def _search(
        self,
        watched: _Watched,
        pipeline_id: str,
        spec: ServeSpec,
        *,
        joined: Collection[str] = (),
        seen: Seen | None = None,
    ) -> None:
        """Search for a better placement, then advise it or move there."""
        try:
            placed = placed_of(spec)
            known = await self._updated(watched, pipeline_id, spec, placed, joined=joined, seen=seen)
            if _ring(known, placed) is None:
                return  # a node of the ring is gone: the engine itself asks for a placement
            found = await self._replanner.search(known, spec, self._engines.avoided(pipeline_id))
            machines, links = known.cluster.machines, known.cluster.links
            now, better = (describe(known.demand, placement, machines, links) for placement in (placed, found))
            gain = better.tokens_per_s / now.tokens_per_s - 1
            if gain < LEAST_GAIN:
                self._engines.advise(pipeline_id, None)
                return
            cost = self._cost(known, pipeline_id, placed, better, now)
            why = self._why(joined, watched.left if seen is not None else (), now)
            self._tell(pipeline_id, spec, found, better, gain=gain, cost=cost, why=why)
        except EdgepipeError as error:
            logger.info("not planned again model=%s: %s", spec.model, error)

    async def _updated(
        self,
        watched: _Watched,
        pipeline_id: str,
        spec: ServeSpec,
        placed: Sequence[Placed],
        *,
        joined: Collection[str],
        seen: Seen | None,
    ) -> Known:
        """Return the newest speeds. Corrections by the ring persist, so the same difference is reported once."""
        before = watched.known
        assert before is not None
        ring = _ring(before, placed)
        if seen is not None and ring is not None:
            cluster = corrected(before.cluster, placed, ring.of(seen.micro_batches, seen.sequences), seen)
            watched.known = Known(model=before.model, demand=before.demand, cluster=cluster)
        if joined:
            fresh = await self._replanner.known(pipeline_id, spec, measure=joined)
            speeds = {machine.node_id: machine for machine in watched.known.cluster.machines} if watched.known else {}
            watched.known = Known(
                model=fresh.model, demand=fresh.demand, cluster=fresh.cluster.with_speeds_of(speeds.values())
            )
        watched.known = known = self._with_experts(pipeline_id, watched.known)
        assert known is not None
        return known

    def _with_experts(self, pipeline_id: str, known: Known | None) -> Known | None:
        """Return the speeds for a model that reads as many experts as its engine has seen."""
        state = self._engines.state_of(pipeline_id)
        return seen_experts(known, state.expert_shares) if known is not None and state is not None else known

    def _cost(self, known: Known, pipeline_id: str, placed: Sequence[Placed], better: Plan, now: Plan) -> MoveCost:
        state = self._engines.state_of(pipeline_id)
        kept = (state.num_blocks - state.free_blocks) * state.block_size if state is not None and state.running else 0
        rates = [hop.link.shape.bytes_per_s for hop in better.single.hops]
        prompt_s = now.first_token_s / now.demand.read_tokens  # per token of a prompt in an idle ring
        return move_cost(
            known.model.config,
            placed,
            better.placed,
            {machine.node_id: machine.room for machine in known.cluster.machines},
            fetch_bytes=self._replanner.fetch_bytes(known.model),
            fetch_bytes_per_s=min(rates, default=1e9 / 8),
            replay_s=kept * prompt_s,
            weights=known.demand.weights,
        )

    def _why(self, joined: Collection[str], left: Sequence[Departure], now: Plan) -> str:
        if joined:
            names = sorted(self._replanner.name(node_id) for node_id in joined)
            return f"{' and '.join(names)} can be used now"
        worst = left[0]
        kind, _, index = worst.place.partition(" ")
        stages = [now.stages[int(number)].machine.name for number in index.split("-")]
        place = f"{kind} {' to '.join(stages)}"
        return f"{place} takes {format_duration_s(worst.seen_s)} instead of {format_duration_s(worst.planned_s)}"

    def _tell(
        self,
        pipeline_id: str,
        spec: ServeSpec,
        found: Sequence[Placed],
        better: Plan,
        *,
        gain: float,
        cost: MoveCost,
        why: str,
    ) -> None:
        where = plan_text(better)
        spec = dict(self._engines.ready()).get(pipeline_id, spec)  # a user may have changed it during the search
        now_s = self._clock.monotonic_s()
        rested = now_s - self._moved_s.get(pipeline_id, float("-inf")) >= _REST_S
        if spec.moves and rested and worth_moving(gain, cost):
            logger.info("model=%s moves to %s, for %.0f %% more: %s", spec.model, where, 100 * gain, why)
            self._moved_s[pipeline_id] = now_s
            self._engines.move(pipeline_id, self._replanner.made(spec, found))
            return
        logger.warning("model=%s would be %.0f %% faster as %s: %s", spec.model, 100 * gain, where, why)
        self._engines.advise(pipeline_id, Advice(why=why, plan=where, gain=gain, pause_s=cost.pause_s))


def _ring(known: Known | None, placed: Sequence[Placed]) -> Ring | None:
    """Return the ring as it was planned; None if a machine of it is unknown."""
    if known is None:
        return None
    machines = {machine.node_id: machine for machine in known.cluster.machines}
    if any(piece.node_id not in machines for piece in placed):
        return None
    return Ring(known.demand, placed, machines, known.cluster.links)


def _seen(state: EngineState | None, placed: Sequence[Placed]) -> Seen | None:
    """Return the times that a ring of one slice per node shows; None while it shows none."""
    if state is None or not state.running or not state.decode_rows or len(state.stages) != len(placed):
        return None
    stages = {stage.node_id: stage for stage in state.stages}
    if len(stages) != len(placed) or any(piece.node_id not in stages for piece in placed):
        return None
    ordered = [stages[piece.node_id] for piece in placed]
    return Seen(
        micro_batches=max(1, round(state.running / state.decode_rows)),
        sequences=state.running,
        step_s=tuple(stage.decode_ms / 1e3 for stage in ordered),
        upload_s=tuple(stage.decode_upload_ms / 1e3 for stage in ordered[:-1]),
        one_way_s=tuple(stage.one_way_ms / 1e3 for stage in ordered[:-1]),
    )
