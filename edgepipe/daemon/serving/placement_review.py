"""PURE: whether running models are still placed well, and what comes of a better placement. Events in, commands out.

A plan rests on measurements of idle devices and links. When the running ring's times differ for a while, or a machine
joins, the search runs again with the newer numbers. Of one model, one task runs at a time::

    look ──nothing known──> LEARN ──> look ──times differ──> SEARCH ──better──> advise, or move
                                       │                       ▲
                                       └─a machine joined─> LEARN

It uses no clock and no network: callers pass times as monotonic seconds. The shell is ``ReplanWatch``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from edgepipe.daemon.serving.replanning import Known, placed_of, seen_experts
from edgepipe.ids import NodeId
from edgepipe.planner.drift import Departure, Seen, corrected
from edgepipe.planner.forecast import Ring
from edgepipe.planner.moving import LEAST_GAIN, MoveCost, move_cost, worth_moving
from edgepipe.planner.placement import Placed
from edgepipe.planner.plan import Plan, describe
from edgepipe.planner.preview import plan_text
from edgepipe.planner.steadiness import Steadiness
from edgepipe.spec.facts import Slice
from edgepipe.units import format_duration_s
from edgepipe.wire.engines import Advice, EngineState, ServeSpec, StagePlacement

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # interval between two checks of one ring's times
_AWHILE_S = 30.0  # interval between two tries to learn the cluster's speeds
_SETTLED_S = 10.0  # time after an epoch began until times belong to that epoch
_REST_S = 300.0  # pause between two moves of one model


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRing:
    """One ready engine, as its daemon knows it now."""

    spec: ServeSpec
    usable: frozenset[str]  # nodes that may hold its stages, without those that the engine avoids
    state: EngineState | None


# Events. ``task`` is the number of the command that is answered.


@dataclass(frozen=True, slots=True)
class Looked:
    """The cluster or the engines may have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The cluster's speeds are known; None: they are not."""

    task: int
    known: Known | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlacement:
    """The best placement by the given speeds; None: the search failed."""

    task: int
    placed: tuple[Placed, ...] | None
    fetch_bytes: Callable[[NodeId, Sequence[Slice]], int]  # bytes that a node must fetch before it loads slices


Event = Looked | Learned | FoundPlacement


