"""What a member that has turned costs the others: the memory and the event loops of two nodes that serve.

A node's pause is what ``Watch`` measures: from a cheap call on its Unix socket to the answer. The rogue and both nodes
share one machine's processors here, which a real rogue does not. So a third node of another cluster, which is not
attacked, is asked in the same way, and its longest pause (or the longest without an attack) is taken off. Both are
printed.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from edgepipe_emulated import emulated_model_config
from figures import Row, below

from edgepipe.cli.admin import connect
from edgepipe.store.store import ModelStore
from edgepipe.weights.emulated_folder import write_model_folder
from tests.support.faults.rogue.attacks import ATTACKS, MODEL
from tests.support.faults.rogue.process import Watch, start_rogue
from tests.support.processes.nodes import Node, Nodes, idle

QUIET_S = 10.0  # measured without an attack, for comparison
PAUSE_S = 0.1
GROWTH_MB = 50
REMOVAL_S = 2.0


def rogue_rows() -> list[Row]:
    """Each attack against two nodes, one of which serves; then the rogue's removal."""
    return asyncio.run(_measure())


async def _measure() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="edgepipe-bench-") as folder:
        nodes = Nodes(folder=Path(folder), cluster="bench")
        try:
            return await _attack(nodes)
        finally:
            await nodes.end()


async def _attack(nodes: Nodes) -> list[Row]:
    for name, model in (("a", "tiny"), ("b", MODEL)):
        write_model_folder(nodes.folder / model, emulated_model_config(num_layers=4))
        ModelStore(nodes.folder / name / "models").pull(str(nodes.folder / model))
    honest = await asyncio.gather(*(nodes.start(name) for name in ("a", "b")))
    await asyncio.gather(*(node.until(lambda status: idle(status, 2)) for node in honest))
    a, b = honest
    rogue_dir, former_owner, owner = nodes.spare[:3]
    async with connect(a.data_dir) as admin:
        for data_dir in (former_owner, owner):
            await admin.promote_peer(data_dir.name)
        await admin.remove_peer(former_owner.name, others="drop")
    await a.serve("tiny", plan="a:0-1,b:2-3")
    bystander = await nodes.start("bystander", cluster="another")
    watch, beside = Watch(honest), Watch([bystander])
    async with start_rogue(rogue_dir, honest, former_owner=former_owner, owner=owner) as rogue:
        await asyncio.gather(*(node.until(lambda status: len(status.members) == 3) for node in honest))
        watching = [asyncio.ensure_future(one.run()) for one in (watch, beside)]
        watch.begin()
        await asyncio.sleep(QUIET_S)
        watch.remember()  # the spare stages have read their libraries by now
        quiet_s = watch.longest_s
        rows = [Row(f"longest pause of a node in {QUIET_S:.0f} s without an attack", quiet_s, "s")]
        for attack in ATTACKS:
            watch.begin()
            beside.begin()
            await rogue.attack(attack)
            rows.append(Row(f"longest pause during {attack}, of a node that is not attacked", beside.longest_s, "s"))
            longer_s = watch.longest_s - max(quiet_s, beside.longest_s)
            rows.append(below("  of the nodes attacked, longer by", max(0.0, longer_s), "s", PAUSE_S))
        rows.append(below("memory grown, of the process that grew most", watch.growth_bytes() / 2**20, "MB", GROWTH_MB))
        for task in watching:
            task.cancel()
        rows.append(
            below("removal of the rogue, known everywhere", await _removal_s(a, b, rogue.node_id), "s", REMOVAL_S)
        )
    return rows


async def _removal_s(a: Node, b: Node, node_id: str) -> float:
    began_s = time.monotonic()
    async with connect(a.data_dir) as admin:
        await admin.remove_peer(node_id, others="drop")
    async with connect(b.data_dir) as admin:
        while any(peer.node_id == node_id for peer in (await admin.peers()).peers):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return time.monotonic() - began_s
