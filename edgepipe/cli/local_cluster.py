"""Whole cluster on this machine: ``edgepipe node start`` processes with temporary data directories."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgepipe.cli.admin import connect
from edgepipe.cli.node_process import node_command, reported_error, silent_node
from edgepipe.errors import EdgepipeError
from edgepipe.link.admin_client import Admin

if TYPE_CHECKING:
    from edgepipe.wire.nodes import ClusterStatus

_START_S = 60.0  # the first import of a backend, from a cold disk
_STOP_S = 15.0  # a node gives its children 5 s
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeToStart:
    """One node to start."""

    name: str
    backend: str
    device: str = ""  # empty: the backend's choice
    backend_options: Sequence[str] = ()  # options of this node besides those of all nodes
    http_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedNode:
    """A running node."""

    plan: NodeToStart
    process: Process
    data_dir: Path
    address: str
    http_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """Settings that all nodes share."""

    cluster: str
    nodes: Sequence[NodeToStart]
    models_dir: Path
    threads: int  # threads per node; 0: the backend's choice
    backend_options: Sequence[str] = ()
    link: str = ""  # the network to emulate between them; empty: loopback at full speed


@asynccontextmanager
async def local_cluster(plan: LocalCluster) -> AsyncGenerator[list[StartedNode]]:
    """Start all nodes at once; stop them and remove their files at the end. Raises the first node's error."""
    from edgepipe.cluster.founding import found_local_cluster

    folder = Path(tempfile.mkdtemp(prefix="edgepipe-demo-"))
    try:
        found_local_cluster([folder / node.name for node in plan.nodes], name=plan.cluster)
        async with AsyncExitStack() as stack:
            processes = [await stack.enter_async_context(_process(plan, node, folder)) for node in plan.nodes]
            started: list[StartedNode] = []
            for node, process in zip(plan.nodes, processes, strict=True):
                started.append(await _ready(node, process, folder / node.name))
            try:
                yield started
            finally:
                await asyncio.shield(_stop_serving(started[0]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _stop_serving(node: StartedNode) -> None:
    """Stop all models first, so that no node moves them to another node before it ends."""
    with suppress(EdgepipeError, TimeoutError):
        async with asyncio.timeout(_STOP_S), connect(node.data_dir) as admin:
            await admin.stop_model("")


async def wait_until_joined(admin: Admin, *, num_nodes: int, timeout_s: float) -> ClusterStatus | None:
    """Wait for that many live nodes with a measured device. Return the status, None after ``timeout_s``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                status = await admin.status()
                alive = [member.node for member in status.members if member.state == "alive"]
                measured = [node for node in alive if node.devices and node.devices[0].state != "starting"]
                if len(measured) >= num_nodes:
                    return status
                await asyncio.sleep(_LOOK_S)  # the daemon's socket has no notifications
    return None


@asynccontextmanager
async def _process(plan: LocalCluster, node: NodeToStart, folder: Path) -> AsyncGenerator[Process]:
    log = (folder / f"{node.name}.log").open("wb")
    try:
        process = await asyncio.create_subprocess_exec(
            *_command(plan, node, folder),
            stdin=PIPE,  # the pipe's end tells the node that this process has ended, even by SIGKILL
            stdout=PIPE,
            stderr=log,
            start_new_session=True,  # ^C reaches this process alone, which then stops the nodes in order
        )
    finally:
        log.close()
    try:
        yield process
    finally:
        await asyncio.shield(_end(process))


def _command(plan: LocalCluster, node: NodeToStart, folder: Path) -> list[str]:
    flags = {
        "--name": node.name,
        "--cluster": plan.cluster,
        "--backend": node.backend,
        "--data-dir": str(folder / node.name),
        "--models-dir": str(plan.models_dir),
        "--port": "0",
        "--http-port": str(node.http_port),
        "--interface": "127.0.0.1",
        "--threads": str(plan.threads),
    }
    if node.device:
        flags["--device"] = node.device
    if plan.link:
        flags["--link"] = plan.link
    given = (part for flag in flags.items() for part in flag)
    command = node_command("--end-with-stdin", *given)
    return command + [
        part for option in (*plan.backend_options, *node.backend_options) for part in ("--backend-option", option)
    ]


async def _ready(node: NodeToStart, process: Process, data_dir: Path) -> StartedNode:
    """Wait until the node reports that it is ready. Raises its own error, or ClusterError with its last log line."""
    try:
        async with asyncio.timeout(_START_S):
            document = await _first_document(process)
    except TimeoutError:
        document = {}
    if "address" in document:
        return StartedNode(
            plan=node, process=process, data_dir=data_dir, address=document["address"], http_port=document["http_port"]
        )
    if "error" in document:
        raise reported_error(document, node=node.name)
    raise silent_node(data_dir.with_name(f"{node.name}.log"), node=node.name, next_step="edgepipe --debug demo")


async def _first_document(process: Process) -> dict[str, Any]:
    """Read the JSON document that a node prints when it is ready or failed; empty if it ends without one."""
    assert process.stdout is not None
    text = b""
    while line := await process.stdout.readline():
        text += line
        if line.rstrip() == b"}":
            return json.loads(text)
    return {}


async def _end(process: Process) -> None:
    """Ask the node to stop, then kill its whole process group. Return when the process has ended."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
