"""One node of ``tests.support.worlds.engine``: its serve book, its two cores, and shells that take random time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from edgepipe.daemon.serving import engine_life_types as life
from edgepipe.daemon.serving import engine_ownership as ownership
from edgepipe.daemon.serving.engine_life import EngineLives
from edgepipe.daemon.serving.restarts import GOOD_S, MOVES_AFTER
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.daemon.serving.takeover import MemberReport, Vacancies
from edgepipe.errors import AccessDenied, EdgepipeError, StageLost, StaleEpoch
from edgepipe.ids import EngineId, Epoch, PipelineId
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.engines import EngineState, ServeSpec
from edgepipe.wire.serving import ServeBody, ServeRecord
from tests.support.daemon.published_state import FakeState

if TYPE_CHECKING:
    from tests.support.worlds.engine import Trust, World

NOTICE_S = 6.0  # the longest dead limit
GATHER_S = 10.0
LOOK_S, CALM_LOOK_S = 2.0, 10.0  # keepers look at every change, and here also from time to time
EPS_S = 1e-6


@dataclass(slots=True)
class Run:
    """One engine as its shell knows it."""

    pipeline_id: str
    spec: ServeSpec
    attempt: int = 0
    alive: bool = False  # a process exists
    state: str = "starting"
    ready_s: float | None = None
    open: str = ""  # the command without an answer yet
    on_launched: Callable[[], None] = lambda: None
    denied: bool = False  # the last HandOn


@dataclass(slots=True)
class Public:
    """What a node tells the others."""

    number: int
    engines: tuple[EngineState, ...]
    records: tuple[ServeRecord, ...]
    drains: bool


@dataclass(slots=True)
class Tally:
    """The crashes of one pipeline here, counted apart from the core, and the start that was promised."""

    crashes: float = 0.0
    not_before_s: float = float("-inf")


class Machine:
    """One node, over all its boots; its book is on disk."""

    def __init__(self, world: World, name: str, trust: Trust, clock: FakeClock, folder: Path) -> None:
        self.world, self.name = world, name
        self.up = self.drains = self.ends = self.evil = False
        self.book = ServeBook(
            folder / "none" / name,
            trust=cast("Any", trust),
            signs=self,
            clock=clock,
            local=FakeState(),
        )
        self._boots = self._publics = self._runs_made = 0
        self._stopped_s: dict[str, float] = {}  # pipelines, since when this node knows of the stop

    def boot(self) -> None:
        self.up, self.drains, self.ends = True, False, False
        self._boots += 1
        self._since_s = self.world.now_s
        self.vacancies = Vacancies()
        self.lives = EngineLives()
        self.ownership = ownership.Ownership(self.vacancies, gather_until_s=self.world.now_s + GATHER_S, rest_s=1.0)
        self.runs: dict[int, Run] = {}
        self._open_bids: set[int] = set()
        self._heard: dict[str, Public | None] = {}  # reachable nodes
        self._met: set[str] = set()
        self._tallies: dict[str, Tally] = {}
        self._ticks: dict[str, float] = {}
        self._look_again()

    def lose(self) -> None:
        self.up = False
        self.runs.clear()
        self._heard.clear()

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        boot = self._boots

        def come() -> None:
            if self.up and self._boots == boot:
                act()

        self.world.later(seconds, come)

    def draw_bool(self, share: float) -> bool:
        return self.world.draw.random() < share

    # What this node knows of the others

    def reachable(self) -> set[str]:
        return {self.name, *self._heard}

    def is_gone(self, node_id: str) -> bool:
        if node_id == self.name:
            return self.drains
        if node_id not in self._met:
            return self.world.now_s - self._since_s >= NOTICE_S
        heard = self._heard.get(node_id)
        return heard is None or heard.drains

    def reaches(self, node_id: str) -> bool:
        drains = self.drains if node_id == self.name else (heard := self._heard.get(node_id)) is None or heard.drains
        return not drains

    def _nodes(self) -> dict[str, Public]:
        heard = {name: public for name, public in self._heard.items() if public is not None}
        return {self.name: self.public(), **heard}

    def lacks_engine(self, node_id: str, pipeline_id: str) -> bool:
        return self.vacancies.has_long_lacked(pipeline_id, node_id, now_s=self.world.now_s)

    def engine_state(self, node_id: str, pipeline_id: str) -> str:
        public = self._nodes().get(node_id)
        engines = public.engines if public is not None else ()
        return next(
            (engine.state for engine in engines if engine.pipeline_id == pipeline_id and self._binds(node_id, engine)),
            "",
        )

    def _binds(self, node_id: str, engine: EngineState) -> bool:
        return self.book.binds(node_id, engine)

    def public(self) -> Public:
        engines = tuple(
            EngineState(
                model=run.spec.model,
                pipeline_id=PipelineId(run.pipeline_id),
                epoch=Epoch(1, EngineId("e")),
                manifest_hash="h",
                state=run.state,
            )
            for run in self.runs.values()
        )
        return Public(self._publics, engines, self.book.records(), self.drains)

    def changed(self) -> None:
        """Look again, and tell the others."""
        self._publics += 1
        self._later(0.1 * self.world.draw.random(), self.look)
        for other in self.world.machines:
            if other != self.name:
                self.tell(other)

    def tell(self, other: str) -> None:
        public, boot, peer = self.public(), self._boots, self.world.machines[other]

        def arrive() -> None:
            if self._boots == boot and self.world.linked(self.name, other):
                peer.hear(self.name, public)

        self.world.later(self.world.delay_s(), arrive)

    def hear(self, name: str, public: Public) -> None:
        known = self._heard.get(name)
        if name in self._heard and (known is None or known.number <= public.number):
            self._heard[name] = public
            self._met.add(name)
            self.look()

    def notice_later(self, other: str, seconds: float) -> None:
        self._later(seconds, lambda: self._notice(other))

    def _notice(self, other: str) -> None:
        if not self.world.linked(self.name, other):
            if self._heard.pop(other, None) is not None:
                self.world.note(f"{self.name} has lost {other}")
                self.look()
        elif other not in self._heard:
            self._heard[other] = None
            self.world.machines[other].tell(self.name)
        else:
            self.tell(other)

    def _look_again(self) -> None:
        self.look()
        self._later(LOOK_S if self.world.faulty else CALM_LOOK_S, self._look_again)

    def look(self) -> None:
        """What ``EngineKeeper.run`` does after each change."""
        before = self.book.records()
        for name, public in list(self._nodes().items()):
            if name != self.name:
                for rival in self.book.merge(name, public.records):
                    try:
                        self.book.reassert(rival)
                    except AccessDenied:
                        pass
                    if rival.engine_node == name:
                        self._own(ownership.RivalSeen(record=rival))
        for run in self.runs.values():
            if run.state == "ready":
                self.book.note_served(run.pipeline_id, run.spec)
        self._own(ownership.SightChanged())
        if self.book.records() != before:
            self.changed()

    # The keeper's shell

    def _sight(self) -> ownership.Sight:
        nodes = self._nodes()
        records: dict[str, ServeBody] = {body.pipeline_id: body for body in self.book.bodies()}
        return ownership.Sight(
            own_id=self.name,
            leaves=self.drains or self.ends,
            records=records,
            unconfirmed=frozenset(body.pipeline_id for body in records.values() if self.book.is_unconfirmed(body)),
            staying=frozenset(name for name, node in nodes.items() if not node.drains),
            gone=frozenset(body.engine_node for body in records.values() if self.is_gone(body.engine_node)),
            present=frozenset(nodes),
            engines=frozenset(
                engine.pipeline_id
                for name, node in nodes.items()
                for engine in node.engines
                if self._binds(name, engine)
            ),
            own_engines=frozenset(run.pipeline_id for run in self.runs.values() if run.state != "stopping"),
        )

    def _own(self, event: ownership.Event) -> None:
        least_s = self.world.now_s
        commands = self.ownership.handle(event, self._sight(), least_s)
        self._tick_at("ownership", self.ownership.wake_at_s, lambda: self._own(ownership.WaitEnded()))
        for command in commands:
            self.world.note(f"{self.name}: {type(event).__name__} -> {command}"[:160])
            self.world.count(type(command).__name__)
            match command:
                case ownership.AskMembers():
                    self._open_bid(command.bid)
                    self._later(self.world.delay_s(), lambda command=command: self._answers(command))
                case ownership.StartEngine():
                    assert not self.drains, "a machine that is drained starts no engine"
                    assert not self.ends, "a machine that stops starts no engine"
                    self._open_bid(command.bid)
                    self._begin(command)
                case ownership.StopEngine():
                    self._live(life.StopWanted(command.pipeline_id))
                case ownership.EndSuperseded():
                    self._live(life.Superseded(command.pipeline_id))
                case ownership.Yield():
                    try:
                        self.book.hand_back(command.rival)
                    except AccessDenied:
                        continue
                    self.changed()

    def _tick_at(self, core: str, at_s: float | None, tick: Callable[[], None]) -> None:
        if at_s is None or self._ticks.get(core) == at_s:
            return
        self._ticks[core] = at_s

        def ring() -> None:
            if self._ticks.get(core) == at_s:
                del self._ticks[core]
                tick()

        self._later(max(0.0, at_s - self.world.now_s), ring)

    def _open_bid(self, bid: int) -> None:
        assert bid not in self._open_bids, "the bid has an open command"
        self._open_bids.add(bid)

    def _answers(self, command: ownership.AskMembers) -> None:
        head, pipeline_id = command.record.engine_node, command.record.pipeline_id
        answers: dict[str, MemberReport] = {}
        for name in sorted(self._heard):
            member = self.world.machines[name]
            if self.world.linked(self.name, name) and self.draw_bool(0.95):
                hears = member.reaches(head)
                proven = (
                    hears
                    and (name == head or self.world.linked(name, head))
                    and self.world.machines[head].proves(pipeline_id)
                )
                answers[name] = MemberReport(hears=hears, proven=proven, draining=member.drains)
        self._open_bids.discard(command.bid)
        self._own(ownership.Answered(bid=command.bid, answers=answers))

    def proves(self, pipeline_id: str) -> bool:
        return self.book.is_here(pipeline_id) and any(run.pipeline_id == pipeline_id for run in self.runs.values())

    def _begin(self, command: ownership.StartEngine) -> None:
        def ended(*, failed: bool) -> None:
            self._open_bids.discard(command.bid)
            self._own(ownership.StartEnded(bid=command.bid, failed=failed))

        def adopted() -> None:
            if self.world.faulty and self.draw_bool(0.1):
                ended(failed=True)
                return
            if self.ownership.still_wants(command.record, self._sight()):
                spec = command.record.spec
                self._start(command.record.pipeline_id, spec, resuming=True, then=lambda: ended(failed=False))
            else:
                ended(failed=False)

        try:
            self.book.take_over(command.record.pipeline_id)
        except AccessDenied:
            self._later(0.0, lambda: ended(failed=True))
            return
        self.changed()
        self._later(self.world.delay_s(), adopted)

    # The host's shell

    def _start(
        self, pipeline_id: str, spec: ServeSpec, *, resuming: bool, then: Callable[[], None] = lambda: None
    ) -> None:
        self._runs_made += 1
        run = self.runs[self._runs_made] = Run(pipeline_id, spec, on_launched=then)
        run.state = "recovering" if resuming else "starting"
        ring = tuple(stage.node_id for stage in spec.stages)
        self._live(
            life.StartWanted(
                run=self._runs_made,
                pipeline_id=pipeline_id,
                model=spec.model,
                replica=max(1, spec.replica),
                ring=ring,
                resuming=resuming,
            )
        )
        if not run.open:  # it pauses first, or is gone
            self._later(0.0, self._launched(run))

    def _launched(self, run: Run) -> Callable[[], None]:
        then, run.on_launched = run.on_launched, lambda: None
        return then

    def _around(self) -> life.Surroundings:
        return life.Surroundings(
            own_id=self.name,
            usable=frozenset(name for name, node in self._nodes().items() if not node.drains),
            owned=frozenset(run.pipeline_id for run in self.runs.values() if self.book.is_here(run.pipeline_id)),
            ends=self.ends,
        )

    def _live(self, event: life.Event) -> None:
        around = self._around()
        commands = self.lives.handle(event, around, self.world.now_s)
        self._tick_at("lives", self.lives.wake_at_s, lambda: self._live(life.PauseEnded()))
        for command in commands:
            self.world.note(
                f"{self.name}: {type(event).__name__} -> {command} {self.runs[command.run].pipeline_id}"[:160]
            )
            self._do(command, around)
        if commands:
            self.changed()

    def _do(self, command: life.Command, around: life.Surroundings) -> None:
        run = self.runs[command.run]
        tally = self._tallies.setdefault(run.pipeline_id, Tally())
        self.world.count(type(command).__name__)
        match command:
            case life.Launch():
                self._check_launch(run, command, tally)
                run.open, run.attempt, run.ready_s = "Launch", command.attempt, None
                run.state = "recovering" if command.resuming else "starting"
                self._later(self.world.delay_s(), lambda: self._spawn(command, run))
            case life.ShowPause():
                self._check_pause(run, tally, around)
                run.alive, run.denied = False, False
                run.state = "waiting"
                tally.not_before_s = self.world.now_s + command.left_s
            case life.ShowFailure():
                assert not run.alive
                run.state = "failed"
            case life.HandOn():
                assert not run.alive
                assert ceil(tally.crashes) >= MOVES_AFTER, "it has hardly crashed here"
                assert command.heir in around.usable - {self.name}
                assert command.heir in {stage.node_id for stage in run.spec.stages}, "no other node learns prompts"
                self._hand_on(command, run)
            case life.Stop():
                assert not run.open or run.open == "Launch", "one command at a time"
                run.open, run.state = "Stop", "stopping"
                self._tallies.pop(run.pipeline_id, None)
                self._later(self.world.delay_s(), lambda: self._stopped(command.run, run))
            case life.Kill() | life.Forget():
                assert isinstance(command, life.Kill) or not run.alive
                self._served(run, tally)
                del self.runs[command.run]

    def _check_launch(self, run: Run, command: life.Launch, tally: Tally) -> None:
        assert not self.ends, "a machine that stops starts no process"
        assert not run.open, f"{run.open} is not answered yet"
        assert not run.alive, "its process lives"
        assert not command.resuming or self.world.now_s >= tally.not_before_s - EPS_S, "the pause is not over"
        stopped_s = self._stopped_s.get(run.pipeline_id, float("inf"))
        assert self.world.now_s < stopped_s + 0.2, "it was stopped"

    def _check_pause(self, run: Run, tally: Tally, around: life.Surroundings) -> None:
        others = {stage.node_id for stage in run.spec.stages} & around.usable - {self.name}
        must_move = ceil(tally.crashes) >= MOVES_AFTER and others and run.pipeline_id in around.owned
        assert not must_move or run.denied or run.state != "crashed", f"{sorted(others)} may have it"

    def _served(self, run: Run, tally: Tally) -> None:
        if run.ready_s is not None:
            tally.crashes = max(0.0, tally.crashes - (self.world.now_s - run.ready_s) / GOOD_S)
            run.ready_s = None

    def _crashed(self, run: Run) -> None:
        tally = self._tallies.setdefault(run.pipeline_id, Tally())
        self._served(run, tally)
        tally.crashes = min(tally.crashes + 1, 12.0)
        run.alive, run.state = False, "crashed"

    def _spawn(self, command: life.Launch, run: Run) -> None:
        if not self.lives.expects(command.run, command.attempt):
            self._later(0.0, self._launched(run))
            return
        if self.world.faulty and self.draw_bool(0.1):
            self._crashed(run)
            self._launch_ended(run, life.LaunchFailed(run=command.run, attempt=command.attempt, error=StageLost("no")))
            return
        run.alive = True
        self._later(self.world.delay_s(), lambda: self._launch_done(command, run))
        if self.evil:
            self._later(self.world.delay_s(), lambda: self._die(command.run, command.attempt))

    def _launch_ended(self, run: Run, event: life.Launched | life.LaunchFailed) -> None:
        if run.open == "Launch":
            run.open = ""
        self._live(event)
        self._later(0.0, self._launched(run))

    def _launch_done(self, command: life.Launch, run: Run) -> None:
        if run.attempt == command.attempt and run.open == "Launch":
            self._launch_ended(run, life.Launched(run=command.run, attempt=command.attempt))
            self._later(self.world.delay_s(), lambda: self._ready(command, run))
        else:  # its process has ended meanwhile
            late = life.LaunchFailed(run=command.run, attempt=command.attempt, error=StageLost("late"))
            launched = life.Launched(run=command.run, attempt=command.attempt)
            self._live(self.world.draw.choice((launched, late)))
            self._later(0.0, self._launched(run))

    def _ready(self, command: life.Launch, run: Run) -> None:
        if self.lives.expects(command.run, command.attempt) and run.alive:
            run.state, run.ready_s = "ready", self.world.now_s
            ring = tuple(stage.node_id for stage in run.spec.stages)
            self._live(life.Serves(run=command.run, attempt=command.attempt, ring=ring))
            self.changed()
            for machine in self.world.machines.values():
                if machine is not self and self.world.linked(self.name, machine.name):
                    machine.outdated(run.pipeline_id)

    def outdated(self, pipeline_id: str) -> None:
        """Another node's engine has the stages: the one here learns that its epoch is stale."""
        for number, run in list(self.runs.items()):
            if run.pipeline_id == pipeline_id and run.alive and run.state == "ready":
                self._die(number, run.attempt, StaleEpoch("another engine has the stages"))

    def _die(self, number: int, attempt: int, error: EdgepipeError | None = None) -> None:
        run = self.runs.get(number)
        if run is None or run.attempt != attempt or not run.alive or run.state == "stopping":
            return
        self.world.note(f"{self.name}: the process of {run.pipeline_id} ends")
        self._crashed(run)
        if run.open == "Launch":
            run.open = ""  # what comes of it is late
        event = life.ProcessEnded(
            run=number, attempt=attempt, error=error or StageLost("it ended"), told=error is not None
        )
        self._live(event)

    def _hand_on(self, command: life.HandOn, run: Run) -> None:
        try:
            self.book.move_engine(run.pipeline_id, command.heir)
        except AccessDenied:
            run.denied = True
            self._live(life.NotHandedOn(run=command.run))
            return
        self.world.count("handed on")
        self._live(life.HandedOn(run=command.run))

    def _stopped(self, number: int, run: Run) -> None:
        if self.runs.get(number) is run:
            run.open, run.alive = "", False
        self._live(life.EngineStopped(run=number))

    # What others and people do here

    def serve_called(self, caller: str, pipeline_id: str, records: Sequence[ServeRecord]) -> None:
        """As ``NodeService.StartEngine``."""
        if not self.world.linked(self.name, caller) and caller != self.name:
            return
        self.book.merge(caller, records)
        held = self.book.held(pipeline_id)
        known = any(run.pipeline_id == pipeline_id for run in self.runs.values())
        if held is not None and not held.stopped and held.engine_node == self.name and not known:
            self._start(pipeline_id, held.spec, resuming=False)

    def stop_called(self, caller: str, pipeline_id: str, records: Sequence[ServeRecord]) -> None:
        """As ``NodeService.StopEngine``."""
        if not self.world.linked(self.name, caller) and caller != self.name:
            return
        self.book.merge(caller, records)
        if not self.book.is_here(pipeline_id):
            self._live(life.StopWanted(pipeline_id))

    def crash_one(self) -> None:
        alive = [(number, run.attempt) for number, run in self.runs.items() if run.alive]
        if alive:
            self.world.count("crashes")
            self._die(*self.world.draw.choice(alive))

    def reform(self) -> None:
        self.evil = False

    def drain(self, *, on: bool) -> None:
        self.world.note(f"{self.name} drains: {on}")
        self.drains = on
        self.changed()
        if on:
            self._later(self.world.delay_s(), self._hand_over)

    def _hand_over(self) -> None:
        if self.drains or self.ends:
            self._live(life.LeaveWanted())

    def end(self) -> None:
        self.ends = True
        self.changed()
        self._later(self.world.delay_s(), self._power_off)

    def _power_off(self) -> None:
        self._live(life.LeaveWanted())
        assert not self.runs, "engines outlive their daemon"
        self.lose()
        for machine in self.world.machines.values():
            if machine is not self:
                machine.notice_later(self.name, self.world.delay_s())

    def start_now(self) -> None:
        for run in list(self.runs.values()):
            if run.state == "waiting" and run.pipeline_id in self._tallies:
                self._tallies[run.pipeline_id].not_before_s = float("-inf")
                self._live(life.StartNow(run.pipeline_id))
                assert self.ends or run.open == "Launch", "a person wants it now"

    # What holds

    def processes(self, pipeline_id: str) -> int:
        return sum(run.pipeline_id == pipeline_id and run.alive for run in self.runs.values())

    def runs_ready(self, pipeline_id: str) -> bool:
        return any(run.pipeline_id == pipeline_id and run.state == "ready" for run in self.runs.values())

    def serves_any(self) -> bool:
        return any(run.state == "ready" for run in self.runs.values())

    def check(self) -> None:
        """What holds at any time."""
        if not self.up:
            return
        pipelines = [run.pipeline_id for run in self.runs.values()]
        assert len(set(pipelines)) == len(pipelines), f"{self.name} has two engines of one pipeline: {pipelines}"
        stopped = self.book.stopped()  # a newer record may undo a stop: both sides of a partition made one
        self._stopped_s = {pipeline_id: self._stopped_s.get(pipeline_id, self.world.now_s) for pipeline_id in stopped}

    def check_answered(self) -> None:
        """Every command has its answer."""
        assert not any(run.open for run in self.runs.values()), f"{self.name}: {self.runs}"
        assert not self._open_bids, f"{self.name}: bids {self._open_bids}"
