"""A member whose firewall shuts its ports while its old connections live: it is left out, and its ports are named."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.model.emulated_folder import write_model_folder
from edgepipe.model.store import ModelStore
from tests.support.lan import Finished, LanHost, LanLab
from tests.support.nodes import Nodes, idle

pytestmark = [
    pytest.mark.lan,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("nft") is None, reason="nft makes the firewall"),
]
PORT = 7117


@pytest.fixture
async def lan() -> AsyncIterator[LanLab]:
    async with LanLab(hosts=["gamer", "attic"]) as lab:
        yield lab


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    made = Nodes(folder=tmp_path, cluster="lan-test")
    yield made
    await made.end()


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


async def test_a_member_behind_a_firewall_is_left_out_while_its_old_connection_lives(nodes: Nodes, lan: LanLab) -> None:
    source = nodes.folder / "tiny"
    write_model_folder(source, emulated_model_config(num_layers=6))
    ModelStore(nodes.folder / "gamer" / "models").pull(str(source))
    gamer, attic = await asyncio.gather(
        *(nodes.start(host.name, host=host, port=PORT, backend_options="time_factor=1") for host in lan.hosts)
    )
    await asyncio.gather(*(node.until(lambda status: idle(status, 2)) for node in (gamer, attic)))
    await refuse_new_connections(lan.host("attic"))
    data_dir = str(gamer.data_dir)
    served = await edgepipe(lan.host("gamer"), "serve", "tiny", "--data-dir", data_dir)
    assert served.exit_code == 0, served
    assert "tiny is ready: layers 0-5 on gamer" in served.stdout
    assert "attic is left out: gamer does not reach attic" in served.stderr
    assert f"let TCP ports {PORT}-{PORT + 16} through the firewall of attic" in served.stderr
    await gamer.stop_model()
    await gamer.until(lambda status: idle(status, 2))
    planned = await edgepipe(lan.host("gamer"), "plan", "tiny", "--data-dir", data_dir)
    assert planned.exit_code == 0, planned
    assert f"let TCP ports {PORT}-{PORT + 16} through the firewall of attic" in " ".join(planned.stdout.split())
    named = await edgepipe(lan.host("gamer"), "serve", "tiny", "--plan", "gamer:0-2,attic:3-5", "--data-dir", data_dir)
    assert named.exit_code == 3, named
    assert f"let TCP ports {PORT}-{PORT + 16} through the firewall of attic" in named.stderr
    assert "ipv4:" not in named.stderr, "words of gRPC"