# Commands. ``Learn`` and ``SearchPlacement`` are each answered by one event, unless ``Cancel`` ends them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn:
    """Load the measurements that the plan rests on; measure the nodes that joined. Answer: Learned."""

    task: int
    pipeline_id: str
    spec: ServeSpec
    joined: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlacement:
    """Search for the best placement. Answer: FoundPlacement."""

    task: int
    pipeline_id: str
    spec: ServeSpec
    known: Known


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """End a task whose result is no longer wanted."""

    task: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advise:
    """Publish a better placement; None withdraws it."""

    pipeline_id: str
    advice: Advice | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Move the stages."""

    pipeline_id: str
    spec: ServeSpec
    placed: tuple[Placed, ...]


Command = Learn | SearchPlacement | Cancel | Advise | Move


@dataclass(slots=True, kw_only=True)
class _Watched:
    """One running model in its present placement."""

    stages: tuple[StagePlacement, ...]
    since_s: float
    usable: frozenset[str]  # nodes that were usable at the placement or at the last check
    looked_s: float = float("-inf")
    known: Known | None = None  # the cluster's speeds, corrected by the ring's times
    steadiness: Steadiness = field(default_factory=Steadiness)
    task: int = 0  # the open one; 0: none
    joined: frozenset[str] = frozenset()  # the nodes, or else the departures, for which the open task began
    left: tuple[Departure, ...] = ()


class PlacementReview:
    """The placements of the engines beside one daemon. Call ``handle`` with every event, in order."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}  # one per pipeline
        self._moved_s: dict[str, float] = {}  # times when stages last moved automatically
        self._tasks = 0

    def handle(self, event: Event, rings: Mapping[str, RunningRing], now_s: float) -> list[Command]:
        """Handle an event at ``now_s`` (monotonic seconds) with all ready engines, by pipeline.

        Return the commands to execute, in order. Raises EdgepipeError if speeds do not match a placement.
        """
        if isinstance(event, Looked):
            gone = [
                command for pipeline_id in self._watched.keys() - rings.keys() for command in self._forget(pipeline_id)
            ]
            looks = [command for pipeline_id, ring in rings.items() for command in self._look(pipeline_id, ring, now_s)]
            return [*gone, *looks]
        for pipeline_id, watched in self._watched.items():
            if watched.task == event.task:
                watched.task = 0
                ring = rings.get(pipeline_id)
                return self._went_on(event, pipeline_id, watched, ring, now_s) if ring is not None else []
        return []

    def _forget(self, pipeline_id: str) -> list[Command]:
        watched = self._watched.pop(pipeline_id)
        return [Cancel(task=watched.task)] if watched.task else []

    def _look(self, pipeline_id: str, ring: RunningRing, now_s: float) -> list[Command]:
        commands: list[Command] = []
        watched = self._watched.get(pipeline_id)
        if watched is None or watched.stages != ring.spec.stages:
            if watched is not None:
                commands = [*self._forget(pipeline_id), Advise(pipeline_id=pipeline_id, advice=None)]
            watched = _Watched(stages=ring.spec.stages, since_s=now_s, usable=ring.usable)
            self._watched[pipeline_id] = watched
        if watched.task:
            return commands
        if watched.known is None:
            if now_s - watched.looked_s >= _AWHILE_S:
                watched.looked_s = now_s
                commands.append(self._learn(pipeline_id, watched, ring, frozenset()))
            return commands
        joined = ring.usable - watched.usable
        if watched.usable - ring.usable:  # the advice may name a node that is draining or gone
            commands.append(Advise(pipeline_id=pipeline_id, advice=None))
        watched.usable = ring.usable
        if joined:
            commands.append(self._learn(pipeline_id, watched, ring, joined))
        elif now_s - watched.looked_s >= _LOOK_S and now_s - watched.since_s >= _SETTLED_S:
            watched.looked_s = now_s
            commands += self._compare(pipeline_id, watched, ring, now_s)
        return commands

    def _new_task(self, watched: _Watched, joined: frozenset[str]) -> int:
        self._tasks += 1
        watched.task, watched.joined = self._tasks, joined
        return self._tasks

    def _learn(self, pipeline_id: str, watched: _Watched, ring: RunningRing, joined: frozenset[str]) -> Command:
        task = self._new_task(watched, joined)
        return Learn(task=task, pipeline_id=pipeline_id, spec=ring.spec, joined=joined)

    def _search(self, pipeline_id: str, watched: _Watched, ring: RunningRing) -> list[Command]:
        known = watched.known = _with_experts(watched.known, ring.state)
        if known is None or _ring(known, placed_of(ring.spec)) is None:
            return []  # a node of the ring is gone: the engine itself asks for a placement
        task = self._new_task(watched, watched.joined)
        return [SearchPlacement(task=task, pipeline_id=pipeline_id, spec=ring.spec, known=known)]

    def _compare(self, pipeline_id: str, watched: _Watched, ring: RunningRing, now_s: float) -> list[Command]:
        """Start a search once the ring's times have differed from the plan steadily.

        Corrections by the ring persist, so the same difference is reported once.
        """
        placed = placed_of(ring.spec)
        seen = _seen(ring.state, placed)
        known = watched.known = _with_experts(watched.known, ring.state)
        forecast = _ring(known, placed)
        if seen is None or known is None or forecast is None:
            return []  # an idle ring shows no times; earlier differences stay valid
        lasting = watched.steadiness.add(forecast.of(seen.micro_batches, seen.sequences), seen, now_s=now_s)
        if lasting is None:
            return []
        seen, watched.left, watched.joined = lasting.seen, lasting.departures, frozenset()
        cluster = corrected(known.cluster, placed, forecast.of(seen.micro_batches, seen.sequences), seen)
        watched.known = Known(model=known.model, demand=known.demand, cluster=cluster)
        return self._search(pipeline_id, watched, ring)

    def _went_on(
        self, event: Learned | FoundPlacement, pipeline_id: str, watched: _Watched, ring: RunningRing, now_s: float
    ) -> list[Command]:
        if isinstance(event, FoundPlacement):
            return self._found(event, pipeline_id, watched, ring, now_s)
        if event.known is None or watched.known is None:
            watched.known = watched.known or event.known
            return []
        cluster = event.known.cluster.with_speeds_of(watched.known.cluster.machines)
        watched.known = Known(model=event.known.model, demand=event.known.demand, cluster=cluster)
        return self._search(pipeline_id, watched, ring)

    def _found(
        self, event: FoundPlacement, pipeline_id: str, watched: _Watched, ring: RunningRing, now_s: float
    ) -> list[Command]:
        """Advise a clearly better placement, or move there."""
        known, found = watched.known, event.placed
        if known is None or found is None:
            return []
        placed = placed_of(ring.spec)
        machines, links = known.cluster.machines, known.cluster.links
        now, better = (describe(known.demand, placement, machines, links) for placement in (placed, found))
        gain = better.tokens_per_s / now.tokens_per_s - 1
        if gain < LEAST_GAIN:
            return [Advise(pipeline_id=pipeline_id, advice=None)]
        cost = _cost(known, ring.state, placed, better, now, event.fetch_bytes)
        where, why = plan_text(better), _why(watched, known, now)
        rested = now_s - self._moved_s.get(pipeline_id, float("-inf")) >= _REST_S
        spec = ring.spec
        if spec.moves and rested and worth_moving(gain, cost):
            logger.info("model=%s moves to %s, for %.0f %% more: %s", spec.model, where, 100 * gain, why)
            self._moved_s[pipeline_id] = now_s
            return [Move(pipeline_id=pipeline_id, spec=spec, placed=found)]
        logger.warning("model=%s would be %.0f %% faster as %s: %s", spec.model, 100 * gain, where, why)
        advice = Advice(why=why, plan=where, gain=gain, pause_s=cost.pause_s)
        return [Advise(pipeline_id=pipeline_id, advice=advice)]


