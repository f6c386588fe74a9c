"""Real daemons on three hosts of the LAN lab: multicast discovery, cut cables, a model over two of them."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from edgepipe_emulated import emulated_model_config

from edgepipe.config import CHILD_PORTS
from edgepipe.errors import ConnectTimeout
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from edgepipe.wire.engines import EngineState, ServeSpec
from edgepipe.wire.nodes import ClusterStatus
from tests.support.network.lan import Finished, LanHost, LanLab
from tests.support.processes.nodes import Node, Nodes, idle

pytestmark = [pytest.mark.lan, pytest.mark.timeout(120)]
PORT = 7117


@pytest.fixture
async def lan() -> AsyncIterator[LanLab]:
    async with LanLab(hosts=3) as lab:
        lab.shape(delay_s=0.001)
        yield lab


@pytest.fixture
async def nodes(tmp_path: Path, lan: LanLab) -> AsyncIterator[Nodes]:
    made = Nodes(folder=tmp_path, cluster="lan-test")
    yield made
    await made.end()


async def start_all(nodes: Nodes, lan: LanLab, **flags: object) -> list[Node]:
    starting = (nodes.start(host.name, host=host, **flags) for host in lan.hosts)
    return list(await asyncio.gather(*starting))


def names(status: ClusterStatus) -> set[str]:
    return {member.node.name for member in status.members if member.state == "alive"}


async def all_see(watchers: list[Node], wanted: set[str]) -> None:
    await asyncio.gather(*(node.until(lambda status: names(status) == wanted, timeout_s=30) for node in watchers))


async def test_nodes_meet_by_multicast_part_at_a_cut_cable_follow_a_new_address_and_lose_the_killed(
    nodes: Nodes, lan: LanLab
) -> None:
    a, b, c = await start_all(nodes, lan, backend="none")
    assert [node.address.rpartition(":")[0] for node in (a, b, c)] == [host.address for host in lan.hosts]
    await all_see([a, b, c], {"a", "b", "c"})
    lan.cut("c")
    await all_see([a, b], {"a", "b"})
    await all_see([c], {"c"})
    lan.heal("c")
    await all_see([a, b, c], {"a", "b", "c"})
    moving, new = lan.hosts[2], "10.77.0.77"
    for change in (f"addr del {moving.address}/24", f"addr add {new}/24", "route replace default"):
        await moving.run(["ip", *change.split(), "dev", "lan0"])
    for node in (a, b):
        await node.until(lambda status: any(m.node.address.startswith(f"{new}:") for m in status.members), timeout_s=30)
    await all_see([a, b], {"a", "b", "c"})
    c.kill()
    await all_see([a, b], {"a", "b"})


@pytest.mark.long
async def test_a_model_is_served_over_two_hosts_and_the_third_takes_a_lost_one_s_place(
    nodes: Nodes, lan: LanLab
) -> None:
    """Short forms: ``test_ipv6.py``, and the pulled cable in ``tests/fault/test_chaos_lan.py``."""
    source = nodes.folder / "tiny"
    write_model_folder(source, emulated_model_config(num_layers=4))
    ModelStore(nodes.folder / "a" / "models").pull(str(source))
    a, b, c = await start_all(nodes, lan)
    await asyncio.gather(*(node.until(lambda status: idle(status, 3)) for node in (a, b, c)))
    engine = await c.serve("tiny", plan="a:0-1,b:2-3")
    assert {stage.node_name: stage.address.rpartition(":")[0] for stage in engine.stages} == {
        "a": lan.host("a").address,
        "b": lan.host("b").address,
    }
    lan.cut("b")
    await c.until(lambda status: "b" not in (served_by(status) or ["b"]))
    lan.heal("b")
    await b.until(lambda status: "b" not in (served_by(status) or ["b"]))


def served_by(status: ClusterStatus) -> list[str]:
    """Names of the nodes that hold the one ready model; none while there is none, or more."""
    ready = [engine for engine in status.engines if engine.state == "ready"]
    return [stage.node_name for stage in ready[0].stages] if len(ready) == 1 else []


async def block(lan: LanLab, source: str, target: str) -> None:
    """The target's firewall swallows what comes from the source to the ports of its stages, engine and gateway."""
    await swallow(lan, target, f"ip saddr {lan.host(source).address}")


