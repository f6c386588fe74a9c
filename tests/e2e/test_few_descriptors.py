"""Case R6 of the fault catalogue: a gateway without descriptors takes nobody new, and goes on once it has some."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from pathlib import Path

import httpx
import psutil

from tests.support.processes.nodes import Nodes


async def health(port: int) -> int:
    async with httpx.AsyncClient(timeout=2, trust_env=False, verify=False) as client:
        return (await client.get(f"http://127.0.0.1:{port}/health")).status_code


async def test_r6_without_descriptors_a_gateway_waits_and_recovers(tmp_path: Path) -> None:
    nodes = Nodes(folder=tmp_path, cluster="few")
    try:
        node = await nodes.start("a", backend="none", discovery=False)
        assert await health(node.http_port) == 200
        (pid,) = [child.pid for child in (await node.status()).children if child.kind == "gateway"]
        gateway = psutil.Process(pid)
        _, hard = gateway.rlimit(resource.RLIMIT_NOFILE)
        gateway.rlimit(resource.RLIMIT_NOFILE, (gateway.num_fds() + 4, hard))
        held = [await asyncio.open_connection("127.0.0.1", node.http_port) for _ in range(12)]
        with contextlib.suppress(httpx.TransportError):
            await health(node.http_port)
        for _, writer in held:
            writer.close()
        gateway.rlimit(resource.RLIMIT_NOFILE, (hard, hard))
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if await health(node.http_port) == 200:
                        break
        assert gateway.is_running()
        assert [child.pid for child in (await node.status()).children if child.kind == "gateway"] == [pid]
    finally:
        await nodes.end()
