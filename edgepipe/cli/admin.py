"""Finding this machine's node, for verbs that talk with it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio

from edgepipe.daemon.machine.data_dir import home_name, socket_path
from edgepipe.errors import ConnectTimeout, EdgepipeError, NodeUnreachable, PeerClosed
from edgepipe.interrupts import run_interruptible
from edgepipe.link.admin_client import Admin, admin_at
from edgepipe.link.channels import sent_error
from edgepipe.wire.nodes import ClusterStatus

T = TypeVar("T")


@asynccontextmanager
async def connect(data_dir: Path) -> AsyncGenerator[Admin]:
    """Connect to the node of ``data_dir``. Raises NodeUnreachable, also inside the block, when no node answers."""
    socket = socket_path(data_dir)
    if not socket.exists():
        raise no_node(data_dir)
    try:
        async with admin_at(str(socket), role="cli") as admin:
            yield admin
    except (ConnectTimeout, PeerClosed) as exc:
        cause = exc.__cause__
        if isinstance(cause, grpc.aio.AioRpcError) and sent_error(cause) is None:
            raise no_node(data_dir) from exc
        raise  # the node answered: another machine is unreachable


async def status_if_running(data_dir: Path) -> ClusterStatus | None:
    """Return the cluster as the node of ``data_dir`` sees it, None if no node answers."""
    try:
        async with connect(data_dir) as admin:
            return await admin.status()
    except EdgepipeError:
        return None


def no_node(data_dir: Path) -> NodeUnreachable:
    """Build the error for a data directory without a running node."""
    fact = f"no answer at {socket_path(data_dir)}"
    if name := home_name(data_dir):
        problem = f"this machine belongs to '{name}', but its node does not run"
        return NodeUnreachable(problem, fact=fact, next_step="edgepipe node start")
    return NodeUnreachable(
        "no edgepipe node runs on this machine",
        fact=fact,
        next_step="edgepipe node start    (to try edgepipe first: edgepipe demo)",
    )


def ask_node(data_dir: Path, ask: Callable[[Admin], Coroutine[Any, Any, T]]) -> T:
    """Do a verb's whole talk with the node of ``data_dir``. Raises like ``connect``, and what ``ask`` raises."""

    async def work() -> T:
        async with connect(data_dir) as admin:
            return await ask(admin)

    return run_interruptible(work())


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a verb's asynchronous part."""
    return run_interruptible(work)
