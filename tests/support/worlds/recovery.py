"""A cluster in virtual time around the recovery core: failing machines, a planner, requests and their steps.

One seed is one history. Faults come at random for a while, then all of them end. ``World.run`` raises AssertionError
with the seed and the newest happenings if an invariant is broken.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from edgepipe.engine.blame import Crash
from edgepipe.engine.placing import EpochPlacement, Nodes, ReachableNodes
from edgepipe.engine.quarantine import Missed
from edgepipe.engine.recovery import Recovery
from edgepipe.engine.recovery_types import (
    Abandon,
    Accuse,
    Acquit,
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
    RefuseOne,
    Release,
    Serve,
    StagesLoaded,
    State,
    Suspect,
    Tick,
)
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.sites import StageSite
from edgepipe.errors import (
    EdgepipeError,
    LinkError,
    NoFeasiblePlacement,
    RemoteProtocolError,
    SendTimeout,
    StageError,
    StageLost,
    StagesMove,
    StepFailed,
)
from edgepipe.ids import EngineId, Epoch, NodeId, RequestId, RequestKey, SequenceId
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.testing.clock import START_S
from edgepipe.wire.engines import ServeSpec, StagePlacement
from tests.support.worlds.recovery_pauses import PauseCheck
from tests.support.worlds.recovery_requests import TOKENS, Asked, Requests

LAYERS = 4
FAULTS_S = 40.0  # faults come this long
CALM_S = 60.0  # after the last fault: longer than any question of the core, and than any pause after so few faults
LASTING_S = 60.0  # within this time a free healthy machine is used instead of one that ends epochs
ENDINGS = ("dies_idle", "dies_between", "babbles", "late")
"""Faults of a machine that end epochs for no reason that the machine tells."""
_STEP_S = 1.0
_STORM, _STORM_S = 40, 15.0  # no more preparations than this within so many seconds


@dataclass(slots=True)
class Machine:
    """One node as it is, whatever the core believes."""

    node_id: NodeId
    layers: int  # layers that it has room for
    address: str
    up: bool = True
    broken: bool = False  # its device fails every step, and test steps
    dies_idle: bool = False  # its stage's process dies soon after each opening
    dies_between: bool = False  # its stage's process dies after some steps
    babbles: bool = False  # its stage breaks the protocol after some steps
    late: bool = False  # its stage does not give a step back after some steps
    refuses: bool = False  # stages are not prepared
    deaf: bool = False  # its stages are not reached by others
    leaving: bool = False
    strikes: int = 0  # epochs that its own fault ended
    holds: int = 0  # memory is reserved, by the epoch with this counter; 0: none is


@dataclass(slots=True)
class _Epoch:
    placement: Placement
    ending: EdgepipeError | None = None
    steps: int = 0


@dataclass(order=True, slots=True)
class _Due:
    at_s: float
    number: int
    act: Callable[[], None] = field(compare=False)


class World:
    """One history. The same seed is the same history."""

    def __init__(self, seed: int) -> None:
        draw = self._draw = random.Random(seed)
        self.seed = seed
        self.now_s = START_S
        self.story: deque[str] = deque(maxlen=60)
        self.epochs = self.refusals = self.crashes = self.strikes = self.stalled = 0
        self._due: list[_Due] = []
        self._numbers = 0
        self.machines = {
            NodeId(name): Machine(NodeId(name), draw.choice((1, 2, 2, 4)), f"{name}:1")
            for name in "abcde"[: draw.randint(2, 5)]
        }
        for machine in list(self.machines.values())[:2]:
            machine.layers = max(machine.layers, LAYERS // 2)  # the model fits when all are there
        self._serving: _Epoch | None = None
        self._work: str = ""  # work of the attempt that is under way
        self._generation = 0  # number of that work; results of an earlier one are late
        self._requests = Requests()
        self._pauses = PauseCheck()
        self._asked = 0
        self._refusing = False
        self._counters: list[int] = []
        self._prepared_s: deque[float] = deque(maxlen=_STORM)
        self._lasting = draw.random() < 0.5  # first, one machine's fault lasts
        self._evil_from_s = START_S + (LASTING_S if self._lasting else 0.0)
        self._faults_until_s = START_S + draw.uniform(5.0, FAULTS_S)
        limits, timeouts = EngineLimits(max_failed_epochs=draw.choice((2, 8))), EngineTimeouts()
        plan = self._plan(base=None, quarantined=frozenset())
        assert plan is not None, "the model fits at first"
        self.core = Recovery(plan, epoch=Epoch(1, EngineId("e")), engine_node="a", limits=limits, timeouts=timeouts)

    def run(self) -> None:
        """Live through the history and check what must hold."""
        try:
            resumes = self._draw.random() < 0.5  # an engine that goes on never gives up; one that starts may
            self._do(self.core.resume(self.now_s) if resumes else self.core.begin(self.now_s))
            self._later(0.0, self._tell_cluster)
            self._later(0.0, self._step)
            if self._lasting:
                self._live_with_a_lasting_fault()
            self._later(self._draw.uniform(0.0, 2.0), self._fault)
            self._live(until_s=self._faults_until_s)
            self._end_faults()
            self._live(until_s=self.now_s + CALM_S)
            if self.core.state is State.STOPPED:
                self._check_start_failed()
            else:
                self._check_healed()
        except (AssertionError, KeyError, IndexError, ValueError) as error:
            story = "\n  ".join(self.story)
            raise AssertionError(f"seed {self.seed}: {type(error).__name__} {error}\n  {story}") from error

    def _live_with_a_lasting_fault(self) -> None:
        """A machine ends each of its epochs, and the others have room for the model: soon it has no stage."""
        machine = self._draw.choice(list(self.machines.values()))
        others = [other for other in self.machines.values() if other is not machine]
        if sum(other.layers for other in others) < LAYERS:
            others[0].layers = LAYERS
        fault = self._draw.choice(ENDINGS)
        self._note(f"{machine.node_id}: {fault}, for long")
        setattr(machine, fault, True)
        self._live(until_s=START_S + LASTING_S)
        self._faults_until_s += LASTING_S
        if self.core.state is State.STOPPED or machine.strikes < 3:
            return
        assert self._serving is not None, f"{self.core.state} though the other machines are healthy"
        assert machine.node_id not in self._serving.placement.node_ids, (
            f"{machine.node_id} ends one epoch after another"
        )
        setattr(machine, fault, False)

    # Time

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._due, _Due(self.now_s + seconds, self._numbers, act))

    def _live(self, *, until_s: float) -> None:
        while self.core.state is not State.STOPPED:
            self._check_not_stuck()
            wake_s = self.core.wake_at_s
            due_s = self._due[0].at_s
            if min(due_s, due_s if wake_s is None else wake_s) > until_s:
                self.now_s = until_s
                return
            if wake_s is not None and wake_s <= due_s:
                self.now_s = max(self.now_s, wake_s)
                self._happens(Tick())
            else:
                due = heapq.heappop(self._due)
                self.now_s = due.at_s
                due.act()

    def _happens(self, event: Event) -> None:
        self._note(f"{type(event).__name__}{_what(event)}")
        self._do(self.core.handle(event, self.now_s))

    # What the engine's shell does

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._note(f"    -> {type(command).__name__}{_what(command)}")
            match command:
                case AskPlacement():
                    self._begin("asks", partial(self._answer, command))
                case Prepare():
                    self._check_counter(command.placement.epoch)
                    self._pauses.prepared(command.placement.node_ids, self.now_s)
                    for node_id in command.placement.node_ids:
                        if self.machines[node_id].up:
                            self.machines[node_id].holds = command.placement.epoch.counter
                    self._begin("prepares", partial(self._prepare, command))
                case Open():
                    assert self._serving is None, "the epoch before has ended"
                    self._begin("opens", partial(self._open, command))
                case Abandon():
                    self._work, self._generation = "", self._generation + 1
                case Serve():
                    self.epochs += 1
                    self._serving, self._refusing = _Epoch(command.placement), False
                    self._requests.begin_epoch()
                    self._later(self._draw.uniform(0.0, 2.0), partial(self._die_idle, self._serving))
                case EndEpoch():
                    self._end_epoch(command.error)
                case Release():
                    assert self._serving is None or not command.node_ids & self._serving.placement.node_ids
                    self._later(self._draw.random(), partial(self._release, command.node_ids, self._counters[-1]))
                case Accuse():
                    self._accuse(command.sequences)
                case Acquit():
                    for request in self._requests.all:
                        request.crashes = 0 if request.key in command.requests else request.crashes
                case Suspect():
                    for request in self._requests.all:
                        request.suspected = request.key in command.requests
                case RefuseOne():
                    self._refuse_one(command.request)
                case Refuse():
                    self._refusing = True
                    self.refusals += len(self._requests.all)
                    self._requests.all.clear()
                case Fail():
                    assert self.core.state is State.STOPPED

    def _release(self, node_ids: frozenset[NodeId], counter: int) -> None:
        silent = frozenset(node_id for node_id in node_ids if not self.machines[node_id].up)
        for machine in (self.machines[node_id] for node_id in node_ids - silent):
            machine.holds = machine.holds if machine.holds > counter else 0
        if silent:
            self._happens(NotReleased(node_ids=silent))

    def _begin(self, work: str, act: Callable[[], None]) -> None:
        assert not self._work, f"{work} while it {self._work}"
        self._work, self._generation = work, self._generation + 1
        generation = self._generation

        def come() -> None:
            if generation == self._generation:
                self._work = ""
                act()
            elif self._draw.random() < 0.3:  # what was abandoned was on its way already
                act()

        slowest_s = self._draw.choice((0.01, 0.1, 1.0, 1.0 if self._lasting else 5.0))
        self._later(slowest_s * self._draw.random(), come)

    def _answer(self, command: AskPlacement) -> None:
        draw = self._draw.random()
        if draw < 0.03 and self.now_s < self._faults_until_s:
            error: EdgepipeError = SendTimeout("the node did not answer with a placement")
            return self._happens(PlanningFailed(attempt=command.attempt, error=error))
        soonest_first = sorted(command.quarantined, key=lambda node_id: command.quarantined[node_id])
        tries = [frozenset(soonest_first[count:]) for count in range(len(soonest_first) + 1)]
        plan = next(filter(None, (self._plan(base=command.spec, quarantined=avoided) for avoided in tries)), None)
        if plan is None:
            error = NoFeasiblePlacement("the model does not fit")
            return self._happens(PlanningFailed(attempt=command.attempt, error=error))
        self._happens(Planned(attempt=command.attempt, plan=plan))

    def _prepare(self, command: Prepare) -> None:
        for stage in command.placement.spec.stages:
            machine, need = self.machines[stage.node_id], len(stage.slices[0].layers)
            if not machine.up or machine.refuses or need > machine.layers:
                error = StageError(f"{stage.node_id} refuses") if machine.up else LinkError("silent")
                failed = PreparationFailed(attempt=command.attempt, error=error, node_id=stage.node_id)
                return self._happens(failed)
        self._happens(StagesLoaded(attempt=command.attempt, sites=_sites(command.placement)))

    def _open(self, command: Open) -> None:
        for site in command.sites:
            machine = self.machines[site.node_id]
            if not machine.up or machine.deaf:
                missed = Missed(sites=(site,)) if self._draw.random() < 0.7 else Missed()
                error = StageLost(f"{site.node_id} is not reached")
                return self._happens(OpeningFailed(attempt=command.attempt, error=error, missed=missed))
        self._happens(Opened(attempt=command.attempt))

    def _end_epoch(self, error: EdgepipeError) -> None:
        if self._serving is not None and self._serving.ending is None:
            self._serving.ending = error
            self._later(self._draw.random() * 0.01, partial(self._ended, self._serving, error, None))

    def _ended(
        self, epoch: _Epoch, error: EdgepipeError, crash: Crash | None, *, node_id: NodeId | None = None
    ) -> None:
        if epoch is not self._serving:
            return
        self._serving = None
        progress = self._requests.progress()
        if self.core.state is State.PREPARING_BESIDE:
            self._pauses.forget()  # the move may explain it
        elif not isinstance(error, StagesMove):
            gone = [node_id for node_id in epoch.placement.node_ids if not self.machines[node_id].up]
            self._pauses.ended(gone[0] if gone else node_id, self.now_s, progress, crashed=crash is not None)
        self._happens(
            EpochEnded(epoch=epoch.placement.epoch, error=error, crash=crash, node_id=node_id, progress=progress)
        )

    # Requests and their steps

    def _ask(self, *, poison: bool = False, kills: bool = False) -> Asked | None:
        self._asked += 1
        if self._refusing:
            return None
        key = RequestKey(NodeId("g"), RequestId(str(self._asked)))
        chunks = 9 if kills else self._draw.choice((1, 1, 2, 4))
        request = Asked(key, SequenceId(self._asked), self.now_s, chunks, poison=poison, kills=kills)
        self._requests.all.append(request)
        return request

    def _step(self) -> None:
        """Some step of the epoch that serves, if any."""
        self._later(_STEP_S * self._draw.uniform(0.1, 1.5), self._step)
        if self._draw.random() < 0.2:
            evil = self._draw.random() if self._evil_from_s < self.now_s < self._faults_until_s else 1.0
            kills = 0.1 < evil < 0.2 and not any(request.kills for request in self._requests.all)
            self._ask(poison=evil < 0.1, kills=kills)
        epoch, batch = self._serving, self._requests.batch()
        if epoch is None or epoch.ending is not None or not batch:
            return
        placed = [self.machines[node_id] for node_id in sorted(epoch.placement.node_ids)]
        broken = [machine for machine in placed if machine.broken]
        if broken or any(request.poison for request in batch):
            self._crash(epoch, (broken or placed)[0], batch, device_failed=bool(broken))
            return
        epoch.steps += 1
        if epoch.steps > self._draw.randint(0, 2) and self._ends_between(epoch, placed):
            return
        self._requests.compute(batch)
        if any(request.kills and request.computed >= 2 for request in batch):
            self._break(epoch, placed[-1], StageLost("it died between two steps", node=placed[-1].node_id))

    def _ends_between(self, epoch: _Epoch, placed: Sequence[Machine]) -> bool:
        """Whether a machine ends the epoch without a word on any step."""
        for machine in placed:
            name = machine.node_id
            if machine.dies_between:
                self._strike(epoch, machine, StageLost("it died between two steps", node=name))
            elif machine.babbles:
                self._strike(epoch, machine, RemoteProtocolError("an unexpected answer", node=name))
            elif machine.late:
                self._strike(epoch, machine, StepFailed("a step is late", node=name), after_s=5.0)
        return epoch.ending is not None

    def _die_idle(self, epoch: _Epoch) -> None:
        for machine in [self.machines[node_id] for node_id in sorted(epoch.placement.node_ids)]:
            if machine.dies_idle:
                self._strike(epoch, machine, StageLost("it died idle", node=machine.node_id))

    def _strike(self, epoch: _Epoch, machine: Machine, error: EdgepipeError, *, after_s: float = 0.01) -> None:
        """A machine's own fault ends the epoch."""
        if epoch.ending is None and epoch is self._serving:
            machine.strikes += 1
            self.strikes += 1
            for request in self._requests.all:
                request.unlucky += 1
            self._break(epoch, machine, error, after_s=after_s)

    def _break(self, epoch: _Epoch, machine: Machine, error: EdgepipeError, *, after_s: float = 0.01) -> None:
        epoch.ending = error
        ended = partial(self._ended, epoch, error, None, node_id=machine.node_id)
        self._later(self._draw.uniform(0.5, 1.0) * after_s, ended)

    def _crash(self, epoch: _Epoch, machine: Machine, batch: Sequence[Asked], *, device_failed: bool) -> None:
        self.crashes += 1
        for request in batch:
            request.begun = True
        sequences = tuple(request.sequence for request in batch)
        error = epoch.ending = StepFailed("a step could not be computed", node=machine.node_id)
        crash = Crash(
            node_id=machine.node_id,
            sequences=sequences,
            requests=frozenset(request.key for request in batch),
            error=error,
            device_failed=device_failed,
            guilty=len(batch) == 1 and batch[0].crashes >= 2,
        )
        ended = partial(self._ended, epoch, error, crash, node_id=machine.node_id)
        self._later(self._draw.random() * 0.01, ended)

    def _accuse(self, sequences: tuple[SequenceId, ...]) -> None:
        for request in [request for request in self._requests.all if request.sequence in sequences]:
            request.crashes += 1
            if request.crashes >= 3 and len(sequences) == 1:
                assert request.poison, f"request {request.key.request_id} was refused for what another did"
                self._requests.all.remove(request)
                self._pauses.forget()

    def _refuse_one(self, key: RequestKey) -> None:
        request = next(request for request in self._requests.all if request.key == key)
        self.stalled += 1
        assert request.kills or request.unlucky >= 2, f"request {key.request_id} was refused for what another did"
        self._requests.all.remove(request)
        self._pauses.forget()

    # The cluster

    def _fault(self) -> None:
        """Something breaks, or is mended."""
        if self.now_s >= self._faults_until_s:
            return
        self._later(self._draw.expovariate(0.5), self._fault)
        machine = self._draw.choice(list(self.machines.values()))
        others = ("up", "up", "broken", "refuses", "deaf", "leaving", "layers", "address", "move")
        fault = self._draw.choice((*others, *ENDINGS))
        self._note(f"{machine.node_id}: {fault}")
        if fault == "move":
            plan = self._plan(base=None, quarantined=frozenset(self._draw.sample(list(self.machines), 1)))
            if plan is not None:
                self._happens(MoveProposed(plan=plan))
            return
        if fault == "layers":
            machine.layers = self._draw.choice((0, 1, 2, 4))
        elif fault == "address":
            machine.address = f"{machine.node_id}:{self._draw.randint(1, 9)}"
        else:
            setattr(machine, fault, not getattr(machine, fault))
        self._notice(machine)

    def _notice(self, machine: Machine) -> None:
        """A machine that goes takes its epoch with it; the daemon tells of it at once or a little later."""
        if not machine.up:
            machine.holds = machine.holds if self._draw.random() < 0.5 else 0  # asleep keeps memory, a reboot does not
        epoch = self._serving
        if epoch is not None and machine.node_id in epoch.placement.node_ids and not machine.up:
            error = StageLost("its connection broke", node=machine.node_id)
            if epoch.ending is None:
                epoch.ending = error
                for request in self._requests.all:
                    request.unlucky += 1
                ended = partial(self._ended, epoch, error, None, node_id=machine.node_id)
                self._later(self._draw.random() * 3.0, ended)
        self._later(self._draw.random() * 3.0, self._tell_cluster)

    def _tell_cluster(self) -> None:
        self._pauses.forget()  # a machine that is back is tried again soon
        there = {node_id: machine.address for node_id, machine in self.machines.items() if machine.up}
        leaving = frozenset(node_id for node_id in there if self.machines[node_id].leaving)
        self._happens(ClusterChanged(reachable=ReachableNodes(addresses=there, leaving=leaving)))

    def _end_faults(self) -> None:
        self._note("all faults end")
        for machine in self.machines.values():
            machine.up, machine.layers = True, max(machine.layers, LAYERS)
            for fault in ("broken", "refuses", "deaf", "leaving", *ENDINGS):
                setattr(machine, fault, False)
        self._requests.all = [request for request in self._requests.all if not request.poison]
        self._later(self._draw.random() * 3.0, self._tell_cluster)

    def _plan(self, *, base: ServeSpec | None, quarantined: frozenset[NodeId]) -> EpochPlacement | None:
        """Stages where they were if their machines are there, else all anew."""
        usable = [
            machine
            for machine in self.machines.values()
            if machine.up and not machine.leaving and machine.node_id not in quarantined
        ]
        nodes = Nodes(addresses={node_id: machine.address for node_id, machine in self.machines.items()}, names={})
        there = {machine.node_id for machine in usable}
        if base is not None and all(stage.node_id in there for stage in base.stages):
            fits = all(len(stage.slices[0].layers) <= self.machines[stage.node_id].layers for stage in base.stages)
            if fits:
                return EpochPlacement(spec=base, nodes=nodes)
        self._draw.shuffle(usable)
        bounds, placed = [0], list[NodeId]()
        for machine in usable:
            count = min(machine.layers, LAYERS - bounds[-1])
            if count > 0:
                bounds.append(bounds[-1] + count)
                placed.append(machine.node_id)
        if bounds[-1] < LAYERS:
            return None
        ranges = [LayerRange(start, end) for start, end in pairwise(bounds)]
        stages = [
            StagePlacement(node_id=node_id, slices=(part,))
            for node_id, part in zip(placed, make_slices(ranges, LAYERS), strict=True)
        ]
        return EpochPlacement(spec=replace(base or ServeSpec(model="m"), stages=tuple(stages)), nodes=nodes)

    # What must hold

    def _check_not_stuck(self) -> None:
        """There is always something that will happen: an epoch serves, work is under way, or a time is set."""
        waits = self._serving is not None or bool(self._work) or self.core.wake_at_s is not None
        assert waits, f"{self.core.state} waits for nothing"
        assert not self._work or self.core.wake_at_s is None, f"it wakes while it {self._work}: Tick would do nothing"

    def _check_counter(self, epoch: Epoch) -> None:
        assert not self._counters or self._counters[-1] < epoch.counter, f"epoch {epoch} was prepared before"
        self._counters.append(epoch.counter)
        self._prepared_s.append(self.now_s)
        storm = len(self._prepared_s) == _STORM and self.now_s - self._prepared_s[0] < _STORM_S
        assert not storm, f"{_STORM} epochs were prepared within {_STORM_S:.0f} s"

    def _check_start_failed(self) -> None:
        assert self.core.error is not None
        assert self.epochs == 0, "an engine that has served goes on trying"

    def _check_healed(self) -> None:
        assert self.core.state in (State.SERVING, State.PREPARING_BESIDE), f"it is {self.core.state} when all is well"
        assert self._serving is not None
        old = [request.key.request_id for request in self._requests.all if request.asked_s < self.now_s - CALM_S]
        assert not old, f"requests {old} have neither an answer nor a refusal"
        request = self._ask()
        assert request is not None, "requests are refused when all is well"
        self._live(until_s=self.now_s + 4 * TOKENS * _STEP_S)
        assert request.ended, f"an untouched client got {request.tokens} of {TOKENS} tokens"
        assert self._serving is not None
        placed = self._serving.placement.node_ids
        held = {machine.node_id for machine in self.machines.values() if machine.holds}
        tried = self.core.held
        assert held <= placed | tried, f"{held - placed} hold memory that nothing uses"
        assert held <= placed or self.core.state is State.PREPARING_BESIDE, f"{held - placed} were not released"
        self._check_drains(min(placed))

    def _check_drains(self, node_id: NodeId) -> None:
        self._note(f"{node_id} is drained when all is well")
        self.machines[node_id].leaving = True
        self._tell_cluster()
        until_s = self.now_s + CALM_S
        while self._serving is None or node_id in self._serving.placement.node_ids:
            assert self.now_s < until_s, f"{node_id} was not left within {CALM_S:.0f} s"
            self._live(until_s=self.now_s + _STEP_S)

    def _note(self, what: str) -> None:
        self.story.append(f"{self.now_s - START_S:8.3f} {what}")


def _sites(placement: Placement) -> tuple[StageSite, ...]:
    return tuple(
        StageSite(
            index=index,
            node_id=stage.node_id,
            node_name=stage.node_id,
            address=f"{stage.node_id}:{index + 2}",
            slices=stage.slices,
            backend="",
            device="",
            weight_bytes=0,
            kv_block_bytes=1,
            max_blocks=1,
        )
        for index, stage in enumerate(placement.spec.stages)
    )


def _what(value: object) -> str:
    """The fields that tell a story."""
    parts = [
        str(getattr(value, name))
        for name in ("attempt", "error", "node_ids", "fresh", "sequences", "crash")
        if getattr(value, name, None)
    ]
    placement = getattr(value, "placement", None)
    if placement is not None:
        parts.append(f"{placement.epoch.counter}: {','.join(stage.node_id for stage in placement.spec.stages)}")
    return f" {' '.join(parts)}" if parts else ""
