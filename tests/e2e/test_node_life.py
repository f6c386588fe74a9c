"""Nodes that start, find each other, and end, without leaving anything behind."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from edgepipe.cluster.discovery import Announcement, Discovery
from edgepipe.cluster.founding import TrustFolders
from edgepipe.cluster.identity import load_identity
from edgepipe.cluster.trust_file import TrustFile
from edgepipe.ids import NodeId
from edgepipe.link.channels import bind, make_server
from edgepipe.security.access import Kind
from edgepipe.security.certificates import make_key_pair
from edgepipe.security.mutual_tls import MutualTls
from edgepipe.telemetry.audit import read_audit
from edgepipe.wire.nodes import ClusterStatus
from tests.support.models.for_nodes import pull_emulated
from tests.support.processes.nodes import Node, Nodes, children_of, idle
from tests.support.processes.waiting import until

_LEFT = ["identity", "incarnation", "node.log", "trust"]


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    made = Nodes(folder=tmp_path, cluster=f"test-{tmp_path.name}-{id(tmp_path)}")
    yield made
    await made.end()


@asynccontextmanager
async def impostor(cluster_id: str, victim: str) -> AsyncIterator[MutualTls]:
    """Somebody with a key of his own who announces himself as ``victim``."""
    security = MutualTls(make_key_pair(), callers=tuple(Kind))
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


async def test_a_peer_named_by_hand_needs_no_discovery(nodes: Nodes) -> None:
    a = await nodes.start("a", discovery=False)
    b = await nodes.start("b", discovery=False, peers=[a.address])
    await asyncio.gather(*(node.until(lambda status: len(status.members) == 2) for node in (a, b)))


async def test_a_model_removed_beside_a_running_node_is_gone_from_the_others_lists(nodes: Nodes) -> None:
    pull_emulated(nodes.folder / "a" / "models", nodes.folder / "tiny")
    a, b = await asyncio.gather(*(nodes.start(name, backend="none") for name in ("a", "b")))

    def on_a(status: ClusterStatus) -> list[str]:
        return [told.model for member in status.members if not member.self for told in member.node.models]

    await b.until(lambda status: on_a(status) == ["tiny"])
    assert (await edgepipe(a, "models", "rm", "tiny"))[0] == 0
    await b.until(lambda status: not on_a(status))


async def test_a_model_that_is_served_is_not_removed_unasked(nodes: Nodes) -> None:
    pull_emulated(nodes.folder / "a" / "models", nodes.folder / "tiny")
    a, b = await asyncio.gather(*(nodes.start(name) for name in ("a", "b")))
    await asyncio.gather(*(node.until(lambda status: idle(status, 2)) for node in (a, b)))
    await a.serve("tiny", plan="a:0-2,b:3-5")
    code, _, err = await edgepipe(a, "models", "rm", "tiny")
    assert code == 2
    assert "tiny is served by a, b" in err
    assert "edgepipe models rm tiny --yes" in err
    code, out, _ = await edgepipe(b, "models", "list", "--json")
    (row,) = json.loads(out)
    assert (row["model"], row["nodes"]) == ("tiny", [{"node": "b", "whole": False}, {"node": "a", "whole": True}])
    code, out, _ = await edgepipe(a, "models", "rm", "tiny", "--yes")
    assert code == 0
    assert out.splitlines()[-1] == "it is still on b"
    status = await b.until(lambda status: not status.engines)
    (own,) = (member.node for member in status.members if member.self)
    assert [told.model for told in own.models] == ["tiny"]
    await a.until(lambda status: not any(member.node.models for member in status.members if member.self))


async def edgepipe(node: Node, *args: str) -> tuple[int | None, str, str]:
    """Exit status, output and errors of a command at that node, without a terminal."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "edgepipe.cli", *args, "--data-dir", str(node.data_dir)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


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


async def test_a_stopped_node_is_gone_from_the_others_at_once(nodes: Nodes) -> None:
    a, b = await asyncio.gather(nodes.start("a", backend="none"), nodes.start("b", backend="none"))
    await a.until(lambda status: len(status.members) == 2)
    await b.stop()
    await a.until(lambda status: len(status.members) == 1, timeout_s=3)


