"""Real node daemons for tests: on loopback or on the hosts of a LAN lab, each with a data directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from edgepipe.cli.admin import connect
from edgepipe.cluster.founding import found_local_cluster
from edgepipe.cluster.interfaces import LOOPBACK
from edgepipe.link.admin_client import Admin
from edgepipe.security.mutual_tls import MutualTls
from edgepipe.wire.engines import EngineState, ServeSpec
from edgepipe.wire.nodes import ClusterStatus
from edgepipe.wire.serving import ServeEvent, ServeRequest
from tests.support.cluster.members import member_of
from tests.support.network.lan import LanHost
from tests.support.processes.node_nursery import ForkedNode, fork_node

READY_S = 40.0  # a busy machine starts Python slowly
LOOK_S = 0.02
_MOST_NODES = 8  # nodes of one test


@dataclass(slots=True, kw_only=True)
class Node:
    """A running node."""

    process: asyncio.subprocess.Process | ForkedNode
    data_dir: Path
    address: str
    http_port: int
    node_id: str

    async def status(self) -> ClusterStatus:
        """What it says of the cluster."""
        async with self.admin() as admin:
            return await admin.status()

    def admin(self) -> contextlib.AbstractAsyncContextManager[Admin]:
        """A connection as commands use it."""
        return connect(self.data_dir)

    async def serve(self, model: str, **request: Any) -> EngineState:
        """Serve a model; its engine."""
        (engine,) = (await self.serve_events(model, **request))[-1].engines
        return engine

    async def serve_events(self, model: str, *, options: ServeSpec | None = None, **request: Any) -> list[ServeEvent]:
        """Serve a model; all events."""
        wanted = ServeRequest(options=options or ServeSpec(model=model), **request)
        async with asyncio.timeout(60), self.admin() as admin:
            return [event async for event in admin.serve(wanted)]

    async def stop_model(self, model: str = "") -> list[str]:
        """Stop a model."""
        async with self.admin() as admin:
            return await admin.stop_model(model)

    async def drain(self, *, undo: bool = False, timeout_s: float = 30.0) -> None:
        """Let all work move away, or take work again. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s), self.admin() as admin:
            async for _ in admin.drain(undo=undo):
                pass

    def kill(self) -> None:
        """As a power cut would."""
        self.process.kill()

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to stop; its exit status."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        async with asyncio.timeout(20):
            return await self.process.wait()

    async def until(self, wanted: Callable[[ClusterStatus], bool], *, timeout_s: float = READY_S) -> ClusterStatus:
        """The first status for which ``wanted`` holds."""
        status: ClusterStatus | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while not wanted(status := await self.status()):  # noqa: ASYNC110 - the socket does not notify
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise AssertionError(f"not in {timeout_s:.0f} s; the last status was\n{status}") from None
        return status


