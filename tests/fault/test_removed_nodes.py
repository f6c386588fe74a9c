"""A node is removed from the cluster in mid-sentence: its connections are cut, what it computed goes on elsewhere."""

from __future__ import annotations

import asyncio

from edgepipe.cli.admin import connect
from edgepipe.telemetry.audit import AuditKind, read_audit
from tests.support.processes.nodes import Nodes, kv_is_free
from tests.support.processes.streams import PROMPT, Stream, answers, slow_cluster


async def test_a_removed_node_computes_nothing_more_and_streams_go_on_without_it(nodes: Nodes) -> None:
    a, b = await slow_cluster(nodes, "a", "b")
    await a.serve("tiny", plan="a:0-2,b:3-5")
    await answers(a)
    stream = Stream(PROMPT, 120)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.run(a.http_port))
        await stream.has(20)
        async with connect(a.data_dir) as admin:
            await admin.remove_peer(b.node_id, others="")
        async with asyncio.timeout(2):
            await b.until(lambda status: len(status.members) == 1, timeout_s=2)
    stream.assert_right()
    status = await a.until(kv_is_free)
    assert [stage.node_name for stage in status.engines[0].stages] == ["a"]
    assert [member.node.name for member in status.members] == ["a"]
    kinds = {entry.kind for entry in read_audit(a.data_dir / "audit.log", last=100)}
    assert AuditKind.REMOVED in kinds