async def test_a_killed_node_is_gone_from_the_others_and_its_children_with_it(nodes: Nodes) -> None:
    a, b = await asyncio.gather(nodes.start("a", backend="none"), nodes.start("b"))
    await a.until(lambda status: idle_or_none(status) == 2)
    family = children_of(b.process.pid)
    b.kill()
    await a.until(lambda status: len(status.members) == 1, timeout_s=5)
    await asyncio.to_thread(psutil.wait_procs, family, timeout=10)
    assert not [child for child in family if child.is_running()]


def idle_or_none(status) -> int:
    """Nodes whose device, if they have one, is ready."""
    return sum(all(device.state == "idle" for device in member.node.devices) for member in status.members)


async def test_a_second_node_on_the_same_directory_is_refused(nodes: Nodes) -> None:
    node = await nodes.start("a", backend="none")
    second = await nodes.spawn("a", backend="none")
    _, said = await second.communicate()
    assert second.returncode == 2
    assert said.decode().splitlines()[0] == f"another edgepipe node uses the data directory {node.data_dir}"
    await node.status()  # and the first goes on


@pytest.mark.parametrize("flag", ["port", "http_port"])
async def test_a_port_in_use_is_said_in_three_lines(nodes: Nodes, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        if port > 65519:  # the port range above it must exist
            pytest.skip("the system gave a port at the end of the range")
        process = await nodes.spawn("a", backend="none", **{flag: port})
        _, said = await process.communicate()
    assert process.returncode == 1
    lines = [line for line in said.decode().splitlines() if not line.startswith("20")]  # log lines bear a date
    assert str(port) in lines[-3]
    assert "port" in lines[-1]
    assert not (nodes.folder / "a" / "daemon.sock").exists()


async def test_a_crashed_gateway_comes_back_at_the_same_port(nodes: Nodes) -> None:
    node = await nodes.start("a", backend="none")
    gateway = next(child for child in (await node.status()).children if child.kind == "gateway")
    psutil.Process(gateway.pid).kill()
    await node.until(lambda status: {child.pid for child in status.children} - {gateway.pid} != set())
    await node.until(lambda status: all(child.state == "running" for child in status.children))
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{node.http_port}/health")).status_code == 200


async def test_an_unknown_backend_ends_the_start_and_makes_nothing(nodes: Nodes) -> None:
    process = await nodes.spawn("a", backend="abacus")
    assert process.stderr is not None
    assert "there is no backend 'abacus'" in (await process.stderr.read()).decode()
    assert await process.wait() == 2
    assert sorted(path.name for path in (nodes.folder / "a").iterdir()) == ["identity", "trust"]  # as it was given


async def test_a_copied_data_directory_gets_a_new_identity(nodes: Nodes) -> None:
    a = await nodes.start("a", backend="none")
    shutil.copytree(a.data_dir, nodes.folder / "b", ignore=shutil.ignore_patterns("daemon.*", "*.log"))
    b = await nodes.start("b", backend="none")
    assert b.node_id == NodeId(a.node_id)
    told = b.data_dir / "audit.log"
    expected = ["identity copied", "founded"]
    await until(lambda: [entry.kind for entry in read_audit(told, last=2)] == expected, timeout_s=20)
    fresh = TrustFile(b.data_dir / "trust").load()
    assert fresh is not None
    assert fresh.store.cluster_id != (await a.status()).cluster_id  # it has to be paired
    assert a.node_id not in fresh.store.peers
    assert len((await a.status()).members) == 1


async def test_the_log_is_there_to_read_and_the_socket_takes_the_stop(nodes: Nodes) -> None:
    node = await nodes.start("a", backend="none")
    assert not (await node.status()).members[0].node.devices
    async with node.admin() as admin:
        lines = [line.text async for line in admin.logs(lines=50, follow=False)]
        await admin.shut_down()
    assert any("node ready" in line for line in lines)
    async with asyncio.timeout(20):
        assert await node.process.wait() == 0
