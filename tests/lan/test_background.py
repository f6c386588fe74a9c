"""A node in the background goes on: after its machine joined a cluster, and after the machine's address changed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable

import pytest

from tests.support.network.lan import LanHost, LanLab
from tests.support.processes.nodes import LOOK_S

pytestmark = [pytest.mark.lan, pytest.mark.long, pytest.mark.timeout(240)]
HOSTS = ["gamer", "attic"]
_STEP_S = 60.0  # for one command, and for a node to begin anew


class Machine:
    """A host of the lab with a home of its own and the command line."""

    def __init__(self, host: LanHost) -> None:
        self.host = host
        kept = {key: value for key, value in os.environ.items() if not key.startswith("EDGEPIPE_")}
        home = str(host.folder)
        own = {"HOME": home, "XDG_CONFIG_HOME": home, "XDG_DATA_HOME": home, "EDGEPIPE_LISTEN_S": "0.5"}
        self._environ = kept | own | {"EDGEPIPE_BACKEND": "none"}
        self._command = [sys.executable, "-P", "-m", "edgepipe.cli"]

    async def run(self, *words: str) -> str:
        """Run a command; what it printed."""
        done = await self.host.run([*self._command, *words], timeout_s=_STEP_S, env=self._environ)
        assert done.exit_code == 0, done
        return done.stdout

    async def invite(self) -> str:
        """Open an invitation; its code."""
        command = [*self._command, "node", "invite", "--yes"]
        process = await self.host.spawn(command, env=self._environ, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        line = ""
        async with asyncio.timeout(_STEP_S):
            while not (found := re.search(r"\d{4}-\d{4}", line)):
                line = (await process.stdout.readline()).decode()
                assert line, "the invitation ended"
        return found.group()

    async def until(self, wanted: Callable[[dict[str, str]], bool]) -> None:
        """Until the node sees such machines: hosts by name. A node that begins anew answers nothing for a moment."""
        async with asyncio.timeout(_STEP_S):
            while True:
                done = await self.host.run([*self._command, "status", "--json"], timeout_s=_STEP_S, env=self._environ)
                members = json.loads(done.stdout)["members"] if done.exit_code in (0, 8) else []
                alive = [member["node"] for member in members if member["state"] == "alive"]
                if wanted({node["name"]: node["address"].rpartition(":")[0] for node in alive}):
                    return
                await asyncio.sleep(LOOK_S)

    async def pid(self) -> int:
        """The node's process."""
        (lock,) = self.host.folder.rglob("daemon.lock")
        return int(re.findall(r"\d+", lock.read_text())[0])


async def test_a_node_in_the_background_joins_a_cluster_and_follows_its_machine_s_address(lan: LanLab) -> None:
    gamer, attic = (Machine(host) for host in lan.hosts)
    await asyncio.gather(
        *(machine.run("node", "start", "--background", "--name", machine.host.name) for machine in (gamer, attic))
    )
    begun = await attic.pid()
    await attic.run("node", "join", await gamer.invite())
    for machine in (gamer, attic):
        await machine.until(lambda hosts: set(hosts) == {"gamer", "attic"})
    for change in (f"addr del {attic.host.address}/24", "addr add 10.77.0.77/24", "route replace default"):
        done = await attic.host.run(["ip", *change.split(), "dev", "lan0"])
        assert done.exit_code == 0, done
    for machine in (gamer, attic):
        await machine.until(lambda hosts: hosts.get("attic") == "10.77.0.77" and len(hosts) == 2)
    assert await attic.pid() == begun, "it is still the same process"
    for machine in (gamer, attic):
        await machine.run("node", "stop")
