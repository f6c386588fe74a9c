"""A paired machine that has turned attacks a cluster that serves: answers, memory, event loops and placement are as
before, it learns no prompt, and it can be removed at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edgepipe.cli.admin import connect
from edgepipe.errors import EdgepipeError
from edgepipe.link.channels import make_channel, translated
from edgepipe.security.mutual_tls import MutualTls
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.wire.common import Hello, hello_to_wire
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.wire.v1 import node_pb2_grpc
from tests.support.cluster.members import member_of
from tests.support.faults.rogue.attacks import ATTACKS, MODEL
from tests.support.faults.rogue.process import RogueProcess, Watch, start_rogue
from tests.support.processes.nodes import Node, Nodes, idle
from tests.support.processes.streams import CONFIG, PROMPT, SLOW, Stream, answers
from tests.support.processes.waiting import until

GROWTH_BYTES = 50 << 20  # memory that all attacks together may cost a process
PAUSE_S = 3.0  # generous: other tests run beside this one; ``scripts/bench trust rogue`` has the real bound
CALL_S = 10.0  # until a node answers another member that calls it in the middle of an attack
REMOVAL_S = 5.0  # 2 s, and as much again for a busy machine
SHORT = ("promote_accomplice", "take_pipeline", "forge_states", "claim_tokens", "claim_numbers")
CHAT_TOKENS = 200  # length of a request: some seconds


@dataclass(slots=True)
class Chat:
    """One request after another at a node, every token held against the oracle."""

    node: Node
    tokens: int = 0  # tokens of the requests that have ended
    stream: Stream = field(default_factory=lambda: Stream(PROMPT, CHAT_TOKENS))

    async def run(self) -> None:
        """Until cancelled. Raises AssertionError when an answer is wrong or breaks off."""
        while True:
            await self.stream.run(self.node.http_port)
            self.stream.assert_right()
            self.tokens += CHAT_TOKENS
            self.stream = Stream(PROMPT, CHAT_TOKENS)

    async def goes_on(self) -> None:
        """Until more tokens have come."""
        before = self.tokens + len(self.stream.ids)
        await until(lambda: self.tokens + len(self.stream.ids) >= before + 10, timeout_s=40)


@dataclass(slots=True)
class Caller:
    """Another member, which calls every node over a new connection again and again."""

    data_dir: Path
    nodes: Sequence[Node]

    async def run(self) -> None:
        """Until cancelled. Raises TimeoutError when a node does not answer it for long."""
        tls = member_of(self.data_dir)
        while True:
            for node in self.nodes:
                async with asyncio.timeout(CALL_S):
                    while not await self._answered(node, tls):  # noqa: ASYNC110 - nodes do not notify
                        await asyncio.sleep(0.1)
            await asyncio.sleep(0.3)

    async def _answered(self, node: Node, tls: MutualTls) -> bool:
        cluster_id = (await node.status()).cluster_id
        hello = Hello(role="node", node_id=tls.node_id, cluster_id=cluster_id)
        async with make_channel(node.address, tls.to_node(node.node_id)) as channel:
            try:
                with translated(node.address):
                    await node_pb2_grpc.NodeStub(channel).Vouch(pb.VouchRequest(hello=hello_to_wire(hello)), timeout=2)
            except EdgepipeError:
                return False
        return True


@dataclass(slots=True, kw_only=True)
class Cluster:
    """Three honest nodes that serve ``tiny`` over two of them, chats at two gateways, and the rogue."""

    nodes: Sequence[Node]
    chats: Sequence[Chat]
    rogue: RogueProcess
    rogue_dir: Path
    watch: Watch
    placement: list[tuple[str, int, tuple[str, ...]]]
    peers: dict[str, str]

    async def suffers(self, attack: str) -> None:
        """Let the rogue attack; then everything is as it was."""
        self.watch.begin()
        outcome = await self.rogue.attack(attack)
        assert not outcome.complaints
        assert outcome.prompts == 0
        await asyncio.gather(*(chat.goes_on() for chat in self.chats))
        assert await placement(self.nodes[0]) == self.placement
        honest = {node.node_id for node in self.nodes}
        for node in self.nodes:
            assert await peers(node) == self.peers
            assert honest <= {member.node.node_id for member in (await node.status()).members}
        assert self.watch.growth_bytes() <= GROWTH_BYTES, f"{self.watch.growth_bytes() >> 20} MB after {attack}"
        assert self.watch.longest_s <= PAUSE_S, f"{self.watch.longest_s:.2f} s during {attack}"

    async def remove_rogue(self) -> None:
        """It is gone everywhere at once, and may call nobody afterwards."""
        a, *others = self.nodes
        async with asyncio.timeout(REMOVAL_S):
            async with connect(a.data_dir) as admin:
                await admin.remove_peer(self.rogue.node_id, others="drop")
            for node in others:
                while self.rogue.node_id in await peers(node):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        tls = member_of(self.rogue_dir)
        request = pb.StandByRequest(hello=hello_to_wire(Hello(role="node", node_id=self.rogue.node_id)))
        for node in self.nodes:
            async with make_channel(node.address, tls.to_node(node.node_id)) as channel:
                with pytest.raises(EdgepipeError), translated(node.address):
                    await node_pb2_grpc.NodeStub(channel).StandBy(request, timeout=5)


async def placement(node: Node) -> list[tuple[str, int, tuple[str, ...]]]:
    """Pipelines of the honest engine: their epochs and their stages' nodes."""
    status = await node.status()
    return [
        (engine.pipeline_id, engine.epoch.counter, tuple(stage.node_id for stage in engine.stages))
        for member in status.members
        if member.node.node_id == node.node_id
        for engine in member.node.engines
    ]


