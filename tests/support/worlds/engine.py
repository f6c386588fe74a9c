"""Several nodes in virtual time around the two cores of engines' lives; real serve books with keys that cost nothing.

One seed is one history. Faults come at random for a while, then all of them end. ``World.run`` raises AssertionError
with the seed and the newest happenings if an invariant is broken. ``tests.support.worlds.engine_machine`` is one node.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from edgepipe.daemon.serving.replica_facts import ReplicaFacts
from edgepipe.daemon.serving.restarts import LONGEST_PAUSE_S
from edgepipe.daemon.serving.serve_rules import place_of
from edgepipe.errors import AccessDenied
from edgepipe.ids import NodeId, PipelineId
from edgepipe.security.trust_view import Role, TrustedPeer
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.engines import ServeSpec, StagePlacement
from tests.support.worlds.engine_machine import NOTICE_S, Machine

START_S = 1_000_000.0  # a clock near 0 hides wrong signs
FAULTS_S = 60.0
CALM_S = LONGEST_PAUSE_S + 150.0  # longer than any pause and any turn
STORM = 60_000  # no history needs as many happenings
MODELS = ("m", "n")
OWNER = "owner"  # a machine that is off until the faults have ended


@dataclass(order=True, slots=True)
class _Due:
    at_s: float
    number: int
    act: Callable[[], None] = field(compare=False)


@dataclass(slots=True)
class Trust:
    """``ServeTrust`` of one node: every signature is valid."""

    key_pair: Any
    peers: dict[str, TrustedPeer]
    cluster_id: str = "home"

    def known(self, node_id: str) -> TrustedPeer | None:
        return self.peers.get(node_id)


class WorldClock(FakeClock):
    """The world's time."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def monotonic_s(self) -> float:
        return self._world.now_s


