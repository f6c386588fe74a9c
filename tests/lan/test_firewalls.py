"""A member whose firewall shuts its ports while its old connections live: it is left out, and its ports are named."""

from __future__ import annotations

import asyncio
import shutil
import sys

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.backend.types import DEFAULT_SETTINGS
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from tests.support.network.lan import Finished, LanHost, LanLab
from tests.support.processes.nodes import Node, Nodes, idle

pytestmark = [
    pytest.mark.lan,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("nft") is None, reason="nft makes the firewall"),
]
HOSTS = ["gamer", "attic"]
PORT = 7117
REMEDY = f"let TCP ports {PORT}-{PORT + 16} through the firewall of attic"


async def refuse_new_connections(host: LanHost) -> None:
    """Drop what opens a connection to the node's ports; open connections go on."""
    rules = (
        "add table ip lab",
        "add chain ip lab input { type filter hook input priority 0 ; }",
        f"add rule ip lab input iifname != lo tcp dport {PORT}-{PORT + 16} tcp flags & (syn | ack) == syn drop",
    )
    finished = await host.run(["nft", "\n".join(rules)])
    assert finished.exit_code == 0, finished


async def edgepipe(host: LanHost, *args: str) -> Finished:
    return await host.run([sys.executable, "-P", "-m", "edgepipe.cli", *args], timeout_s=60)


async def behind_a_firewall(nodes: Nodes, lan: LanLab, *, planned_before: bool = False) -> Node:
    """The node of a machine that has the whole model, beside one that takes no new connections any more."""
    source = nodes.folder / "tiny"
    write_model_folder(source, emulated_model_config(num_layers=6))
    ModelStore(nodes.folder / "gamer" / "models").pull(str(source))
    gamer, attic = await asyncio.gather(
        *(nodes.start(host.name, host=host, port=PORT, backend_options="time_factor=1") for host in lan.hosts)
    )
    await asyncio.gather(*(node.until(lambda status: idle(status, 2)) for node in (gamer, attic)))
    if planned_before:
        async with gamer.admin() as admin:
            assert len((await admin.survey("tiny", DEFAULT_SETTINGS)).links) == 4, "two links and two hosts"
    await refuse_new_connections(lan.host("attic"))
    return gamer


async def test_a_member_behind_a_firewall_is_left_out_while_its_old_connection_lives(nodes: Nodes, lan: LanLab) -> None:
    gamer = await behind_a_firewall(nodes, lan)
    served = await edgepipe(lan.host("gamer"), "serve", "tiny", "--data-dir", str(gamer.data_dir))
    assert served.exit_code == 0, served
    assert "tiny is ready: layers 0-5 on gamer" in served.stdout
    assert "attic is left out: gamer does not reach attic" in served.stderr
    assert REMEDY in served.stderr


@pytest.mark.long
@pytest.mark.parametrize("planned_before", [True, False])
async def test_plans_and_a_placement_by_hand_name_the_ports_of_the_member_behind_a_firewall(
    nodes: Nodes, lan: LanLab, planned_before: bool
) -> None:
    """Also when the link was measured before the firewall was shut."""
    gamer = await behind_a_firewall(nodes, lan, planned_before=planned_before)
    folder = ("--data-dir", str(gamer.data_dir))
    if not planned_before:
        planned = await edgepipe(lan.host("gamer"), "plan", "tiny", *folder)
        assert planned.exit_code == 0, planned
        assert REMEDY in " ".join(planned.stdout.split())
    for wish in (("--plan", "gamer:0-2,attic:3-5"), ("--nodes", "2", "--first", "gamer")):
        named = await edgepipe(lan.host("gamer"), "serve", "tiny", *wish, *folder)
        assert named.exit_code == 3, named
        assert REMEDY in named.stderr, named
        assert "ipv4:" not in named.stderr, "words of gRPC"
        await gamer.until(lambda status: idle(status, 2))
