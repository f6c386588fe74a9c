"""PURE: decide on the next epoch, its placement, and when to refuse requests. Events in, commands out.

::

    STARTING ──opened──> SERVING ──a move is wanted──> PREPARING_BESIDE
        │ failed            │ ▲                             │ prepared: the running epoch ends, the next one opens
        ▼                   │ └───────────opened────────────┤ failed: the running epoch goes on
    STOPPED      epoch ended▼                               ▼ epoch ended
                        RECOVERING ──no room, or it fails again and again──> WAITING
                            ▲                                                   │ time, or the cluster changed
                            └───────────────────────────────────────────────────┘

Two placements are kept apart: the *running* one and the *attempted* one. Only an opened epoch turns the second into the
first. Every other fact has one owner, too: quarantines (``Quarantine``), who pays for the end of an epoch
(``Charges``), and the nodes that may hold a stage (``Recovery.held``).

It uses no clock and no network: callers pass times as monotonic seconds. The shell is ``Engine``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from math import ceil

from edgepipe.engine.charges import Charges, clause
from edgepipe.engine.pauses import growing
from edgepipe.engine.placing import EpochPlacement, ReachableNodes
from edgepipe.engine.quarantine import Missed, Quarantine, in_order
from edgepipe.engine.recovery_types import (
    Abandon,
    AskPlacement,
    ClusterChanged,
    Command,
    EndEpoch,
    EpochEnded,
    Event,
    Fail,
    MoveProposed,
    NotReleased,
    Open,
    Opened,
    OpeningFailed,
    Placement,
    Planned,
    PlanningFailed,
    PreparationFailed,
    Prepare,
    Refuse,
    Release,
    Serve,
    StagesLoaded,
    State,
    Stopped,
    Tick,
)
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.sites import StageSite
from edgepipe.errors import (
    EdgepipeError,
    NodeUnreachable,
    NoFeasiblePlacement,
    StagesMove,
    StaleEpoch,
)
from edgepipe.ids import Epoch, NodeId
from edgepipe.wire.engines import Quarantined, ServeSpec


class _Phase(Enum):
    """Progress of an attempt."""

    PLANNING = auto()
    PREPARING = auto()
    PREPARED = auto()  # waits for the running epoch to end
    OPENING = auto()


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """The attempted placement."""

    number: int
    phase: _Phase
    moves: bool = False  # a move: an epoch serves meanwhile
    placement: Placement | None = None  # set once it is known
    reloading: frozenset[str] = frozenset()  # names of nodes that must end their running stage to load other layers
    sites: tuple[StageSite, ...] = ()  # set once they are prepared

    @property
    def node_ids(self) -> frozenset[NodeId]:
        """Nodes of the attempted placement; empty while not known."""
        return self.placement.node_ids if self.placement is not None else frozenset()


class Recovery:
    """Decisions of one engine. Call ``begin`` or ``resume`` first, then ``handle`` with every event, in order."""

    def __init__(
        self,
        requested: EpochPlacement,
        *,
        epoch: Epoch,
        engine_node: str,
        limits: EngineLimits,
        timeouts: EngineTimeouts,
    ) -> None:
        """
        requested    first placement, as the user asked for it
        epoch        epoch of the first attempt; its counter is above any known one of the pipeline
        engine_node  name of the engine's node
        """
        self.state = State.STARTING
        self.message = ""  # current activity, for people
        self.error: EdgepipeError | None = None  # reason why no epoch serves
        self.wake_at_s: float | None = None  # time of the next Tick
        self.nodes = requested.nodes  # including nodes that plans have left
        self.running: Placement | None = None
        self.held: frozenset[NodeId] = frozenset()  # nodes that may hold a stage
        self.epoch = epoch  # epoch of the newest attempt
        self._next_counter = epoch.counter
        self._requested = requested.spec
        self._base = requested.spec  # spec of the last epoch that opened
        self._engine_node = engine_node
        self._limits = limits
        self._timeouts = timeouts
        self.moved = False  # the last epoch ended because of a requested move
        self._quarantine = Quarantine()
        self._charges = Charges(
            self._quarantine, name=lambda node_id: self.nodes.name(node_id), limits=limits, timeouts=timeouts
        )
        self._attempt: _Attempt | None = None
        self._attempts = 0
        self.reachable: ReachableNodes | None = None  # None: no daemon reports
        self._proposed: EpochPlacement | None = None  # next move, after the current attempt
        self._failures = 0  # attempts in a row that did not open
        self._opened_s = 0.0  # time when the running epoch opened
        self._fault: EdgepipeError | None = None  # the fault that ended the last epoch
        self._lacking_since_s: float | None = None  # time when the first placement since the last epoch was not found
        self._failed_moves = 0  # moves in a row that failed
        self._asked_s = float("-inf")  # time when the daemon was last asked for a placement

    def begin(self, now_s: float) -> list[Command]:
        """Prepare the first epoch at the requested placement."""
        self.message = "asking nodes for memory"
        return self._prepare(self._new_attempt(), self._requested, now_s)

    def resume(self, now_s: float) -> list[Command]:
        """Continue another engine's work: ask for a placement of its stages."""
        self.state, self.message = State.RECOVERING, "taking over from another engine"
        self.held = frozenset(stage.node_id for stage in self._requested.stages)  # prepared by the previous engine
        return self._ask(now_s)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        """Handle an event at ``now_s`` (monotonic seconds). Return the commands to execute, in order."""
        if self.state is State.STOPPED:
            return []
        if isinstance(event, Stopped):
            self.state, self.wake_at_s = State.STOPPED, None
            return [Abandon()]
        if isinstance(event, EpochEnded):
            return self._epoch_ended(event, now_s)
        if isinstance(event, NotReleased):
            return self._not_released(event.node_ids, now_s)
        if isinstance(event, ClusterChanged):
            return self._cluster_changed(event.reachable, now_s)
        if isinstance(event, MoveProposed):
            return self._move_proposed(event.plan, now_s)
        if isinstance(event, Tick):
            return self._tick(now_s)
        if self._attempt is None or event.attempt != self._attempt.number:
            return []
        return self._went_on(self._attempt, event, now_s)

    def doing(self, now_s: float) -> str:
        """Return the current activity for people. During a pause, it says when the next attempt is made."""
        if self.wake_at_s is None or not self.is_pausing:
            return self.message
        return f"{self.message}; the next attempt is in {max(1, ceil(self.wake_at_s - now_s))} s"

    @property
    def is_pausing(self) -> bool:
        """Whether no epoch serves and the next attempt has a time."""
        return self.running is None and self._attempt is None and self.wake_at_s is not None

    def left_out(self, now_s: float) -> tuple[Quarantined, ...]:
        """Return the current quarantines, with node names and reasons."""
        return tuple(
            replace(
                entry,
                node_name=self.nodes.name(entry.node_id),
                other_name=self.nodes.name(entry.other_id) if entry.other_id is not None else "",
            )
            for entry in self._quarantine.left_out(now_s)
        )

    # An attempt, from asking for a placement to an epoch that serves

    def _went_on(
        self,
        attempt: _Attempt,
        event: Planned | PlanningFailed | StagesLoaded | PreparationFailed | Opened | OpeningFailed,
        now_s: float,
    ) -> list[Command]:
        if isinstance(event, Planned):
            return self._planned(attempt, event.plan, now_s)
        if isinstance(event, PlanningFailed):
            return self._planning_failed(attempt, event.error, now_s)
        if isinstance(event, StagesLoaded):
            return self._prepared(attempt, event, now_s)
        if isinstance(event, PreparationFailed):
            if event.node_id is not None and self.state is not State.STARTING:
                self._quarantine.failed(event.node_id, clause(event.error), now_s)
            return self._attempt_failed(attempt, event.error, now_s)
        if isinstance(event, OpeningFailed):
            return self._opening_failed(attempt, event, now_s)
        return self._opened(attempt, now_s)

    def _new_attempt(self, *, moves: bool = False) -> _Attempt:
        self._attempts += 1
        self.wake_at_s = None
        self._attempt = _Attempt(number=self._attempts, phase=_Phase.PLANNING, moves=moves)
        return self._attempt

    def _ask(self, now_s: float, *, moves: bool = False) -> list[Command]:
        attempt, self._asked_s = self._new_attempt(moves=moves), now_s
        return [
            AskPlacement(
                attempt=attempt.number,
                spec=self._base,
                quarantined=self._quarantine.nodes(now_s),
                quarantined_links=self._quarantine.links(now_s),
            )
        ]

    def _planned(self, attempt: _Attempt, plan: EpochPlacement, now_s: float) -> list[Command]:
        self.nodes = self.nodes.updated(plan.nodes)
        if self.state is State.STARTING and not self._meets_request(plan.spec, now_s):
            assert self.error is not None, "a first attempt has failed"
            return self._fail(self.error)
        if attempt.moves and self.running is not None and plan.spec.stages == self.running.spec.stages:
            return self._move_failed(now_s)
        until_s = self._charges.pauses.until_s(stage.node_id for stage in plan.spec.stages)
        if not attempt.moves and until_s > now_s:
            return self._pause_before(until_s, now_s)
        return self._prepare(attempt, plan.spec, now_s)

    def _pause_before(self, until_s: float, now_s: float) -> list[Command]:
        """Wait before nodes are used again that ended epochs; no placement does without them."""
        error, pause_s = self._fault, until_s - now_s
        assert error is not None, "an epoch has ended"
        if self._charges.refuses_all(pause_s):
            broken = self._charges.broken(self._base.model, error, pause_s)
            return self._wait(broken, clause(error), until_s)
        self._attempt, self.message, self.wake_at_s = None, clause(error), until_s
        return []

    def _planning_failed(self, attempt: _Attempt, error: EdgepipeError, now_s: float) -> list[Command]:
        if self.state is State.STARTING:
            no_other_way = isinstance(error, NoFeasiblePlacement) and self.error is not None
            return self._fail(self.error if no_other_way and self.error is not None else error)
        if isinstance(error, NoFeasiblePlacement) and not attempt.moves:
            return self._no_room(error, now_s)
        return self._attempt_failed(attempt, error, now_s)

    def _no_room(self, error: NoFeasiblePlacement, now_s: float) -> list[Command]:
        """Ask again for a while before requests are refused: a device that restarts has room soon."""
        if self._lacking_since_s is None:
            self._lacking_since_s = now_s
        if self.state is not State.RECOVERING or now_s - self._lacking_since_s >= self._timeouts.patience_s:
            return self._wait(error, "waiting for memory", now_s + self._timeouts.room_s)
        self._attempt, self.error, self.message = None, error, "waiting for memory"
        self.wake_at_s = now_s + self._timeouts.ask_again_s
        return []

    def _prepare(self, attempt: _Attempt, spec: ServeSpec, now_s: float) -> list[Command]:
        self.epoch = replace(self.epoch, counter=self._next_counter)
        self._next_counter += 1
        placement = Placement(epoch=self.epoch, spec=spec)
        attempt.phase, attempt.placement = _Phase.PREPARING, placement
        if (gone := self._gone(placement)) is not None:
            return self._attempt_failed(attempt, self._unreachable(gone), now_s)
        self.held |= placement.node_ids
        if attempt.moves and self.running is not None:
            self.state = State.PREPARING_BESIDE
            attempt.reloading = self._reloading(self.running.spec, spec)
        return [Prepare(attempt=attempt.number, placement=placement, fresh=self._charges.fresh & placement.node_ids)]

    def _prepared(self, attempt: _Attempt, event: StagesLoaded, now_s: float) -> list[Command]:
        assert attempt.placement is not None, "it was prepared"
        commands = self._charges.prepared(attempt.node_ids, event.crashes, now_s)
        if attempt.moves:
            attempt.phase, attempt.sites = _Phase.PREPARED, event.sites
            return [*commands, *self._end_epoch(StagesMove())]
        return [*commands, *self._open(attempt, event.sites)]

    def _open(self, attempt: _Attempt, sites: tuple[StageSite, ...]) -> list[Command]:
        assert attempt.placement is not None, "it was prepared"
        attempt.phase, attempt.moves, self.message = _Phase.OPENING, False, "opening the pipeline"
        return [Open(attempt=attempt.number, placement=attempt.placement, sites=sites)]

    def _opened(self, attempt: _Attempt, now_s: float) -> list[Command]:
        assert attempt.placement is not None, "it was opened"
        if (gone := self._gone(attempt.placement)) is not None:
            return [Abandon(), *self._attempt_failed(attempt, self._unreachable(gone), now_s)]
        self._quarantine.note(Missed(), now_s)
        self._attempt, self.running, self._base = None, attempt.placement, attempt.placement.spec
        self._failures = self._failed_moves = 0
        self._opened_s = now_s
        self.state, self.error, self.message = State.SERVING, None, ""
        return [Serve(placement=self.running), *self._release_left(), *self._next_move(now_s)]

    def _opening_failed(self, attempt: _Attempt, event: OpeningFailed, now_s: float) -> list[Command]:
        error = event.error
        if self.state is State.STARTING and (own := event.missed.of_node(self._engine_node)):
            return self._fail(own.error(self.nodes, engine=self._engine_node))  # this node cannot host the engine
        if self._quarantine.note(event.missed, now_s):
            error = event.missed.error(self.nodes, engine=self._engine_node)
        if self.state is State.STARTING and event.missed and self._failures + 1 < self._limits.max_failed_epochs:
            self._pause(error, now_s)
            self.message = f"{error.what}: looking for another placement"
            return []
        return self._attempt_failed(attempt, error, now_s)

    def _attempt_failed(self, attempt: _Attempt, error: EdgepipeError, now_s: float) -> list[Command]:
        if attempt.moves:
            return self._move_failed(now_s)
        if self.state is State.STARTING or isinstance(error, StaleEpoch):
            return self._fail(error)
        self._pause(error, now_s)
        if self.state is State.WAITING or self._failures >= self._limits.max_failed_epochs:
            return self._wait(error, "the pipeline does not open", self.wake_at_s)
        return []

    def _pause(self, error: EdgepipeError, now_s: float) -> None:
        """End the attempt and schedule the next one after a growing pause."""
        self._attempt, self.error = None, error
        self._failures += 1
        self.wake_at_s = now_s + growing(self._failures, self._timeouts.again_min_s, self._timeouts.again_max_s)

    def _meets_request(self, spec: ServeSpec, now_s: float) -> bool:
        """Return whether a first placement meets the user's constraints and avoids quarantined nodes and links."""
        requested, order = self._requested, in_order(spec.stages)
        if not self._quarantine.allows(spec, now_s):
            return False
        if requested.fixed:
            return spec.stages == requested.stages
        first = requested.first in ("", order[0], self.nodes.name(order[0]))
        return first and len(set(order)) >= requested.num_nodes

    # Moves: an epoch serves while the next one is prepared

    def _move_proposed(self, plan: EpochPlacement, now_s: float) -> list[Command]:
        if self.state not in (State.SERVING, State.PREPARING_BESIDE):
            return []  # the pending question's answer will rest on newer facts
        self._proposed = plan
        return self._next_move(now_s) if self._attempt is None else []

    def _next_move(self, now_s: float) -> list[Command]:
        """Begin the proposed move, or one away from a node that is leaving, if there is one."""
        plan, self._proposed = self._proposed, None
        elsewhere = plan is not None and self.running is not None and plan.spec.stages != self.running.spec.stages
        if plan is not None and elsewhere and not self._pauses(plan.spec, now_s):
            self.nodes = self.nodes.updated(plan.nodes)
            return self._prepare(self._new_attempt(moves=True), plan.spec, now_s)
        return self._ask(now_s, moves=True) if self._must_leave and self._failed_moves == 0 else []

    def _pauses(self, spec: ServeSpec, now_s: float) -> bool:
        """Return whether a machine of a proposed placement pauses: the proposal rests on older facts."""
        return self._charges.pauses.until_s(stage.node_id for stage in spec.stages) > now_s

    def _move_failed(self, now_s: float) -> list[Command]:
        """Keep serving at the running placement. Retry leaving a drained node after a growing pause."""
        assert self.running is not None, "an epoch serves while stages move"
        self._attempt, self.state = None, State.SERVING
        self._failed_moves += 1
        if self._must_leave:
            self.wake_at_s = now_s + growing(
                self._failed_moves, self._timeouts.move_again_min_s, self._timeouts.move_again_max_s
            )
        return [*self._release_left(), *self._next_move(now_s)]

    @property
    def _must_leave(self) -> bool:
        """Whether a node of the running placement is being drained."""
        reachable, running = self.reachable, self.running
        return reachable is not None and running is not None and bool(reachable.leaving & running.node_ids)

    def _reloading(self, running: ServeSpec, tried: ServeSpec) -> frozenset[str]:
        """Return names of nodes that end their running stage to load the attempted one, which has other layers."""
        had = {stage.node_id: stage.slices for stage in running.stages}
        others = (stage.node_id for stage in tried.stages if had.get(stage.node_id, stage.slices) != stage.slices)
        return frozenset(self.nodes.name(node_id) for node_id in others)

    # The end of an epoch

    def _end_epoch(self, error: EdgepipeError) -> list[Command]:
        return [EndEpoch(error=error)]

    def _epoch_ended(self, event: EpochEnded, now_s: float) -> list[Command]:
        running = self.running
        if running is None or event.epoch != running.epoch:
            return []
        if isinstance(event.error, StaleEpoch):
            return self._fail(event.error)
        self._quarantine.note(event.missed, now_s)
        commands = self._charge(event, running, now_s)
        self.running, self.state, self.error, self._fault = None, State.RECOVERING, event.error, event.error
        self._lacking_since_s = None
        self.message = "recovering from the lost stage"
        return [*commands, *self._after(event.error, now_s)]

    def _charge(self, event: EpochEnded, running: Placement, now_s: float) -> list[Command]:
        """Charge the fault that ended an epoch, unless the end was planned."""
        attempt = self._attempt
        reloads = attempt is not None and attempt.moves and event.error.node in attempt.reloading
        node_id = self._gone(running) or event.node_id
        leaves = self.reachable is not None and node_id in self.reachable.leaving
        if isinstance(event.error, StagesMove) or reloads or leaves:
            self._charges.progressed(event.progress)
            return []
        return self._charges.ended(event, node_id, served_s=now_s - self._opened_s, now_s=now_s)

    def _after(self, error: EdgepipeError, now_s: float) -> list[Command]:
        """Continue with the move in preparation if it explains the end of the epoch, else start over."""
        attempt = self._attempt
        self.moved = isinstance(error, StagesMove)
        if attempt is not None and attempt.phase is _Phase.PREPARED:
            return [*self._charges.prepared(frozenset(), (), now_s), *self._open(attempt, attempt.sites)]
        if attempt is not None and attempt.phase is _Phase.PREPARING and error.node in attempt.reloading:
            attempt.moves, self.moved, self.message = False, True, "stages move"
            return []
        self._proposed = None
        return [*([Abandon()] if attempt is not None else []), *self._ask(now_s)]

    def _wait(self, error: EdgepipeError, message: str, wake_at_s: float | None) -> list[Command]:
        self._attempt, self.state, self.error, self.message = None, State.WAITING, error, message
        self.wake_at_s = wake_at_s
        self._charges.refused_all()
        return [Refuse(error=error)]

    def _fail(self, error: EdgepipeError) -> list[Command]:
        self._attempt, self.state, self.error, self.wake_at_s = None, State.STOPPED, error, None
        return [Fail(error=error)]

    # The cluster and time

    def _cluster_changed(self, reachable: ReachableNodes, now_s: float) -> list[Command]:
        before, self.reachable = self.reachable, reachable
        joined = before is None or any(
            before.addresses.get(node_id) != address for node_id, address in reachable.addresses.items()
        )
        for node_id, address in reachable.addresses.items():
            if before is not None and before.addresses.get(node_id) != address:
                self._charges.pauses.returned(node_id, now_s)
        drained = reachable.leaving - (before.leaving if before is not None else frozenset())
        attempt = self._attempt
        if attempt is not None and attempt.placement is not None:
            if (gone := self._gone(attempt.placement)) is not None:
                return [
                    *self._lost_running(),
                    Abandon(),
                    *self._attempt_failed(attempt, self._unreachable(gone), now_s),
                ]
        if self.running is not None:
            return self._lost_running() or [*self._release_left(), *self._maybe_leave(joined or bool(drained), now_s)]
        return self._maybe_sooner(joined, now_s)

    def _lost_running(self) -> list[Command]:
        gone = self._gone(self.running) if self.running is not None else None
        return self._end_epoch(self._unreachable(gone)) if gone is not None else []

    def _maybe_leave(self, news: bool, now_s: float) -> list[Command]:
        """Leave drained nodes. ``news``: a node has joined or is newly drained, so earlier failures count no more."""
        if news:
            self._failed_moves = 0
        return self._next_move(now_s) if self._attempt is None else []

    def _maybe_sooner(self, joined: bool, now_s: float) -> list[Command]:
        """Retry now if the engine waits for memory or another machine, and that has arrived."""
        for_memory = isinstance(self.error, NoFeasiblePlacement)
        if self._attempt is not None or self.state is not State.WAITING or not (joined or for_memory):
            return []
        at_s = max(now_s, self._asked_s + self._timeouts.ask_again_s)
        self.wake_at_s = at_s if self.wake_at_s is None else min(at_s, self.wake_at_s)
        return self._tick(now_s)

    def _tick(self, now_s: float) -> list[Command]:
        if self.wake_at_s is None or now_s < self.wake_at_s or self._attempt is not None:
            return []
        self.wake_at_s = None
        if self.running is None:
            return self._ask(now_s)
        return [*self._release_left(), *(self._ask(now_s, moves=True) if self._must_leave else [])]

    def _release_left(self) -> list[Command]:
        """Release nodes outside the running and attempted placements; unreachable ones when they are back."""
        left = self.held - (self.running.node_ids if self.running is not None else frozenset())
        left -= self._attempt.node_ids if self._attempt is not None else frozenset()
        if self.reachable is not None:
            left &= frozenset(self.reachable.addresses)
        self.held -= left
        return [Release(node_ids=left)] if left else []

    def _not_released(self, node_ids: frozenset[NodeId], now_s: float) -> list[Command]:
        """Release these nodes again when the cluster changes, after a while, or when the attempt ends."""
        self.held |= node_ids
        if self.running is not None and self._attempt is None and self.wake_at_s is None:
            self.wake_at_s = now_s + self._timeouts.release_again_s
        return []

    def _gone(self, placement: Placement) -> NodeId | None:
        """Return a node of the placement that is unreachable or has another address, or None."""
        if self.reachable is None:
            return None
        for stage in placement.spec.stages:
            if self.reachable.addresses.get(stage.node_id) != self.nodes.addresses.get(stage.node_id):
                return stage.node_id
        return None

    def _unreachable(self, node_id: NodeId) -> NodeUnreachable:
        name = self.nodes.name(node_id)
        return NodeUnreachable(f"node {name} is gone", fact="it has left, or does not answer heartbeats", node=name)