@dataclass(slots=True, kw_only=True)
class Nodes:
    """Starts nodes of one cluster in one folder; they end with the test, which calls ``end``."""

    folder: Path
    cluster: str
    main: tuple[str, ...] = ("-m", "edgepipe.daemon")  # what is run
    forks: bool = sys.platform == "linux"  # nodes on loopback from a nursery; else by ``exec``
    spare: list[Path] = field(default_factory=list[Path])  # data directories with identities in the cluster
    started: list[asyncio.subprocess.Process | ForkedNode] = field(
        default_factory=list["asyncio.subprocess.Process | ForkedNode"]
    )
    _drains: list[asyncio.Future[None]] = field(default_factory=list["asyncio.Future[None]"])

    async def start(self, name: str, *, host: LanHost | None = None, **flags: Any) -> Node:
        """Start a node and wait until it is ready. Raises AssertionError with what it said instead."""
        process = await self.spawn(name, host=host, **flags)
        assert process.stdout is not None
        async with asyncio.timeout(READY_S):
            line = await process.stdout.readline()
        if not line:
            assert process.stderr is not None
            raise AssertionError((await process.stderr.read()).decode())
        ready = json.loads(line)
        self._drains.append(asyncio.ensure_future(_drain(process)))
        return Node(
            process=process,
            data_dir=Path(flags.get("data_dir", self.folder / name)),
            address=ready["address"],
            http_port=ready["http_port"],
            node_id=ready["node_id"],
        )

    async def spawn(
        self, name: str, *, host: LanHost | None = None, **flags: Any
    ) -> asyncio.subprocess.Process | ForkedNode:
        """Start a node's process, on a host of a lab if one is given."""
        defaults: dict[str, Any] = {
            "name": name,
            "cluster": self.cluster,
            "port": 0,
            "http_port": 0,
            "interface": LOOPBACK if host is None else None,
            "backend": "emulated",
            "backend_options": "time_factor=0",
            "data_dir": str(self.folder / name),
            "local_key": "auto" if "api_key" in flags else "no",  # whoever has accounts where tests run
        }
        if flags.get("cluster", self.cluster) == self.cluster:
            self._provide_identity(Path(flags.get("data_dir", self.folder / name)))
        settings = {key: value for key, value in {**defaults, **flags}.items() if value is not None}
        environ = {key: value for key, value in os.environ.items() if not key.startswith("EDGEPIPE_")}
        command = [sys.executable, "-P", *self.main, json.dumps(settings)]
        pipe = asyncio.subprocess.PIPE
        env = {**environ, "OMP_NUM_THREADS": "1"}
        if host is not None:
            process = await host.spawn(command, env=env, stdout=pipe, stderr=pipe)
        elif self.forks and self.main[0] == "-m":
            process = await fork_node(self.main[1], command[-1:], env)
        else:
            process = await asyncio.create_subprocess_exec(
                *command, env=env, stdout=pipe, stderr=pipe, start_new_session=True
            )
        self.started.append(process)
        return process

    def _provide_identity(self, data_dir: Path) -> None:
        """Let a new data directory belong to the cluster, as if it had been paired before."""
        if not self.spare and not (pool := self.folder / ".identities").exists():
            self.spare = [pool / str(index) for index in range(_MOST_NODES)]
            found_local_cluster(self.spare, name=self.cluster)
        if not (data_dir / "identity").exists():
            data_dir.mkdir(parents=True, exist_ok=True)
            made = self.spare.pop(0)
            for part in ("identity", "trust"):
                (made / part).rename(data_dir / part)

    def member(self) -> MutualTls:
        """The security of one more node of the cluster, for a test that speaks in its name; start a node first."""
        return member_of(self.spare.pop(0))

    async def end(self) -> None:
        """End what still runs, children first found."""
        for process in self.started:
            if process.returncode is None:
                family = children_of(process.pid)
                process.kill()
                await process.wait()
                for child in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()


def children_of(pid: int) -> list[psutil.Process]:
    """The living child processes of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def idle(status: ClusterStatus, num_nodes: int) -> bool:
    """So many nodes are there, each with a measured device that waits."""
    return len(status.members) == num_nodes and all(
        [device.state for device in member.node.devices] == ["idle"] for member in status.members
    )


async def _drain(process: asyncio.subprocess.Process | ForkedNode) -> None:
    """Read what the node logs, so that it never blocks; its log file has it too."""
    assert process.stderr is not None
    while await process.stderr.read(1 << 16):
        pass


def kv_is_free(status: ClusterStatus) -> bool:
    """Whether no engine runs or queues a sequence, and every KV block came back."""
    return all(
        engine.free_blocks == engine.num_blocks and not engine.running and not engine.waiting
        for engine in status.engines
    )


async def until_answers(http_port: int) -> None:
    """Until a node's gateway has heard of a model."""
    async with asyncio.timeout(10), httpx.AsyncClient(trust_env=False, verify=False) as client:
        while (await client.get(f"http://127.0.0.1:{http_port}/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
