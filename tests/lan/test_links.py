"""Machines with a Thunderbolt cable alone, and machines with two networks of which one dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys

import pytest

from edgepipe.errors import EdgepipeError
from edgepipe.wire.nodes import ClusterStatus
from tests.support.network.lan import Finished, LanHost, LanLab
from tests.support.processes.nodes import LOOK_S, Node, Nodes

pytestmark = [pytest.mark.lan, pytest.mark.timeout(240)]
HOSTS = ["studio", "attic"]


async def ip(host: LanHost, command: str) -> None:
    done = await host.run(["ip", *command.split()])
    assert done.exit_code == 0, done


async def start_both(nodes: Nodes, lan: LanLab) -> list[Node]:
    return list(await asyncio.gather(*(nodes.start(host.name, host=host, backend="none") for host in lan.hosts)))


def hosts(status: ClusterStatus) -> set[str]:
    """Where the nodes listen that answer."""
    return {member.node.address.rpartition(":")[0] for member in status.members if member.state == "alive"}


async def listens_again(node: Node, wanted: set[str]) -> None:
    """Until a node that may be moving sees these addresses: it answers no command while it begins anew."""
    async with asyncio.timeout(100):
        while True:
            with contextlib.suppress(EdgepipeError):
                await node.until(lambda status: hosts(status) == wanted)
                return
            await asyncio.sleep(LOOK_S)


async def doctor(host: LanHost, node: Node) -> Finished:
    settings = {"EDGEPIPE_LISTEN_S": "0.1", "HOME": str(host.folder), "XDG_CONFIG_HOME": str(host.folder)}
    command = [sys.executable, "-P", "-m", "edgepipe.cli", "doctor", "--json", "--data-dir", str(node.data_dir)]
    return await host.run(command, timeout_s=60, env={**os.environ, **settings})


async def test_two_machines_that_only_a_thunderbolt_cable_joins_meet(nodes: Nodes, lan: LanLab) -> None:
    await lan.cable("studio", "attic", device="bridge0", addresses=("10.25.0.1/24", "10.25.0.2/24"))
    for host in lan.hosts:
        await ip(host, "link del lan0")
    both = await start_both(nodes, lan)
    for node in both:
        await node.until(lambda status: hosts(status) == {"10.25.0.1", "10.25.0.2"}, timeout_s=30)
    findings = json.loads((await doctor(lan.host("studio"), both[0])).stdout)["findings"]
    found = {finding["id"]: finding["what"] for finding in findings}
    assert found["network.interface"].startswith("network: bridge0 10.25.0.1")


@pytest.mark.long
async def test_after_a_cable_broke_two_machines_meet_in_their_other_network(nodes: Nodes, lan: LanLab) -> None:
    """The broken cable's address stays. At the other machine that cable leads to a switch, so nothing shows there."""
    await lan.cable("studio", "attic", device="eth1", addresses=("10.91.0.1/24", "10.91.0.2/24"))
    studio, attic = await start_both(nodes, lan)
    for node in (studio, attic):
        await node.until(lambda status: hosts(status) == {"10.77.0.1", "10.77.0.2"}, timeout_s=30)
    await ip(lan.host("studio"), "link set lan0 down")
    for node in (studio, attic):
        await listens_again(node, {"10.91.0.1", "10.91.0.2"})
    findings = json.loads((await doctor(lan.host("studio"), studio)).stdout)["findings"]
    (dead,) = (finding for finding in findings if finding["id"] == "network.link.lan0")
    assert dead["what"] == "lan0 keeps its address 10.77.0.1, but its link is dead"


async def no_longer_answers_arp(host: LanHost, address: str) -> None:
    """Until the system has forgotten who has an address; until then it cannot tell a dead link from a firewall."""
    async with asyncio.timeout(60):
        while True:
            table = (await host.run(["cat", "/proc/net/arp"])).stdout.splitlines()
            if not any(line.startswith(address) and " 0x0 " not in line for line in table):
                return
            await asyncio.sleep(LOOK_S)


@pytest.mark.long
async def test_a_link_that_is_dead_beyond_the_machine_is_told_with_the_other_network(nodes: Nodes, lan: LanLab) -> None:
    """Cables and addresses are as before at both ends; both nodes listen on that network only."""
    await lan.cable("studio", "attic", device="eth1", addresses=("10.91.0.1/24", "10.91.0.2/24"))
    studio, _ = await start_both(nodes, lan)
    await studio.until(lambda status: hosts(status) == {"10.77.0.1", "10.77.0.2"}, timeout_s=30)
    lan.cut("studio", "attic")
    await studio.until(lambda status: any(node.state == "dead" for node in status.absent), timeout_s=60)
    await no_longer_answers_arp(lan.host("studio"), "10.77.0.2")
    findings = json.loads((await doctor(lan.host("studio"), studio)).stdout)["findings"]
    found = {finding["id"]: finding for finding in findings}
    assert "the link beyond this machine is dead" in found["peer.attic.tcp"]["what"]
    assert found["node.alone"]["what"] == "no other machine answers on the node's network (10.77.0.1)"
    assert "eth1 10.91.0.1" in found["node.alone"]["fact"]
