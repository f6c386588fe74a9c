"""What a node answers about another node: its own proof, passed on; and who may end an engine's pause."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgepipe.daemon.services import NodeService
from edgepipe.daemon.serving.alive_proof import AliveProofs
from edgepipe.errors import AccessDenied
from edgepipe.wire.codec import to_wire
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.v1 import node_pb2 as pb
from tests.support.daemon.serve_books import BookNode, NodeTrust, Shared, all_hear, nodes, spec

CHALLENGE = bytes(range(32))


@dataclass
class Served:
    """A NodeService over a real book."""

    trust: Shared
    node: BookNode
    reachable: dict[str, Served] = field(default_factory=dict[str, "Served"])  # keys are node ids
    running: set[str] = field(default_factory=set[str])
    paused: set[str] = field(default_factory=set[str])
    started: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.proofs = AliveProofs(NodeTrust(self.trust, self.trust.keys[self.node.name]), self.trust.clock)
        engines: Any = SimpleNamespace(
            state_of=lambda pipeline_id: "ready" if pipeline_id in self.running else None,
            is_paused=self.paused.__contains__,
            start_now=self.started.append,
        )
        others: dict[str, Any] = dict.fromkeys(("heartbeats", "models", "links", "replication", "batches"))
        self.service = NodeService(
            admit=lambda _: None,
            security=cast("Any", SimpleNamespace(require_node=lambda *_: None)),
            device=cast("Any", SimpleNamespace(epoch_of=lambda _: None)),
            engines=engines,
            peers=cast("Any", self),
            book=self.node.book,
            proofs=self.proofs,
            record_s=0.0,
            **others,
        )

    own_drains = False

    def is_self(self, node_id: str) -> bool:
        return node_id == self.node.node_id

    def reaches(self, node_id: str) -> bool:
        return self.is_self(node_id) or node_id in self.reachable

    async def proof_of(self, node_id: str, pipeline_id: str, challenge: bytes) -> bytes:
        asked = self.reachable[node_id]
        return (await asked.vouch(node_id, pipeline_id, challenge, caller=self.node.node_id)).proof

    async def vouch(self, node_id: str, pipeline_id: str, challenge: bytes, *, caller: str = "x") -> pb.VouchReply:
        request = pb.VouchRequest(pipeline_id=pipeline_id, node_id=node_id, challenge=challenge)
        request.hello.node_id = caller
        return await self.service.Vouch(request, None)


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, Served]:
    """a is an owner; b asked for pipeline p, whose engine runs on c; all hear each other."""
    trust, books = nodes(tmp_path)
    books["b"].book.ask(cast("Any", "p"), spec(), engine_node=books["c"].node_id)
    for book in books.values():
        book.engines[books["c"].node_id, "p"] = "ready"
    all_hear(books)
    served = {name: Served(trust, book) for name, book in books.items()}
    for member in served.values():
        member.reachable.update({other.node.node_id: other for other in served.values() if other is not member})
    served["c"].running.add("p")
    return served


async def test_a_member_passes_on_the_proof_of_a_node_that_it_hears(cluster: dict[str, Served]) -> None:
    a, c, d = (cluster[name] for name in "acd")
    head = c.node.node_id
    reply = await d.vouch(head, "p", CHALLENGE)
    assert reply.hears
    assert a.proofs.holds(head, "p", CHALLENGE, reply.proof)
    assert not a.proofs.holds(head, "p", bytes(32), reply.proof), "an old proof"
    assert not a.proofs.holds(head, "q", CHALLENGE, reply.proof), "of another pipeline"
    assert not a.proofs.holds(d.node.node_id, "p", CHALLENGE, reply.proof), "of another node"
    assert not (await d.vouch(head, "p", b"")).proof, "no proof is wanted"
    assert not (await d.vouch(head, "p", bytes(1 << 16))).proof, "nothing long is signed"


async def test_a_node_proves_nothing_about_engines_that_it_does_not_run(cluster: dict[str, Served]) -> None:
    c, d = cluster["c"], cluster["d"]
    assert not (await d.vouch(d.node.node_id, "p", CHALLENGE)).proof
    c.running.clear()
    assert not (await d.vouch(c.node.node_id, "p", CHALLENGE)).proof
    d.reachable.clear()
    assert not (await d.vouch(c.node.node_id, "p", CHALLENGE)).hears


async def test_a_member_that_asks_without_end_costs_few_signatures_and_takes_none_from_others(
    cluster: dict[str, Served],
) -> None:
    c, d = cluster["c"], cluster["d"]
    head = c.node.node_id
    flood = [bool((await d.vouch(head, "p", CHALLENGE, caller="rogue")).proof) for _ in range(100)]
    assert sum(flood) == 16
    assert (await d.vouch(head, "p", CHALLENGE, caller="b")).proof
    direct = [bool((await c.vouch(head, "p", CHALLENGE, caller="rogue")).proof) for _ in range(300)]
    assert sum(direct) == 128
    assert (await d.vouch(head, "p", CHALLENGE, caller="b")).proof
    d.trust.clock.advance(1.0)
    assert sum([bool((await d.vouch(head, "p", CHALLENGE, caller="rogue")).proof) for _ in range(9)]) == 2


async def test_the_asker_and_owners_end_the_pause_of_a_crashed_engine(cluster: dict[str, Served]) -> None:
    c = cluster["c"]
    c.paused.add("p")
    for name in "ab":
        await c.service.StartEngine(request_of(cluster[name]), None)
    assert c.started == ["p", "p"]
    with pytest.raises(AccessDenied):
        await c.service.StartEngine(request_of(cluster["d"]), None)
    assert c.started == ["p", "p"]


def request_of(served: Served) -> pb.StartEngineRequest:
    """As ``edgepipe serve`` on that node sends it."""
    request = pb.StartEngineRequest(pipeline_id="p")
    request.hello.node_id = served.node.node_id
    request.spec.CopyFrom(to_wire(ServeSpec(model="tiny"), pb.ServeSpec))
    return request