async def peers(node: Node) -> dict[str, str]:
    """Roles by node id."""
    async with connect(node.data_dir) as admin:
        return {peer.node_id: peer.role for peer in (await admin.peers()).peers}


@asynccontextmanager
async def attacked_cluster(nodes: Nodes) -> AsyncGenerator[Cluster]:
    """Serving, and watched."""
    for name, model in (("a", "tiny"), ("b", MODEL)):
        write_model_folder(nodes.folder / model, CONFIG)
        ModelStore(nodes.folder / name / "models").pull(str(nodes.folder / model))
    honest = await asyncio.gather(*(nodes.start(name, backend_options=SLOW) for name in ("a", "b", "c")))
    await asyncio.gather(*(node.until(lambda status: idle(status, 3)) for node in honest))
    a, _, c = honest
    rogue_dir, former_owner, owner, caller = nodes.spare[:4]
    async with connect(a.data_dir) as admin:
        for data_dir in (former_owner, owner):
            await admin.promote_peer(data_dir.name)
        await admin.remove_peer(former_owner.name, others="drop")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    chats = [Chat(a), Chat(c)]
    await asyncio.gather(*(answers(chat.node) for chat in chats))
    watch = Watch(honest)
    async with (
        start_rogue(rogue_dir, honest, former_owner=former_owner, owner=owner) as rogue,
        asyncio.TaskGroup() as tasks,
    ):
        running = [tasks.create_task(actor.run()) for actor in (*chats, watch, Caller(caller, honest))]
        await asyncio.gather(*(node.until(lambda status: len(status.members) == 4) for node in honest))
        await asyncio.gather(*(chat.goes_on() for chat in chats))
        watch.remember()
        yield Cluster(
            nodes=honest,
            chats=chats,
            rogue=rogue,
            rogue_dir=rogue_dir,
            watch=watch,
            placement=await placement(a),
            peers=await peers(a),
        )
        for task in running:
            task.cancel()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("attacks", [SHORT, pytest.param(tuple(ATTACKS), marks=pytest.mark.long)], ids=["some", "all"])
async def test_a_member_that_has_turned_harms_nobody_and_can_be_removed(nodes: Nodes, attacks: Sequence[str]) -> None:
    async with attacked_cluster(nodes) as cluster:
        for attack in attacks:
            await cluster.suffers(attack)
        await cluster.remove_rogue()
