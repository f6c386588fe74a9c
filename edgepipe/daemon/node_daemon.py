"""One node from its start to its stop: builds its parts, runs them, and takes them down in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edgepipe.cluster.interfaces import Interface
from edgepipe.cluster.trust_keeper import TrustKeeper
from edgepipe.config import Config, Watching
from edgepipe.daemon.cluster_side import NodePresence
from edgepipe.daemon.context import NodeBasis
from edgepipe.daemon.machine.awake import awake_command, keep_awake
from edgepipe.daemon.machine.data_dir import DataDir
from edgepipe.daemon.machine.http_keys import key_file
from edgepipe.daemon.machine.sleep_guard import SleepGuard
from edgepipe.daemon.machine.tidying import keep_tidy
from edgepipe.daemon.model_side import NodeHosting
from edgepipe.daemon.network.own_address import follow_networks
from edgepipe.daemon.node_servers import NodeServers
from edgepipe.daemon.processes.children import Child, Children
from edgepipe.daemon.processes.nursery import Nursery
from edgepipe.daemon.serving.leaving import Leaving
from edgepipe.wire.nodes import NodeState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReady:
    """The facts that a started node reports to its starter."""

    node_id: str
    name: str
    address: str  # HOST:PORT of the daemon
    http_port: int
    socket: Path
    cluster: str
    http_host: str
    key_file: Path | None  # file with the key for HTTP; None: clients need no key
    key_on_loopback: bool  # clients on this computer need a key, too


OnReady = Callable[[NodeReady], None]


class NodeDaemon:
    """One node from start to stop."""

    def __init__(
        self,
        *,
        config: Config,
        data_dir: DataDir,
        trust: TrustKeeper,
        incarnation: int,
        host: str,
        wanted_address: Callable[[list[Interface]], str],
        on_ready: OnReady | None,
        watching: Watching | None = None,
        nursery: Nursery | None = None,
    ) -> None:
        """``wanted_address``: returns the address to listen on, given the machine's present addresses.

        ``watching``: for measuring what watching costs; no setting reaches it.
        """
        self.stopping = asyncio.Event()
        self.identity_taken = False
        self.begins_anew = False
        self.moves_to = ""  # the address that the next node listens on; empty: as the settings say
        self._wanted_address = wanted_address
        self._on_ready = on_ready
        self._leaving: Leaving | None = None  # once it runs
        self._basis = NodeBasis(
            config=config,
            data_dir=data_dir,
            trust=trust,
            incarnation=incarnation,
            host=host,
            watching=watching or Watching(),
            nursery=nursery,
            on_new_child=self._greet,
        )

    @property
    def children(self) -> Children:
        """All child processes of the node."""
        return self._basis.children

    async def run(self) -> None:
        """Start all parts, wait for the stop, take all down. Raises PortInUse, ConfigInvalid."""
        servers = NodeServers(self._basis)
        self._basis.address = servers.address
        try:
            async with asyncio.TaskGroup() as tasks:
                self._build(tasks)
                servers.register(self._presence, self._hosting, self)
                try:
                    await self._work(tasks, servers)
                finally:
                    await self._take_down(servers)
                raise _Stopped  # ends the group's keepers and watchers
        except* _Stopped:
            pass

    def stop(self) -> None:
        """Move stages and engines to other nodes, then stop; a second call stops at once."""
        if self._leaving is not None:
            self._leaving.stop()
        else:
            self.stopping.set()

    async def shut_down(self) -> str:
        """Begin to stop. Return what becomes of this node's work, for the person who stops it."""
        note = await self._leaving.outlook() if self._leaving is not None else ""
        self.stop()
        return note

    def will_sleep(self) -> None:
        """Prepare for sleep: the system announces that the machine is about to sleep."""
        if self._leaving is not None:
            self._leaving.sleep()

    def _build(self, tasks: asyncio.TaskGroup) -> None:
        self._presence = NodePresence(self._basis, self)
        self._hosting = NodeHosting(self._basis, self._presence, tasks, self)
        self._sleep = SleepGuard(self._basis.clock, tell=self._tell_sleep, on_wake=self._wake)
        self._leaving = Leaving(
            drain=self._hosting.drain,
            stopping=self.stopping,
            tasks=tasks,
            announce_sleep=self._sleep.announce,
            local=self._presence.local,
        )
        self._presence.local.add_part(self._tell_leaving)

    async def _work(self, tasks: asyncio.TaskGroup, servers: NodeServers) -> None:
        basis, local = self._basis, self._presence.local
        await servers.start_inside()
        await self._hosting.start()
        local.refresh()
        await servers.start()
        self._hosting.keep()
        hosting = self._hosting.holds_something
        for name, watching in (
            ("trust-file", basis.trust.run()),
            ("handshakes", basis.handshakes.run()),
            ("hangs", basis.children.watch_hangs()),
            ("networks", self._follow_networks()),
            ("awake", keep_awake(hosting, local.changes.watch, awake_command())),
            ("sleep", self._sleep.run()),
            ("tidying", keep_tidy()),
        ):
            tasks.create_task(watching, name=name)
        await self._presence.start(tasks)
        self._tell_ready()
        await self.stopping.wait()

    async def _take_down(self, servers: NodeServers) -> None:
        """Leave first, so that no node waits for this one; then end engines, stages, gateway, servers, announcement."""
        self.stopping.set()
        logger.info("node stops node=%s", self._basis.node_id)
        await self._presence.heartbeats.leave()
        await self._hosting.stop()
        await servers.stop()
        await self._presence.stop()
        servers.forget()

    def _tell_ready(self) -> None:
        basis, config = self._basis, self._basis.config
        logger.info("node ready name=%s node=%s address=%s", config.name, basis.node_id, basis.address)
        if self._on_ready is not None:
            self._on_ready(
                NodeReady(
                    node_id=basis.node_id,
                    name=config.name,
                    address=basis.address,
                    http_port=self._hosting.gateway.http_port,
                    socket=basis.data_dir.socket,
                    cluster=basis.hello.cluster_name,
                    http_host=config.http_host,
                    key_file=key_file(basis.data_dir.path) if basis.http_keys.keys else None,
                    key_on_loopback=basis.http_keys.on_loopback,
                )
            )

    def _greet(self, child: Child) -> None:
        self._presence.introductions.greet(child)

    def _tell_leaving(self, state: NodeState) -> NodeState:
        if self._leaving is None:
            return state
        return replace(state, sleeps_soon=self._leaving.sleeps_soon, leaving=self._leaving.winding_down)

    async def _follow_networks(self) -> None:
        presence = self._presence
        await follow_networks(
            self._basis.host,
            named=bool(self._basis.config.interface),
            wanted_address=self._wanted_address,
            contacts=presence.contacts,
            listen_on=presence.listen_on,
            move=self._move,
        )

    def _move(self, host: str) -> None:
        self.moves_to = host
        self.begin_anew()

    def begin_anew(self) -> None:
        """End this node so that ``node.run`` starts it again: with another identity, cluster or address."""
        self.begins_anew = True
        self.stopping.set()

    def ends(self) -> bool:
        """Return whether the node was asked to stop; it may still be handing work over."""
        return self.stopping.is_set() or (self._leaving is not None and self._leaving.winding_down)

    def lost(self, node_id: str) -> None:
        """Note that a member is dead or has left."""
        self._hosting.device.orphaned_by(node_id)

    def yield_identity(self, address: str) -> None:
        """Stop this node: another node has its id."""
        logger.warning("another node has the id of this one: node=%s address=%s", self._basis.node_id, address)
        self.identity_taken = True
        self.stopping.set()

    async def _wake(self, slept_s: float) -> None:
        """Pause all stages after sleep: each resumes when its engine confirms that its epoch still counts."""
        if self._leaving is not None:
            self._leaving.stays()
        self._hosting.device.pause()
        self._hosting.device.resume(self._presence.peers.engine_epoch)

    def _tell_sleep(self, sleeping: bool) -> None:
        self._presence.heartbeats.sleeps(sleeping=sleeping)
        if not sleeping and self._leaving is not None:
            self._leaving.stays()


class _Stopped(Exception):
    """The node was asked to stop; never leaves ``NodeDaemon.run``."""
