"""The main function of a node: from settings to a running daemon, signals, and a change of identity."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Generator
from dataclasses import replace

import uvloop

from edgepipe.cluster.founding import begin_anew, open_trust
from edgepipe.cluster.interfaces import Interface, choose_address, interfaces, routed_address
from edgepipe.cluster.private_files import writable
from edgepipe.config import Config, Watching
from edgepipe.daemon.machine.backends import check_device, choose_backend
from edgepipe.daemon.machine.data_dir import DataDir, forget_name, log_path
from edgepipe.daemon.node_daemon import NodeDaemon, NodeReady, OnReady
from edgepipe.daemon.processes.nursery import Nursery, start_nursery
from edgepipe.errors import ConfigInvalid, EdgepipeError, PortInUse
from edgepipe.system import SystemClock, raise_descriptor_limit
from edgepipe.telemetry.audit import AuditKind
from edgepipe.telemetry.log import set_up_logging

__all__ = ["NodeReady", "OnReady", "run", "start_nursery"]

logger = logging.getLogger(__name__)

_AGAIN_S = 2.0  # pause between attempts of a node that has run already to find its address


def run(
    config: Config,
    on_ready: OnReady | None = None,
    nursery: Nursery | None = None,
    *,
    watching: Watching | None = None,
) -> None:
    """Run a node in the foreground until SIGINT, SIGTERM or ``node stop``.

    The node first moves stages and engines to other nodes, for at most 30 s. A second signal skips that; a signal while
    the node stops ends it at once.

    ``nursery`` forks child processes, and ends with the node. ``watching`` is for measuring the cost of watching; no
    setting leads to it.
    Raises ConfigInvalid (settings, or a second node on the data directory), FeatureMissing and PortInUse.
    """
    check_device(config.device)
    choose_backend(config.backend)  # nothing exists yet: a wrong backend leaves nothing behind
    _address(config, interfaces())  # the same for a missing address
    raise_descriptor_limit()
    data_dir = DataDir(config.data_dir)
    try:
        with writable(data_dir.path):
            set_up_logging(level=config.log_level, file=log_path(config.data_dir))
        gc.freeze()  # modules live for ever: collections then check only later objects
        uvloop.run(_run_until_stopped(config, data_dir, on_ready, nursery, watching))
    finally:
        if nursery is not None:
            nursery.end()
        data_dir.close()


def _address(config: Config, available: list[Interface]) -> str:
    """Return the address to listen on. Raises ConfigInvalid."""
    return choose_address(
        interface=config.interface,
        available=available,
        routed=routed_address(),
    )


async def _run_until_stopped(
    config: Config,
    data_dir: DataDir,
    on_ready: OnReady | None,
    nursery: Nursery | None,
    watching: Watching | None,
) -> None:
    """Run nodes until one was stopped. A new node replaces the present one when another node has its identity, after it
    joined another cluster, and after the machine's address changed."""
    clock, cluster, running, moves_to = SystemClock(), config.cluster, False, ""
    while True:
        with writable(data_dir.path):
            trust = open_trust(data_dir.path, cluster=cluster, node_name=config.name, clock=clock)
        name = trust.store.name_for(trust.node_id, config.name)
        if name != config.name:
            logger.warning("another machine of the cluster is called %s: this node is %s", config.name, name)
        node = NodeDaemon(
            config=replace(config, name=name),
            data_dir=data_dir,
            trust=trust,
            incarnation=data_dir.next_incarnation(clock),
            host=moves_to or await _host(config, waits=running),
            wanted_address=lambda available: _address(config, available),
            on_ready=on_ready,
            watching=watching,
            nursery=nursery,
        )
        try:
            with _signals(node):
                await _single(node.run())
        except PortInUse as error:
            if not running:
                raise
            logger.warning("the node cannot listen on its new address and tries again: %s", error)
            moves_to = ""
            await asyncio.sleep(_AGAIN_S)
            continue
        running, cluster, moves_to = True, "", node.moves_to  # the name was meant for the first cluster
        if node.identity_taken:
            trust.audit.record(AuditKind.IDENTITY_COPIED, who=trust.node_id)
            begin_anew(data_dir.path)
            forget_name(data_dir.path)
            logger.warning("this data directory is a copy of another node's: the node begins anew, unpaired")
        elif not node.begins_anew:
            return


async def _host(config: Config, *, waits: bool) -> str:
    """Return the address to listen on. ``waits``: until the named interface is there, as a network that changes may be
    away for a while. Raises ConfigInvalid."""
    while True:
        try:
            return _address(config, interfaces())
        except ConfigInvalid as error:
            if not waits:
                raise
            logger.warning("the node waits for its network: %s", error)
        await asyncio.sleep(_AGAIN_S)


async def _single(running: Awaitable[None]) -> None:
    """Unwrap the one EdgepipeError that a task group wrapped."""
    try:
        await running
    except BaseExceptionGroup as group:
        error, rest = group.split(EdgepipeError)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if rest is None and error is not None:
            raise error from group
        raise


@contextlib.contextmanager
def _signals(node: NodeDaemon) -> Generator[None]:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if node.stopping.is_set():
            node.children.kill_all()
            os._exit(130)
        node.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGUSR1, node.will_sleep)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            loop.remove_signal_handler(number)