def _with_experts(known: Known | None, state: EngineState | None) -> Known | None:
    """Return the speeds for a model that reads as many experts as its engine has seen."""
    return seen_experts(known, state.expert_shares) if known is not None and state is not None else known


def _cost(
    known: Known,
    state: EngineState | None,
    placed: Sequence[Placed],
    better: Plan,
    now: Plan,
    fetch_bytes: Callable[[NodeId, Sequence[Slice]], int],
) -> MoveCost:
    kept = (state.num_blocks - state.free_blocks) * state.block_size if state is not None and state.running else 0
    rates = [hop.link.shape.bytes_per_s for hop in better.single.hops]
    prompt_s = now.prompt.first_token_s / now.prompt.prompt_tokens  # time per token of a prompt in an idle ring
    return move_cost(
        known.model.config,
        placed,
        better.placed,
        {machine.node_id: machine.room for machine in known.cluster.machines},
        fetch_bytes=fetch_bytes,
        fetch_bytes_per_s=min(rates, default=1e9 / 8),
        replay_s=kept * prompt_s,
        weights=known.demand.weights,
    )


def _why(watched: _Watched, known: Known, now: Plan) -> str:
    if watched.joined:
        names = {machine.node_id: machine.name for machine in known.cluster.machines}
        return f"{' and '.join(sorted(names.get(NodeId(node), node) for node in watched.joined))} can be used now"
    worst = watched.left[0]
    kind, _, index = worst.place.partition(" ")
    stages = [now.stages[int(number)].machine.name for number in index.split("-")]
    place = f"{kind} {' to '.join(stages)}"
    return f"{place} takes {format_duration_s(worst.seen_s)} instead of {format_duration_s(worst.planned_s)}"


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
