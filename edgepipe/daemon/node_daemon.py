"""One node: its objects built, run, and taken down in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from edgepipe.cluster.address_watch import AddressWatch
from edgepipe.cluster.discovery import Announcement, Discovery
from edgepipe.cluster.heartbeats import Heartbeats
from edgepipe.cluster.interfaces import Interface, interfaces, is_wireless
from edgepipe.cluster.membership import MemberChanged, Membership, MembershipLimits, MemberStatus
from edgepipe.cluster.trust_keeper import TrustKeeper
from edgepipe.config import Config, Timeouts
from edgepipe.daemon.awake import awake_command, keep_awake
from edgepipe.daemon.backends import choose_backend
from edgepipe.daemon.child_settings import ChildSettingsMaker
from edgepipe.daemon.children import Child, Children
from edgepipe.daemon.cluster_views import ClusterViews
from edgepipe.daemon.data_dir import DataDir
from edgepipe.daemon.device import DeviceHost
from edgepipe.daemon.drain import Drain
from edgepipe.daemon.engine_keeper import EngineKeeper
from edgepipe.daemon.engines import EngineHost
from edgepipe.daemon.gateway_keeper import GatewayKeeper
from edgepipe.daemon.guests import Guests
from edgepipe.daemon.handshakes import RefusedHandshakes
from edgepipe.daemon.http_keys import key_file, keys_in_force
from edgepipe.daemon.introductions import Introductions
from edgepipe.daemon.layer_profiles import LayerProfiles
from edgepipe.daemon.leaving import Leaving
from edgepipe.daemon.link_probes import LinkProbes, ProbesService
from edgepipe.daemon.local_node import LocalNode
from edgepipe.daemon.log_tail import LogTail
from edgepipe.daemon.models import Models
from edgepipe.daemon.neighbours import Neighbours
from edgepipe.daemon.pairing_host import PairingHost
from edgepipe.daemon.peers import Peers
from edgepipe.daemon.remembered import RememberedAddresses
from edgepipe.daemon.replan_watch import ReplanWatch
from edgepipe.daemon.replanning import Replanner
from edgepipe.daemon.replication import Replication
from edgepipe.daemon.serve_book import ServeBook
from edgepipe.daemon.services import AdminService, ChildrenService, NodeService, WeightsService, admit_to
from edgepipe.daemon.serving import Serving
from edgepipe.daemon.sleep_guard import SleepGuard
from edgepipe.daemon.survey import Surveyor
from edgepipe.daemon.system import RandomIds, SystemClock
from edgepipe.daemon.trust_service import TrustService
from edgepipe.errors import ConfigInvalid
from edgepipe.link.access import Kind
from edgepipe.link.channels import bind, make_server, make_unix_server
from edgepipe.link.security import Denial, MutualTls, Plaintext, Security
from edgepipe.link.shaped import make_network
from edgepipe.telemetry.audit import AuditKind
from edgepipe.wire.common import make_hello
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.wire.v1 import node_pb2_grpc, trust_pb2_grpc

logger = logging.getLogger(__name__)

_ADDRESS_S = 2.0  # between two looks at the machine's addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReady:
    """What a started node tells whoever started it."""

    node_id: str
    name: str
    address: str  # HOST:PORT of the daemon
    http_port: int
    socket: Path
    cluster: str
    http_host: str
    key_file: Path | None  # of HTTP; None: no key is asked for


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
        encrypted: bool = True,
    ) -> None:
        """``encrypted``: False to measure what encryption costs; no setting reaches it."""
        self.stopping = asyncio.Event()
        self.identity_taken = False
        self.begins_anew = False
        self._config = config
        self._data_dir = data_dir
        self._trust = trust
        self._node_id, self._cluster = trust.node_id, trust.store
        self._incarnation = incarnation
        self._discovery: Discovery | None = None
        self._leaving: Leaving | None = None  # once it runs
        self._host = host
        self._wanted_address = wanted_address  # of the machine's addresses as they are now
        self._on_ready = on_ready
        self._timeouts = _timeouts_for(host)
        self._http_keys = keys_in_force(config, data_dir.path)
        self._clock, self._ids = SystemClock(), RandomIds()
        self._hello = make_hello(
            role="node",
            node_id=self._node_id,
            node_name=config.name,
            cluster_id=self._cluster.cluster_id,
            cluster_name=self._cluster.cluster_name,
        )
        self._tls = MutualTls(trust.key_pair, callers=(Kind.NODE, Kind.ENGINE), on_denied=self._on_denied)
        self._security: Security = self._tls if encrypted else Plaintext()
        self.children = Children(
            self._timeouts,
            self._clock,
            on_new=self._greet,
            on_denied=self._on_child_denied,
        )

        self._handshakes = RefusedHandshakes(tls=self._tls, children=self.children, audit=trust.audit)
        self._settings = ChildSettingsMaker(
            config=config,
            hello=self._hello,
            host=host,
            address=lambda: self._address,
            socket=data_dir.socket,
            http_keys=self._http_keys,
            encrypted=encrypted,
            ids=self._ids,
            children=self.children,
        )

    def _greet(self, child: Child) -> None:
        self._introductions.greet(child)

    def _on_child_denied(self, denied: pb.DeniedCall) -> None:
        self._on_denied(Denial(who=denied.who, what=denied.what))

    async def run(self) -> None:
        """Start everything, wait for the stop, take everything down. Raises PortInUse, ConfigInvalid."""
        server = make_server(self._security)
        unix_server = make_unix_server(str(self._data_dir.socket))
        port = bind(server, self._security, host=self._host, port=self._config.port)
        self._address = f"{self._host}:{port}"
        try:
            async with asyncio.TaskGroup() as tasks:
                self._build(tasks)
                self._register(server, unix_server)
                try:
                    await self._work(tasks, server, unix_server)
                finally:
                    await self._take_down(server, unix_server)
                raise _Stopped  # ends the group's keepers and watchers
        except* _Stopped:
            pass

    def _build(self, tasks: asyncio.TaskGroup) -> None:
        config, timeouts = self._config, self._timeouts
        self._membership = Membership(
            node_id=self._node_id,
            incarnation=self._incarnation,
            address=self._address,
            limits=MembershipLimits(
                refused_s=timeouts.refused_s,
                dead_min_s=timeouts.dead_min_s,
                dead_max_s=timeouts.dead_max_s,
                forget_s=timeouts.forget_s,
                tick_s=timeouts.tick_s,
            ),
        )
        self._local = LocalNode(
            node_id=self._node_id,
            incarnation=self._incarnation,
            name=config.name,
            address=self._address,
            on_change=lambda: self._introductions.refresh(),
            announce=lambda: self._heartbeats.announce(),
        )
        self._introductions = Introductions(
            trust=self._trust,
            security=self._tls,
            own=lambda: self._local.state,
            others=lambda: (member.node for member in self._membership.reachable()),
            children=self.children,
        )
        self._heartbeats = Heartbeats(
            membership=self._membership,
            hello=self._hello,
            trust=self._trust,
            security=self._security,
            state=lambda: self._local.state,
            clock=self._clock,
            timeouts=timeouts,
            on_change=self._on_member,
            on_identity_taken=self._on_identity_taken,
        )
        self._peers = Peers(
            own=lambda: self._local.state,
            membership=self._membership,
            hello=self._hello,
            security=self._security,
            timeouts=timeouts,
        )
        self._remembered = RememberedAddresses(self._data_dir.path / "addresses.json")
        self._neighbours = Neighbours(
            trust=self._trust, dial=lambda address, node_id: self._heartbeats.found(address, node_id=node_id)
        )
        self._sleep = SleepGuard(self._clock, tell=self._tell_sleep, on_wake=self._wake)
        self._build_parts(tasks)

    def _build_parts(self, tasks: asyncio.TaskGroup) -> None:
        config = self._config
        self._guests = Guests(self._local.refresh)
        self._layers = LayerProfiles(self._data_dir.path / "layers.json")
        self._network = make_network(config.link, self._clock)
        self._links = LinkProbes(peers=self._peers, clock=self._clock, timeouts=self._timeouts, network=self._network)
        self._models = Models(
            models_dir=config.models_dir, peers=self._peers, timeouts=self._timeouts, on_change=self._local.refresh
        )
        self._views = ClusterViews(
            local=self._local,
            membership=self._membership,
            heartbeats=self._heartbeats,
            peers=self._peers,
            models=self._models,
            trust=self._trust,
            neighbours=self._neighbours,
            children=self.children,
            handshakes=self._handshakes,
            discovery_problem=lambda: self._discovery.problem if self._discovery else "it is switched off",
            data_dir=self._data_dir.path,
            clock=self._clock,
        )
        self._device = DeviceHost(
            node_name=config.name,
            backend=choose_backend(config.backend),
            children=self.children,
            new_settings=lambda: self._settings.make("stage"),
            introduce=self._introductions.greet,
            memory_limit_bytes=config.memory_limit_bytes,
            timeouts=self._timeouts,
            tasks=tasks,
            has_engine=self._has_engine,
            on_change=self._local.refresh,
            layers=self._layers,
        )
        surveyor = Surveyor(self._peers)
        replanner = Replanner(peers=self._peers, models=self._models, surveyor=surveyor)
        self._engines = EngineHost(
            children=self.children,
            new_settings=lambda: self._settings.make("engine"),
            peers=self._peers,
            replanner=replanner,
            changes=self._local.changes.watch,
            spread=self._heartbeats.spread,
            tasks=tasks,
            own_highest=self._own_highest,
            on_change=lambda urgent: self._local.refresh(urgent=urgent),
        )
        self._replan_watch = ReplanWatch(
            engines=self._engines,
            replanner=replanner,
            clock=self._clock,
            changes=self._local.changes.watch,
            tasks=tasks,
        )
        self._replication = Replication(
            peers=self._peers,
            models=self._models,
            engines=self._engines,
            copies=config.copies,
            changes=self._local.changes.watch,
        )
        self._book = ServeBook(self._data_dir.path / "served.bin", on_change=self._local.refresh)
        self._drain = Drain(
            device=self._device,
            engines=self._engines,
            peers=self._peers,
            replanner=replanner,
            book=self._book,
            has_engine=self._has_engine,
            changes=self._local.changes.watch,
            on_change=self._local.refresh,
        )
        self._leaving = Leaving(
            drain=self._drain,
            stopping=self.stopping,
            tasks=tasks,
            announce_sleep=self._sleep.announce,
            on_change=self._local.refresh,
        )
        self._keeper = EngineKeeper(
            book=self._book,
            engines=self._engines,
            models=self._models,
            peers=self._peers,
            clock=self._clock,
            timeouts=self._timeouts,
            changes=self._local.changes.watch,
            tasks=tasks,
        )
        self._gateway = GatewayKeeper(
            children=self.children,
            new_settings=lambda http_port: self._settings.make("gateway", http_port=http_port),
            http_port=config.http_port,
            view=self._views.for_gateway,
            changes=self._local.changes.watch,
            tasks=tasks,
            on_change=self._local.refresh,
        )
        self._serving = Serving(
            peers=self._peers,
            models=self._models,
            ids=self._ids,
            changes=self._local.changes.watch,
            gateway_knows=self._gateway.knows,
            refused=self._heartbeats.refusals.values,
            book=self._book,
            surveyor=surveyor,
            tasks=tasks,
        )
        self._local.add_part(self._fill_state)

    def _fill_state(self, state: pb.NodeState) -> None:
        state.devices.extend(self._device.state())
        state.engines.extend(self._engines.states())
        state.models.extend(self._models.on_disk())
        state.transfers.extend(self._models.transfers())
        state.disk_free_bytes = self._models.free_bytes
        state.gateways.extend([self._gateway.certificate, *self._guests.certificates()])
        state.serves.extend(self._book.records())
        state.draining = self._drain.active
        state.sleeps_soon = self._leaving is not None and self._leaving.sleeps_soon
        state.http_port = self._gateway.http_port
        state.silent.extend(one.node.node_id for one in self._membership.absent() if one.status is MemberStatus.DEAD)

    def _has_engine(self, pipeline_id: str) -> bool:
        return any(engine.pipeline_id == pipeline_id for _, engine in self._serving.engines())

    def _own_highest(self, pipeline_id: str) -> int:
        epoch = self._device.epoch_of(pipeline_id)
        return epoch.counter if epoch is not None else 0

    def _hosts(self) -> bool:
        return any(device.reserved_bytes for device in self._device.state()) or bool(self._engines.states())

    def _register(self, server: grpc.aio.Server, unix_server: grpc.aio.Server) -> None:
        admit = admit_to(self._hello)
        node = NodeService(
            admit=admit,
            security=self._security,
            heartbeats=self._heartbeats,
            device=self._device,
            engines=self._engines,
            models=self._models,
            peers=self._peers,
            book=self._book,
            links=self._links,
            replication=self._replication,
        )
        self._logs = LogTail()
        logging.getLogger().addHandler(self._logs)
        admin = AdminService(
            serving=self._serving,
            status=self._views.status,
            logs=self._logs,
            shut_down=self.stop,
            refresh_models=self._models.rescan,
            guests=self._guests,
            drain=self._drain,
            replication=self._replication,
            spread=self._spread,
        )
        node_pb2_grpc.add_NodeServicer_to_server(node, server)
        node_pb2_grpc.add_ProbesServicer_to_server(ProbesService(self._network), server)
        node_pb2_grpc.add_WeightsServicer_to_server(WeightsService(admit=admit, models=self._models), server)
        node_pb2_grpc.add_ChildrenServicer_to_server(ChildrenService(self.children), unix_server)
        node_pb2_grpc.add_AdminServicer_to_server(admin, unix_server)
        trust_pb2_grpc.add_TrustAdminServicer_to_server(self._trust_service(), unix_server)

    def _trust_service(self) -> TrustService:
        pairing = PairingHost(
            trust=self._trust,
            hello=self._hello,
            host=self._host,
            port=self._config.port,
            addresses=self._known_addresses,
            announce=self._announce_pairing,
            clock=self._clock,
        )
        return TrustService(
            trust=self._trust,
            pairing=pairing,
            membership=self._membership,
            addresses=self._known_addresses,
            data_dir=self._data_dir.path,
            node_name=self._config.name,
            begin_anew=self._begin_anew,
        )

    def _known_addresses(self) -> dict[str, str]:
        """Where members answer or answered."""
        return {**self._remembered.all(), self._node_id: self._address}

    async def _announce_pairing(self, port: int) -> None:
        if self._discovery is not None:
            await self._discovery.announce_pairing(port)

    async def _follow_address(self) -> None:
        """Begin anew where the machine's address is another: systems have no common way to tell of it, so look."""
        watch = AddressWatch(self._host)
        while True:
            await asyncio.sleep(_ADDRESS_S)
            available = await asyncio.to_thread(interfaces)
            try:
                wanted = self._wanted_address(available)
            except ConfigInvalid:
                continue  # the named interface is away
            if watch.moved(wanted=wanted, available={one.address for one in available}):
                logger.warning("this machine's address is now %s, no longer %s: the node moves", wanted, self._host)
                self._begin_anew()
                return

    def _begin_anew(self) -> None:
        """The node is another one, or in another cluster: it ends, and ``node.run`` starts it again."""
        self.begins_anew = True
        self.stopping.set()

    async def _work(self, tasks: asyncio.TaskGroup, server: grpc.aio.Server, unix_server: grpc.aio.Server) -> None:
        await unix_server.start()
        self._data_dir.socket.chmod(0o600)
        gateway = await self._gateway.start()
        self._local.refresh()
        await server.start()
        tasks.create_task(self._gateway.keep(gateway), name="gateway")
        tasks.create_task(self._device.keep_spare(), name="spare")
        tasks.create_task(self._trust.run(), name="trust-file")
        tasks.create_task(self._introductions.follow_trust(), name="introductions")
        tasks.create_task(self._handshakes.run(), name="handshakes")
        tasks.create_task(self._remembered.run(), name="addresses")
        tasks.create_task(self._follow_address(), name="own-address")
        tasks.create_task(self._layers.run(), name="layer-profiles")
        tasks.create_task(self._heartbeats.run(), name="heartbeats")
        tasks.create_task(keep_awake(self._hosts, self._local.changes.watch, awake_command()), name="awake")
        tasks.create_task(self.children.watch_hangs(), name="hangs")
        tasks.create_task(self._sleep.run(), name="sleep")
        tasks.create_task(self._book.run(), name="serve-book")
        tasks.create_task(self._keeper.run(), name="engine-keeper")
        tasks.create_task(self._replan_watch.run(), name="replan-watch")
        tasks.create_task(self._replication.run(), name="replication")
        tasks.create_task(self._models.keep_served_metadata(self._local.changes.watch), name="metadata")
        for address in self._config.peers:
            self._heartbeats.found(address, manual=True)
        for node_id, address in self._remembered.all().items():
            self._heartbeats.found(address, node_id=node_id)
        await self._start_discovery()
        self._tell_ready()
        await self.stopping.wait()

    async def _start_discovery(self) -> None:
        if not self._config.discovery:
            return
        host, _, port = self._address.rpartition(":")
        own = Announcement(
            cluster_id=self._cluster.cluster_id,
            cluster_name=self._cluster.cluster_name,
            node_id=self._node_id,
            node_name=self._config.name,
            host=host,
            port=int(port),
            incarnation=self._incarnation,
        )
        self._discovery = Discovery(own, self._neighbours.found)
        await self._discovery.start()

    def _tell_ready(self) -> None:
        logger.info("node ready name=%s node=%s address=%s", self._config.name, self._node_id, self._address)
        if self._on_ready is not None:
            self._on_ready(
                NodeReady(
                    node_id=self._node_id,
                    name=self._config.name,
                    address=self._address,
                    http_port=self._gateway.http_port,
                    socket=self._data_dir.socket,
                    cluster=self._cluster.cluster_name,
                    http_host=self._config.http_host,
                    key_file=key_file(self._data_dir.path) if self._http_keys.keys else None,
                )
            )

    async def _take_down(self, server: grpc.aio.Server, unix_server: grpc.aio.Server) -> None:
        """Leaving first, so that nobody waits for this node; then engines, stages, gateway, servers, the name."""
        self.stopping.set()
        logger.info("node stops node=%s", self._node_id)
        await self._heartbeats.leave()
        self._engines.abandon_all()
        await self._device.release_all()
        await self.children.stop_all("gateway")
        await asyncio.gather(server.stop(grace=0.2), unix_server.stop(grace=0.5))
        await self._peers.close()
        if self._network is not None:
            self._network.close()
        if self._discovery is not None:
            await self._discovery.stop()
        logging.getLogger().removeHandler(self._logs)
        self._data_dir.socket.unlink(missing_ok=True)

    def _on_denied(self, denial: Denial) -> None:
        self._trust.audit.record(AuditKind.DENIED, who=denial.who, detail=denial.what)

    async def _spread(self) -> None:
        """Until the other nodes and this node's engines know the newest state, or a moment has passed."""
        await self._heartbeats.spread()
        await asyncio.gather(*(child.knows_peers() for child in self.children.running("engine")))

    def _on_member(self, change: MemberChanged) -> None:
        self._introductions.refresh()
        if (member := self._membership.member(change.node_id)) is not None:
            self._remembered.note(change.node_id, member.node.address)
        elif self._trust.store.peers.get(change.node_id) is None:
            self._remembered.forget(change.node_id)
        if change.status in (MemberStatus.DEAD, MemberStatus.LEFT):
            logger.warning("node is %s node=%s", change.status, change.node_id)
            self._device.orphaned_by(change.node_id)
        self._local.refresh()  # whom it does not hear is part of what it tells
        self._local.changes.notify()

    async def _wake(self, slept_s: float) -> None:
        """The others went on without this machine: nothing runs here until its engine says that it still counts."""
        if self._leaving is not None:
            self._leaving.stays()
        self._device.pause()
        await self._device.resume_unchanged(self._peers.engine_epoch)

    def _tell_sleep(self, sleeping: bool) -> None:
        self._heartbeats.sleeps(sleeping=sleeping)
        if not sleeping and self._leaving is not None:
            self._leaving.stays()

    def stop(self) -> None:
        """Stop once others have taken over what they can; asked a second time, at once."""
        if self._leaving is not None:
            self._leaving.stop()
        else:
            self.stopping.set()

    def will_sleep(self) -> None:
        """The system says that the machine is about to sleep."""
        if self._leaving is not None:
            self._leaving.sleep()

    def _on_identity_taken(self, address: str) -> None:
        logger.warning("another node has the id of this one: node=%s address=%s", self._node_id, address)
        self.identity_taken = True
        self.stopping.set()


def _timeouts_for(host: str) -> Timeouts:
    if host.startswith("127."):
        return Timeouts.loopback()
    return Timeouts.wifi() if is_wireless(host, interfaces()) else Timeouts.lan()


class _Stopped(Exception):
    """The node was asked to stop; never leaves ``NodeDaemon.run``."""
