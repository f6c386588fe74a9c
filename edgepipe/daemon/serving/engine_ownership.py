"""PURE: whether this node starts, yields or ends the engine of a served model. Events in, commands out.

A pipeline whose engine is on no reachable node gets a *bid* here::

    RESTING ──time──> ASKING ──my turn──> GATHERING ──the model's nodes are here, or time──> STARTING
       ▲                 │ not yet                                                              │
       └─────────────────┴───────────── a failed start rests ever longer ───────────────────────┘

The bid ends once a reachable node has the engine, or the model is stopped. A node that had the engine asks no other;
``takeover`` decides whose turn it is otherwise. After a partition two nodes may have an engine: the newer claim without
an owner's word yields after ``YIELD_S``.

It uses no clock and no network: callers pass times as monotonic seconds. The shell is ``EngineKeeper``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from edgepipe.daemon.serving.takeover import MemberReport, Vacancies
from edgepipe.wire.serving import ServeBody

YIELD_S = 5.0  # an owner's reachable node has decided long before
_FAILED_MAX_S = 15.0  # longest rest after failed starts, as while the model is on no reachable disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What this node sees at the time of an event."""

    own_id: str
    leaves: bool  # this node is being drained, or is about to stop
    records: Mapping[str, ServeBody]  # records of all models by pipeline, also of stopped ones
    unconfirmed: frozenset[str]  # pipelines of which only this node's own record says that it has the engine
    staying: frozenset[str]  # reachable nodes that are not being drained
    gone: frozenset[str]  # nodes of recorded engines that are certainly away, or hand their engines over
    present: frozenset[str]  # nodes whose devices have started
    engines: frozenset[str]  # pipelines whose recorded engine is on a reachable node
    own_engines: frozenset[str]  # pipelines whose engine is here, whatever the record says; not those that stop

    def served(self) -> Iterable[ServeBody]:
        """Return the records of models that are wanted and have answered."""
        return (body for body in self.records.values() if body.begun and not body.stopped)


# Events. ``bid`` is the number of the command that is answered.


@dataclass(frozen=True, slots=True)
class SightChanged:
    """The cluster, the records or the engines here may have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalSeen:
    """A node reports a record that names itself for an engine that is recorded here."""

    record: ServeBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The other members have answered."""

    bid: int
    answers: Mapping[str, MemberReport]  # reports by node


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEnded:
    """The engine was started here, or could not be."""

    bid: int
    failed: bool


@dataclass(frozen=True, slots=True)
class WaitEnded:
    """``Ownership.wake_at_s`` has passed."""


Event = SightChanged | RivalSeen | Answered | StartEnded | WaitEnded


# Commands. ``AskMembers`` and ``StartEngine`` are each answered by one event.


@dataclass(frozen=True, slots=True, kw_only=True)
class AskMembers:
    """Ask the other members whether they hear the engine's node. Answer: Answered."""

    bid: int
    record: ServeBody


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """Record this node for the engine and start it. Answer: StartEnded."""

    bid: int
    record: ServeBody


@dataclass(frozen=True, slots=True)
class StopEngine:
    """End the engine here and its stages: its model was stopped."""

    pipeline_id: str


@dataclass(frozen=True, slots=True)
class EndSuperseded:
    """End the engine here: another node has the pipeline's engine."""

    pipeline_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Yield:
    """Record the rival's node for the engine."""

    rival: ServeBody


Command = AskMembers | StartEngine | StopEngine | EndSuperseded | Yield


class _Phase(Enum):
    RESTING = auto()
    ASKING = auto()
    GATHERING = auto()  # the model's nodes may be starting, too
    STARTING = auto()


@dataclass(slots=True, kw_only=True)
class _Bid:
    number: int
    record: ServeBody  # the newest
    rest_s: float  # pause before the next bid; failed starts double it
    phase: _Phase = _Phase.RESTING
    wake_at_s: float | None = None  # RESTING and GATHERING