class World:
    """One history. The same seed is the same history."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw = random.Random(seed)
        self.seed = seed
        self.now_s = START_S
        self.story: deque[str] = deque(maxlen=80)
        self.counts: dict[str, int] = {}
        self._due: list[_Due] = []
        self._numbers = self.happened = 0
        self._serves = 0
        self.faulty = True  # until faults end
        self._faults_per_s = self.draw.choice((0.05, 0.2, 0.5))
        self.cut: set[frozenset[str]] = set()
        names = "abcde"[: self.draw.randint(2, 5)]
        owners = {names[0], *(name for name in names if self.draw.random() < 0.2)}
        if self.draw.random() < 0.4:
            owners = {OWNER}
        always = cast("Any", SimpleNamespace(verifies=lambda *_: True))
        self._peers = {
            name: TrustedPeer(
                node_id=NodeId(name),
                name=name,
                role=Role.OWNER if name in owners else Role.MEMBER,
                certificate=always,
            )
            for name in (*names, OWNER)
        }
        self._owned = owners != {OWNER}
        self.machines: dict[str, Machine] = {}
        self._folder = folder
        for name in names:
            self._add(name)

    def run(self) -> None:
        """Live through the history and check what must hold."""
        try:
            for machine in self.machines.values():
                machine.boot()
            self._notice()
            for _ in MODELS:
                self.later(self.draw.choice((1.0, 12.0)) * self.draw.random(), self._serve)
            self.later(self.draw.uniform(0.0, 10.0), self._fault)
            if self.draw.random() < 0.3:
                self.later(self.draw.uniform(2.0, 10.0), self._evil)
            self._live(until_s=self.now_s + self.draw.uniform(10.0, FAULTS_S))
            self._end_faults()
            self._live(until_s=self.now_s + CALM_S)
            if not self._owned and not self._agree():  # members cannot settle it among themselves
                self.note("the owner's machine comes back")
                self._add(OWNER).boot()
                self._notice()
                self._live(until_s=self.now_s + CALM_S)
            self._check_healed()
        except (AssertionError, KeyError, IndexError, ValueError) as error:
            story = "\n  ".join(self.story)
            raise AssertionError(f"seed {self.seed}: {type(error).__name__} {error}\n  {story}") from error

    def _add(self, name: str) -> Machine:
        key_pair = SimpleNamespace(fingerprint=name, sign=lambda _: b"s")
        self.machines[name] = Machine(self, name, Trust(key_pair, self._peers), WorldClock(self), self._folder)
        return self.machines[name]

    def _agree(self) -> bool:
        """Whether all machines hold records of the same engines."""
        engines: dict[str, set[str]] = {}
        for machine in self.machines.values():
            for body in machine.book.bodies():
                engines.setdefault(body.pipeline_id, set()).add(body.engine_node)
        return all(len(nodes) == 1 for nodes in engines.values())

    def note(self, text: str) -> None:
        self.story.append(f"{self.now_s - START_S:7.2f} {text}")

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._due, _Due(self.now_s + seconds, self._numbers, act))

    def delay_s(self) -> float:
        """How long a message or a step takes: usually little, sometimes much."""
        return self.draw.random() * self.draw.choice((0.01, 0.1, 1.0, 3.0 if self.faulty else 1.0))

    def linked(self, first: str, other: str) -> bool:
        return self.machines[first].up and self.machines[other].up and frozenset((first, other)) not in self.cut

    def _live(self, *, until_s: float) -> None:
        while self._due and self._due[0].at_s <= until_s:
            due = heapq.heappop(self._due)
            self.happened += 1
            assert self.happened < STORM, "the nodes never come to rest"
            self.now_s = due.at_s
            due.act()
            for machine in self.machines.values():
                machine.check()
        self.now_s = until_s

    # What people do

    def _serve(self) -> None:
        asker = self._any_up()
        if asker is None:
            return
        model = self.draw.choice(MODELS)
        reachable = sorted(asker.reachable())
        if any(body.spec.model == model and not body.stopped for body in asker.book.bodies()):
            return
        num_replicas = self.draw.choice((0, 2)) if len(reachable) > 1 else 0
        if not num_replicas:
            ring = self.draw.sample(reachable, self.draw.randint(1, min(3, len(reachable))))
            self._serve_on(asker, ServeSpec(model=model, manifest_hash="h"), ring)
            return
        self.count("replicas")
        order = self.draw.sample(reachable, len(reachable))
        cut = self.draw.randint(1, len(order) - 1)
        pipelines = tuple(PipelineId(f"{model}{self._serves + replica}") for replica in (1, 2))
        for replica, ring in enumerate((order[:cut], order[cut:]), start=1):
            spec = ServeSpec(
                model=model,
                manifest_hash="h",
                num_replicas=num_replicas,
                replica=replica,
                replica_pipelines=pipelines,
            )
            self._serve_on(asker, spec, ring)

    def _serve_on(self, asker: Machine, spec: ServeSpec, ring: Sequence[str]) -> None:
        self._serves += 1
        pipeline_id = PipelineId(f"{spec.model}{self._serves}")
        stages = tuple(StagePlacement(node_id=NodeId(name), slices=()) for name in ring)
        spec = replace(spec, stages=stages)
        try:
            asker.book.ask(pipeline_id, spec, engine_node=ring[0])
        except AccessDenied:
            return
        self.note(f"{asker.name} serves {pipeline_id} on {','.join(ring)}")
        asker.changed()
        records = asker.book.records()
        host = self.machines[ring[0]]
        self.later(self.delay_s(), lambda: host.serve_called(asker.name, pipeline_id, records))

    def _stop(self) -> None:
        at = self._any_up()
        served = at.book.served() if at is not None else []
        if at is None or not served or not self._owned:  # without an owner one side may refuse the other's stop
            return
        body = self.draw.choice(served)
        try:
            at.book.note_stopped(body.spec.model)
        except AccessDenied:
            return
        self.note(f"{at.name} stops {body.pipeline_id}")
        self.count("stops")
        at.changed()
        records = at.book.records()
        if at.draw_bool(0.7):
            host = self.machines[body.engine_node]
            self.later(self.delay_s(), lambda: host.stop_called(at.name, body.pipeline_id, records))

    def _resize(self) -> None:
        """One pipeline more, or one less."""
        at = self._any_up()
        served = at.book.served() if at is not None else []
        if at is None or not served or not self._owned:
            return
        model = self.draw.choice(served).spec.model
        bodies = [body for body in at.book.replicas(model) if body in served]
        used = {stage.node_id for body in bodies for stage in body.spec.stages}
        free = sorted(at.reachable() - used)
        if not bodies or (not free and len(bodies) < 2):
            return
        pipelines = tuple(body.pipeline_id for body in bodies)
        try:
            if not free or (len(bodies) > 1 and self.draw.random() < 0.5):
                ended = self.draw.choice(bodies[1:])
                at.book.note_ended(ended.pipeline_id)
                left = tuple(each for each in pipelines if each != ended.pipeline_id)
                at.book.note_replicas(model, ReplicaFacts(pipelines=left))
                self.note(f"{at.name} ends {ended.pipeline_id}")
                self.count("fewer")
                at.changed()
                return
            pipeline_id = PipelineId(f"{model}{self._serves + 1}")
            places = {place_of(body.spec)[1] for body in bodies}
            place = next(place for place in range(1, 10) if place not in places)
            facts = ReplicaFacts(pipelines=(*pipelines, pipeline_id))
            at.book.note_replicas(model, facts)
        except AccessDenied:
            return
        self.count("more")
        spec = facts.of(ServeSpec(model=model, manifest_hash="h"), pipeline_id, place=place)
        self._serve_on(at, spec, free[: self.draw.randint(1, len(free))])

    # Faults

    def _fault(self) -> None:
        if not self.faulty:
            return
        self.later(self.draw.expovariate(self._faults_per_s), self._fault)
        fault = self.draw.choice(
            (
                self._cut_link, self._cut_link, self._lose, self._lose, self._crash, self._crash, self._crash,
                self._evil, self._drain, self._end, self._serve, self._stop, self._hurry,
                self._resize, self._resize, self._resize,
            )
        )  # fmt: skip
        fault()

    def _any_up(self) -> Machine | None:
        up = [machine for machine in self.machines.values() if machine.up]
        return self.draw.choice(up) if up else None

    def _cut_link(self) -> None:
        pair = frozenset(self.draw.sample(sorted(self.machines), 2))
        self.note(f"link {'-'.join(sorted(pair))} breaks or heals")
        self.cut ^= {pair}
        self._notice()

    def _lose(self) -> None:
        if (machine := self._any_up()) is not None:
            self.note(f"{machine.name} loses power")
            self.count("losses")
            machine.lose()
            self._notice()
            self.later(self.draw.choice((3.0, 30.0)) * self.draw.random(), lambda: self._boot(machine))

    def _boot(self, machine: Machine) -> None:
        if not machine.up:
            self.note(f"{machine.name} boots")
            machine.boot()
            self._notice()

    def _crash(self) -> None:
        if (machine := self._any_up()) is not None:
            machine.crash_one()

    def _evil(self) -> None:
        """Engines crash on this machine for a while, soon after each start."""
        hosts = [machine for machine in self.machines.values() if machine.up and machine.serves_any()]
        if hosts:
            machine = self.draw.choice(hosts)
            self.note(f"{machine.name} crashes engines from now on")
            machine.evil = True
            machine.crash_one()
            self.later(self.draw.uniform(15.0, 60.0), machine.reform)
        elif self.faulty:
            self.later(2.0, self._evil)

    def _drain(self) -> None:
        if (machine := self._any_up()) is not None and not machine.ends:
            machine.drain(on=not machine.drains)

    def _end(self) -> None:
        if (machine := self._any_up()) is not None and not machine.ends:
            self.note(f"{machine.name} is asked to stop")
            machine.end()
            self.later(self.draw.uniform(5.0, 20.0), lambda: self._boot(machine))

    def _hurry(self) -> None:
        if (machine := self._any_up()) is not None:
            machine.start_now()

    def _notice(self) -> None:
        for machine in self.machines.values():
            for other in self.machines:
                if other != machine.name:
                    machine.notice_later(other, self.draw.uniform(0.1, NOTICE_S))

    def _end_faults(self) -> None:
        self.note("faults end")
        self.faulty = False
        self.cut.clear()
        for machine in self.machines.values():
            machine.reform()
            if machine.ends:
                machine.lose()
            if not machine.up:
                machine.boot()
            if machine.drains:
                machine.drain(on=False)
        self._notice()

    def _check_healed(self) -> None:
        books = [{body.pipeline_id: body for body in machine.book.bodies()} for machine in self.machines.values()]
        for pipeline_id in sorted({pipeline_id for book in books for pipeline_id in book}):
            held = [book.get(pipeline_id) for book in books]
            hosts = [machine.name for machine in self.machines.values() if machine.runs_ready(pipeline_id)]
            alive = [machine.name for machine in self.machines.values() if machine.processes(pipeline_id)]
            heads = {(body.engine_node, body.stopped) for body in held if body is not None}
            if any(body is None or body.stopped or not body.begun for body in held):
                assert len(alive) <= 1, f"{pipeline_id} runs on {alive}"
                if any(body is not None and body.stopped for body in held):
                    assert not alive, f"{pipeline_id} is stopped and runs on {alive}"
                continue
            assert len(heads) == 1, f"nodes believe different engines of {pipeline_id}: {heads}"
            assert hosts == alive == [next(iter(heads))[0]], f"{pipeline_id} of {heads} is ready on {hosts} of {alive}"
            self.count("served")
        for machine in self.machines.values():
            machine.check_answered()
        for model in MODELS:
            self._check_replicas(model)

    def _check_replicas(self, model: str) -> None:
        """Machines that believe in the same first pipeline believe in the same others."""
        sets: dict[str, set[frozenset[str]]] = {}
        for machine in self.machines.values():
            found = [body.pipeline_id for body in machine.book.replicas(model) if body in machine.book.served()]
            if found:
                sets.setdefault(found[0], set()).add(frozenset(found))
        assert all(len(each) == 1 for each in sets.values()), f"they believe in {sets}"
