"""Machines on a network that has IPv6 only: they meet, and one serves a model over both."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from tests.support.network.lan import LanLab
from tests.support.processes.nodes import Nodes, idle

pytestmark = [pytest.mark.lan, pytest.mark.timeout(180)]


async def test_two_machines_with_ipv6_only_serve_a_model_together(tmp_path: Path) -> None:
    nodes = Nodes(folder=tmp_path, cluster="lan-test")
    try:
        async with LanLab(hosts=["a", "b"]) as lan:
            for index, host in enumerate(lan.hosts):
                for change in ("addr flush dev lan0", f"addr add fd00:77::1{index}/64 dev lan0 nodad"):
                    done = await host.run(["ip", *change.split()])
                    assert done.exit_code == 0, done
            write_model_folder(tmp_path / "tiny", emulated_model_config(num_layers=4))
            ModelStore(tmp_path / "a" / "models").pull(str(tmp_path / "tiny"))
            a, b = await asyncio.gather(*(nodes.start(host.name, host=host) for host in lan.hosts))
            assert a.address.startswith("[fd00:77::10]:")
            await asyncio.gather(*(node.until(lambda status: idle(status, 2)) for node in (a, b)))
            engine = await a.serve("tiny", plan="a:0-1,b:2-3")
            assert [stage.address.rpartition(":")[0] for stage in engine.stages] == ["[fd00:77::10]", "[fd00:77::11]"]
    finally:
        await nodes.end()