class Ownership:
    """This node's claims to engines. Call ``handle`` with every event, in order."""

    def __init__(self, vacancies: Vacancies, *, gather_until_s: float, rest_s: float) -> None:
        """
        gather_until_s  until then (monotonic) a start waits for the nodes that held the model
        rest_s          pause between two checks of one pipeline
        """
        self._vacancies = vacancies
        self._gather_until_s = gather_until_s
        self._rest_s = rest_s
        self._bids: dict[str, _Bid] = {}  # one per pipeline
        self._num_bids = 0
        # One per pipeline: when this node yields, and the rival.
        self._yields: dict[str, tuple[float, ServeBody]] = {}

    @property
    def wake_at_s(self) -> float | None:
        """When ``WaitEnded`` is due."""
        bids = [bid.wake_at_s for bid in self._bids.values() if bid.wake_at_s is not None]
        return min([*bids, *(at_s for at_s, _ in self._yields.values())], default=None)

    def still_wants(self, record: ServeBody, sight: Sight) -> bool:
        """Return whether a commanded start is still right: getting the model's files may have taken long."""
        held = sight.records.get(record.pipeline_id)
        ours = held is not None and not held.stopped and held.engine_node == sight.own_id
        return ours and not sight.leaves and record.pipeline_id not in sight.engines

    def handle(self, event: Event, sight: Sight, now_s: float) -> list[Command]:
        """Handle an event at ``now_s`` (monotonic seconds). Return the commands to execute, in order."""
        match event:
            case SightChanged():
                return self._look(sight, now_s)
            case RivalSeen():
                return self._consider_rival(event.record, sight, now_s)
            case WaitEnded():
                return self._tick(sight, now_s)
            case Answered() | StartEnded():
                bid = next((bid for bid in self._bids.values() if bid.number == event.bid), None)
                return self._answered(bid, event, sight, now_s) if bid is not None else []

    def _look(self, sight: Sight, now_s: float) -> list[Command]:
        commands = self._stale_engines(sight)
        self._vacancies.keep(frozenset(record.pipeline_id for record in sight.served()))
        for record in sight.served():
            lacks_engine = self._lacks_engine(record, sight, now_s)
            bid = self._bids.get(record.pipeline_id)
            if bid is None and lacks_engine:
                bid = self._bids[record.pipeline_id] = _Bid(number=0, record=record, rest_s=self._rest_s)
                commands += self._decide(bid, sight, now_s)
            elif bid is not None and bid.phase is _Phase.GATHERING:
                commands += self._gather(bid, sight, now_s)
        return commands

    def _stale_engines(self, sight: Sight) -> list[Command]:
        """End engines here that no longer count: the model was stopped, or another node has the engine."""
        commands: list[Command] = []
        for pipeline_id in sorted(sight.own_engines):
            record = sight.records.get(pipeline_id)
            if record is not None and record.stopped:
                commands.append(StopEngine(pipeline_id))
            elif record is None or record.engine_node != sight.own_id:
                commands.append(EndSuperseded(pipeline_id))
        return commands

    def _tick(self, sight: Sight, now_s: float) -> list[Command]:
        commands: list[Command] = []
        for pipeline_id, (at_s, rival) in list(self._yields.items()):
            if at_s <= now_s:
                del self._yields[pipeline_id]
                commands += self._yield_to(rival, sight)
        for bid in list(self._bids.values()):
            if bid.wake_at_s is not None and bid.wake_at_s <= now_s:
                commands += (self._decide if bid.phase is _Phase.RESTING else self._gather)(bid, sight, now_s)
        return commands

    # A bid for an engine that no reachable node has

    def _lacks_engine(self, record: ServeBody, sight: Sight, now_s: float) -> bool:
        """Note what this node sees of the pipeline's engine; return whether it is missing."""
        has_engine = record.pipeline_id in sight.engines
        self._vacancies.look(
            record.pipeline_id,
            record.engine_node,
            has_engine=has_engine,
            gone=record.engine_node in sight.gone,
            now_s=now_s,
        )
        return not has_engine

    def _still_lacks(self, bid: _Bid, sight: Sight, now_s: float) -> bool:
        record = sight.records.get(bid.record.pipeline_id)
        if record is None or record.stopped or not record.begun or not self._lacks_engine(record, sight, now_s):
            return False
        bid.record = record
        return True

    def _decide(self, bid: _Bid, sight: Sight, now_s: float) -> list[Command]:
        """Bid for the engine if it had been here, else ask the others whose turn it is."""
        self._num_bids += 1
        bid.number = self._num_bids
        if not self._still_lacks(bid, sight, now_s):
            del self._bids[bid.record.pipeline_id]
            return []
        if sight.leaves:
            return self._rest(bid, now_s)
        if bid.record.engine_node == sight.own_id:
            return self._gather(bid, sight, now_s)
        if not self._vacancies.must_ask(bid.record.pipeline_id, now_s=now_s):
            return self._rest(bid, now_s)
        bid.phase, bid.wake_at_s = _Phase.ASKING, None
        return [AskMembers(bid=bid.number, record=bid.record)]

    def _answered(self, bid: _Bid, event: Answered | StartEnded, sight: Sight, now_s: float) -> list[Command]:
        if isinstance(event, StartEnded):
            bid.rest_s = min(2 * bid.rest_s, _FAILED_MAX_S) if event.failed else self._rest_s
            return self._rest(bid, now_s, bid.rest_s)
        if self._vacancies.is_turn(bid.record.pipeline_id, sight.own_id, event.answers, now_s=now_s):
            return self._gather(bid, sight, now_s)
        return self._rest(bid, now_s)

    def _gather(self, bid: _Bid, sight: Sight, now_s: float) -> list[Command]:
        """Wait a while for the nodes that held the model: after a power cut the other machines start, too."""
        wanted = {stage.node_id for stage in bid.record.spec.stages}
        if now_s < self._gather_until_s and not wanted <= sight.present:
            bid.phase, bid.wake_at_s = _Phase.GATHERING, self._gather_until_s
            return []
        if sight.leaves or not self._still_lacks(bid, sight, now_s):
            return self._rest(bid, now_s)
        bid.phase, bid.wake_at_s = _Phase.STARTING, None
        return [StartEngine(bid=bid.number, record=bid.record)]

    def _rest(self, bid: _Bid, now_s: float, rest_s: float | None = None) -> list[Command]:
        if rest_s is None:
            rest_s = bid.rest_s = self._rest_s
        bid.phase, bid.wake_at_s = _Phase.RESTING, now_s + rest_s
        return []

    # Two engines after a partition

    def _consider_rival(self, rival: ServeBody, sight: Sight, now_s: float) -> list[Command]:
        if self._yields_to(rival, sight):
            self._yields.setdefault(rival.pipeline_id, (now_s + YIELD_S, rival))
        return []

    def _yield_to(self, rival: ServeBody, sight: Sight) -> list[Command]:
        if self._yields_to(rival, sight) and rival.engine_node in sight.staying:
            return [Yield(rival=rival)]
        return []

    def _yields_to(self, rival: ServeBody, sight: Sight) -> bool:
        """Return whether this node took the engine over and no other node has confirmed that."""
        held = sight.records.get(rival.pipeline_id)
        if held is None or held.stopped or held.pipeline_id not in sight.unconfirmed:
            return False
        return (held.version, held.engine_node) > (rival.version, rival.engine_node)