async def swallow(lan: LanLab, target: str, which: str) -> None:
    """The target's firewall swallows ``which`` packets to the ports of its stages, engine and gateway."""
    ports = f"{PORT + 1}-{PORT + CHILD_PORTS}"
    rules = (
        "add table ip lab",
        "add chain ip lab input { type filter hook input priority 0 ; }",
        f"add rule ip lab input {which} tcp dport {ports} drop",
    )
    finished = await lan.host(target).run(["nft", "\n".join(rules)])
    assert finished.exit_code == 0, finished


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nft") is None, reason="nft makes the firewall")
async def test_stages_come_in_another_order_where_a_firewall_is_between_two_of_them(nodes: Nodes, lan: LanLab) -> None:
    source = nodes.folder / "tiny"
    write_model_folder(source, emulated_model_config(num_layers=6))
    for name in "abc":
        ModelStore(nodes.folder / name / "models").pull(str(source))
    all_three = await start_all(nodes, lan, port=PORT)
    a = all_three[0]
    await asyncio.gather(*(node.until(lambda status: idle(status, 3)) for node in all_three))
    options = ServeSpec(model="tiny", first="a", num_nodes=3)
    _, second, third = order(await a.serve("tiny", options=options))
    await a.stop_model()
    await a.until(lambda status: idle(status, 3))
    await block(lan, second, third)
    events = await a.serve_events("tiny", options=options)
    assert any(f"{second} does not reach {third}" in event.message for event in events)
    assert order(events[-1].engines[0]) == ["a", third, second]
    assert order(await a.serve("tiny", rebalance=True)) == ["a", third, second], "who places anew knows of it"
    await a.stop_model()
    await a.until(lambda status: idle(status, 3))
    await block(lan, third, second)
    with pytest.raises(ConnectTimeout, match="does not reach") as caught:
        await a.serve("tiny", options=options)
    assert f"let TCP ports {PORT + 1}-{PORT + CHILD_PORTS} through the firewall" in caught.value.next_step
    await a.until(lambda status: idle(status, 3))
    await block(lan, "a", second)
    await block(lan, "a", third)
    alone = await a.serve("tiny", options=replace(options, num_nodes=0))
    assert order(alone) == ["a"], "a node whose ports are shut is left out"


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft makes the firewall")
@pytest.mark.long
@pytest.mark.parametrize("which", ["iifname != lo", ""])
async def test_a_machine_whose_ports_are_shut_is_left_out_and_named(nodes: Nodes, lan: LanLab, which: str) -> None:
    """Its own processes may reach it (``iifname != lo``) or not; it would be the best place for the model."""
    source = nodes.folder / "tiny"
    write_model_folder(source, emulated_model_config(num_layers=6))
    for name in "ab":
        ModelStore(nodes.folder / name / "models").pull(str(source))
    devices = {"a": ("m1", 20), "b": ("rtx4090", 1)}  # by data sheet and by measurement, b is the faster by far
    a, b = await asyncio.gather(
        *(
            nodes.start(name, host=lan.host(name), port=PORT, device=device, backend_options=f"time_factor={factor}")
            for name, (device, factor) in devices.items()
        )
    )
    await asyncio.gather(*(node.until(lambda status: idle(status, 2)) for node in (a, b)))
    await swallow(lan, "b", which)
    events = await a.serve_events("tiny")
    assert order(events[-1].engines[0]) == ["a"]
    (note,) = (event.note for event in events if event.note)
    assert note.startswith("b is left out: ")
    assert f"let TCP ports {PORT + 1}-{PORT + CHILD_PORTS} through the firewall of b" in note
    await a.stop_model()
    await a.until(lambda status: idle(status, 2))
    done = await edgepipe(lan.host("a"), "serve", "tiny", "--nodes", "2", "--data-dir", str(a.data_dir))
    assert done.exit_code == 3, done
    assert "does not reach" in done.stderr.splitlines()[0]
    assert f"let TCP ports {PORT + 1}-{PORT + CHILD_PORTS} through the firewall of b" in done.stderr


async def edgepipe(host: LanHost, *args: str) -> Finished:
    return await host.run([sys.executable, "-P", "-m", "edgepipe.cli", *args])


def order(engine: EngineState | None) -> list[str]:
    assert engine is not None
    return [stage.node_name for stage in engine.stages]
