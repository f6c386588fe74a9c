"""Engine keepers of several nodes in virtual time: real serve books, keys and proofs; engines and calls are made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from edgepipe.daemon.serving.alive_proof import AliveProofs
from edgepipe.daemon.serving.engine_keeper import EngineKeeper
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.daemon.serving.takeover import Vacancies
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.wire.engines import EngineState
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import StartEngineRequest, VouchReply
from tests.support.daemon.published_state import FakeState
from tests.support.daemon.serve_books import NodeTrust, Shared, shared, spec
from tests.support.engine.virtual_ring import LoopClock

P = PipelineId("p")
LOOK_S = 0.5
SPREAD_S = 3.0  # for records

Lie = Callable[[], VouchReply]


@dataclass(eq=False)
class Member:
    """One node: its keeper, or a rogue's answers."""

    fleet: Fleet
    name: str
    node_id: str
    lie: Lie | None = None  # what a rogue says to every question; it runs nothing
    engines: set[str] = field(default_factory=set[str])
    vacancies: Vacancies = field(default_factory=Vacancies)
    book: ServeBook = field(init=False)
    own_drains: bool = False

    def __post_init__(self) -> None:
        folder = self.fleet.folder / self.name
        folder.mkdir()
        trust = NodeTrust(self.fleet.trust, self.fleet.trust.keys[self.name])
        self.proofs = AliveProofs(trust, self.fleet.trust.clock)
        self.book = ServeBook(
            folder / "served.bin",
            trust=trust,
            signs=self,
            clock=self.fleet.trust.clock,
            local=FakeState(),
        )

    # What ``NodePresence`` offers

    def lacks_engine(self, node_id: str, pipeline_id: str) -> bool:
        return self.vacancies.has_long_lacked(pipeline_id, node_id, now_s=self.fleet.trust.clock.monotonic_s())

    def engine_state(self, node_id: str, pipeline_id: str) -> str:
        return "ready" if pipeline_id in self.fleet.by_id[node_id].engines else ""

    # What ``Peers`` offers

    @property
    def own_id(self) -> str:
        return self.node_id

    def is_self(self, node_id: str) -> bool:
        return node_id == self.node_id

    def reaches(self, node_id: str) -> bool:
        return self.is_self(node_id) or self.fleet.linked(self.name, self.fleet.by_id[node_id].name)

    def is_gone(self, node_id: str) -> bool:
        return not self.reaches(node_id)

    def nodes(self) -> list[NodeState]:
        members = (member for member in self.fleet.by_id.values() if self.reaches(member.node_id))
        return [member.state(for_book=self.book) for member in members]

    def state(self, *, for_book: ServeBook) -> NodeState:
        """What another node sees of this one."""
        engines = (
            EngineState(model="tiny", pipeline_id=P, epoch=Epoch(1, EngineId(self.name)), state="ready")
            for _ in self.engines
        )
        bound = tuple(engine for engine in engines if for_book.binds(self.node_id, engine))
        return NodeState(node_id=NodeId(self.node_id), engines=bound, serves=self.book.records())

    async def vouch_all(self, pipeline_id: str, node_id: str, *, challenge: bytes = b"") -> dict[str, VouchReply]:
        others = (member for member in self.fleet.by_id.values() if member is not self and self.reaches(member.node_id))
        return {member.node_id: member.answer(pipeline_id, node_id, challenge) for member in others}

    def answer(self, pipeline_id: str, node_id: str, challenge: bytes) -> VouchReply:
        """What this node says about another one, as ``NodeService.Vouch``."""
        if self.lie is not None:
            return self.lie()
        hears, head = self.reaches(node_id), self.fleet.by_id[node_id]
        proof = head.proofs.prove(pipeline_id, challenge, caller=self.node_id) if hears and head.engines else b""
        return VouchReply(hears=hears, proof=proof)

    # What ``EngineHost`` offers

    def ready(self) -> list[Any]:
        return []

    def states(self) -> list[EngineState]:
        return list(self.state(for_book=self.book).engines)

    async def start(self, request: StartEngineRequest, **_: object) -> None:
        self.engines.add(request.pipeline_id)

    async def stop(self, pipeline_id: str) -> None:
        self.engines.discard(pipeline_id)

    def end_superseded(self, pipeline_id: str) -> None:
        self.engines.discard(pipeline_id)


@dataclass
class Fleet:
    """Nodes a (an owner), b, c, d and e; sorted by their random ids in ``members``."""

    folder: Path
    trust: Shared = field(default_factory=lambda: shared("a", "bcde"))
    dead: set[str] = field(default_factory=set[str])  # names
    cut: set[frozenset[str]] = field(default_factory=set[frozenset[str]])  # broken links
    by_id: dict[str, Member] = field(default_factory=dict[str, Member])

    def __post_init__(self) -> None:
        self.trust.clock = LoopClock()
        for name in self.trust.keys:
            member = Member(self, name, self.trust.node_id(name))
            self.by_id[member.node_id] = member

    @property
    def members(self) -> list[Member]:
        """By their ids: the first one's turn comes first."""
        return [self.by_id[node_id] for node_id in sorted(self.by_id)]

    def linked(self, name: str, other: str) -> bool:
        return not self.dead & {name, other} and frozenset((name, other)) not in self.cut

    def serve(self, head: Member) -> None:
        """Have the head's engine served, and everybody know."""
        head.engines.add(P)
        head.book.ask(P, spec(), engine_node=head.node_id)
        head.book.note_served(P, spec())
        for member in self.members:
            member.book.merge(head.node_id, head.book.records())

    def hosts(self) -> list[str]:
        """The names of the living nodes that run the engine."""
        return [member.name for member in self.members if member.engines and member.name not in self.dead]

    async def run(self, most_s: float, *, until: Callable[[], bool] = lambda: False) -> float:
        """Let the honest keepers work; the seconds until ``until``, or ``most_s``."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as tasks:
            for member in self.members:
                if member.lie is None and member.name not in self.dead:
                    tasks.create_task(keeper(member, tasks).run())
            while loop.time() - began_s < most_s and not until():  # noqa: ASYNC110 - in virtual time
                await asyncio.sleep(LOOK_S)
            took_s = loop.time() - began_s
            await asyncio.sleep(SPREAD_S)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
        return took_s


def keeper(member: Member, tasks: asyncio.TaskGroup) -> EngineKeeper:
    """The real keeper of a node."""

    async def changes() -> AsyncIterator[None]:
        while True:
            yield
            await asyncio.sleep(LOOK_S)

    async def adopt(*_: object, **__: object) -> SimpleNamespace:
        model = SimpleNamespace(config_json="", weights_json="", manifest_hash="h")
        model.as_placed = lambda _: model  # pyright: ignore[reportUnknownLambdaType]
        return model

    made_up = cast("Any", member)
    return EngineKeeper(
        book=member.book,
        engines=made_up,
        models=cast("Any", SimpleNamespace(adopt=adopt)),
        peers=made_up,
        proofs=member.proofs,
        vacancies=member.vacancies,
        clock=member.fleet.trust.clock,
        timeouts=cast("Any", SimpleNamespace(gather_s=0.0)),
        local=FakeState(changes=changes),
        node=cast("Any", SimpleNamespace(ends=lambda: False)),
        tasks=tasks,
    )
