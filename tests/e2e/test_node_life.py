"""Nodes that start, find each other, and end, without leaving anything behind."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from edgepipe.cluster.discovery import Announcement, Discovery
from edgepipe.cluster.founding import TrustFolders
from edgepipe.cluster.identity import load_identity
from edgepipe.cluster.trust_file import TrustFile
from edgepipe.ids import NodeId
from edgepipe.link.channels import bind, make_server
from edgepipe.security.access import ProcessKind
from edgepipe.security.certificates import make_key_pair
from edgepipe.security.mutual_tls import MutualTls
from edgepipe.telemetry.audit import read_audit
from tests.support.processes.nodes import Nodes, children_of, idle
from tests.support.processes.waiting import until

_LEFT = ["batches", "identity", "incarnation", "node.log", "trust"]


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    made = Nodes(folder=tmp_path, cluster=f"test-{tmp_path.name}-{id(tmp_path)}", forks=False)
    yield made
    await made.end()


@asynccontextmanager
async def impostor(cluster_id: str, victim: str) -> AsyncIterator[MutualTls]:
    """Somebody with a key of his own who announces himself as ``victim``."""
    security = MutualTls(make_key_pair(), callers=tuple(ProcessKind))
    server = make_server(security)
    port = bind(server, security, host="127.0.0.1", port=0)
    await server.start()
    said = Announcement(
        cluster_id=cluster_id, cluster_name="x", node_id=victim, node_name="b", host="127.0.0.1", port=port
    )
    discovery = Discovery(said, lambda _: None)
    await discovery.start()
    try:
        yield security
    finally:
        await discovery.stop()
        await server.stop(None)


async def test_two_nodes_find_each_other_by_mdns_whoever_else_says_to_be_one_of_them(nodes: Nodes) -> None:
    a = await nodes.start("a")
    victim = load_identity(TrustFolders(nodes.spare[0]).identity).fingerprint
    async with impostor((await a.status()).cluster_id, victim) as security:
        await until(lambda: security.refused_handshakes, timeout_s=20)
        b = await nodes.start("b")
        assert b.node_id == victim
        await a.until(lambda status: any(member.node.address == b.address for member in status.members))
    status = await a.until(lambda status: idle(status, 2))
    assert {member.node.name for member in status.members} == {"a", "b"}
    other = next(member for member in status.members if not member.self)
    assert other.node.node_id == b.node_id
    assert other.state == "alive"
    await a.until(lambda status: any(member.rtt_ms > 0 for member in status.members))


async def test_nodes_of_another_cluster_stay_apart_and_say_so(nodes: Nodes) -> None:
    a = await nodes.start("a")
    b = await nodes.start("b", cluster="elsewhere", peers=[a.address], backend="none")
    status = await b.until(lambda status: len(status.refused) > 0)
    assert status.refused[0].error.code == "pairing_rejected"
    assert len(status.members) == 1
    assert len((await a.status()).members) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
async def test_a_stopped_node_leaves_nothing_behind(nodes: Nodes, number: int) -> None:
    node = await nodes.start("a", port=0)
    await node.until(lambda status: idle(status, 1))
    family = children_of(node.process.pid)
    assert {child.kind for child in (await node.status()).children} == {"gateway", "stage"}
    assert await node.stop(number) == 0
    assert not [child for child in family if child.is_running()]
    assert sorted(path.name for path in node.data_dir.iterdir()) == _LEFT
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", node.http_port), timeout=1).close()


async def test_a_peer_named_by_hand_needs_no_discovery_and_who_stops_or_dies_is_gone_from_the_others(
    nodes: Nodes,
) -> None:
    a = await nodes.start("a", backend="none", discovery=False)
    b, c = await asyncio.gather(
        nodes.start("b", discovery=False, peers=[a.address]),
        nodes.start("c", backend="none", discovery=False, peers=[a.address]),
    )
    await asyncio.gather(*(node.until(lambda status: len(status.members) > 1) for node in (b, c)))
    await a.until(lambda status: len(status.members) == 3)
    await c.stop()
    await a.until(lambda status: len(status.members) == 2, timeout_s=3)
    await a.until(lambda status: idle_or_none(status) == 2)
    family = children_of(b.process.pid)
    assert family
    b.kill()
    await a.until(lambda status: len(status.members) == 1, timeout_s=5)
    await asyncio.to_thread(psutil.wait_procs, family, timeout=10)
    assert not [child for child in family if child.is_running()]


def idle_or_none(status) -> int:
    """Nodes whose device, if they have one, is ready."""
    return sum(all(device.state == "idle" for device in member.node.devices) for member in status.members)


async def test_a_copied_data_directory_gets_a_new_identity(nodes: Nodes) -> None:
    a = await nodes.start("a", backend="none")
    shutil.copytree(a.data_dir, nodes.folder / "b", ignore=shutil.ignore_patterns("daemon.*", "*.log"))
    b = await nodes.start("b", backend="none")
    assert b.node_id == NodeId(a.node_id)
    audit_log = b.data_dir / "audit.log"
    expected = ["identity copied", "founded"]
    await until(lambda: [entry.kind for entry in read_audit(audit_log, last=2)] == expected, timeout_s=20)
    fresh = TrustFile(b.data_dir / "trust").load()
    assert fresh is not None
    assert fresh.store.cluster_id != (await a.status()).cluster_id  # it has to be paired
    assert a.node_id not in fresh.store.peers
    assert len((await a.status()).members) == 1
