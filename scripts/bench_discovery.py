"""How soon a started node is in every other node's status, and a killed one gone: three hosts of the LAN lab.

Needs root, ``ip`` and ``/dev/net/tun``; says so where they are missing.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from figures import Row, below, print_rows

from edgepipe.cli.admin import connect
from edgepipe.cluster.founding import found_local_cluster
from edgepipe.link.admin_client import Admin
from edgepipe.wire.nodes import ClusterStatus
from tests.support.network.lan import LanHost, LanLab, lan_available

ROUNDS = 20
LOOK_S = 0.02
GIVE_UP_S = 15.0


def discovery_rows(*, rounds: int = ROUNDS) -> list[Row]:
    """p95 of the time until both other nodes show a started node, and until both drop a killed one."""
    reason = lan_available()
    if not reason:
        print(f"discovery was not measured: {reason.reason}", file=sys.stderr)
        return []
    started, seen, gone = asyncio.run(_measure(rounds))
    return [
        below(f"discovery, ready to seen by all, p95 of {rounds}", _p95(seen), "s", 2.0),
        Row("  of it, process start to ready, median", statistics.median(started), "s"),
        below(f"loss, killed to gone everywhere, p95 of {rounds}", _p95(gone), "s", 3.0),
    ]


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[max(0, round(0.95 * len(values)) - 1)]


async def _measure(rounds: int) -> tuple[list[float], list[float], list[float]]:
    started: list[float] = []
    seen: list[float] = []
    gone: list[float] = []
    with tempfile.TemporaryDirectory(prefix="edgepipe-bench-") as folder:
        async with LanLab(hosts=3) as lan:
            first, second, third = lan.hosts
            folders = [Path(folder) / host.name for host in lan.hosts]
            found_local_cluster(folders, name="bench")
            for host, data_dir in ((first, folders[0]), (second, folders[1])):
                await _start(host, data_dir)
            async with connect(folders[0]) as one, connect(folders[1]) as two:
                await _until(one, lambda status: _alive(status, second.name))
                for _ in range(rounds):
                    begin = time.monotonic()
                    process = await _start(third, folders[2])
                    ready = time.monotonic()
                    await _both(one, two, lambda status: _alive(status, third.name))
                    started.append(ready - begin)
                    seen.append(time.monotonic() - ready)
                    process.kill()
                    killed = time.monotonic()
                    await process.wait()
                    await _both(one, two, lambda status: not _alive(status, third.name))
                    gone.append(time.monotonic() - killed)
    return started, seen, gone


async def _start(host: LanHost, data_dir: Path) -> asyncio.subprocess.Process:
    """Start a node on a host and wait until it says that it is ready."""
    command = [sys.executable, "-P", "-m", "edgepipe.cli", "node", "start", "--name", host.name, "--cluster", "bench"]
    command += ["--backend", "none", "--data-dir", str(data_dir), "--json", "--log-level", "warning"]
    process = await host.spawn(command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(GIVE_UP_S):
        while await process.stdout.readline() != b"}\n":
            pass
    return process


async def _both(one: Admin, two: Admin, holds: Callable[[ClusterStatus], bool]) -> None:
    await asyncio.gather(_until(one, holds), _until(two, holds))


async def _until(admin: Admin, holds: Callable[[ClusterStatus], bool]) -> None:
    """Ask until the status is as wanted; a figure is needed here, so looking often is the point."""
    async with asyncio.timeout(GIVE_UP_S):
        while not holds(await admin.status()):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


def _alive(status: ClusterStatus, name: str) -> bool:
    return any(member.node.name == name and member.state == "alive" for member in status.members)


if __name__ == "__main__":
    print_rows("discovery", discovery_rows())
