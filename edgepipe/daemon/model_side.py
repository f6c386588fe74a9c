"""A node's work for models: its device, engines and gateway, and the tasks that keep them running."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial

from edgepipe.daemon.cluster_side import NodePresence
from edgepipe.daemon.cluster_views import ClusterViews
from edgepipe.daemon.context import NodeBasis
from edgepipe.daemon.device.device import DeviceHost
from edgepipe.daemon.device.layer_profiles import LayerProfiles
from edgepipe.daemon.files.batch_sources import BatchSources
from edgepipe.daemon.files.models import Models
from edgepipe.daemon.machine.backends import choose_backend
from edgepipe.daemon.network.guests import Guests
from edgepipe.daemon.offers import NodeLife
from edgepipe.daemon.processes.gateway_keeper import GatewayKeeper
from edgepipe.daemon.processes.kept_models import KeptModelsFile
from edgepipe.daemon.serving.drain import Drain
from edgepipe.daemon.serving.engine_following import EngineFollower
from edgepipe.daemon.serving.engine_keeper import EngineKeeper
from edgepipe.daemon.serving.engines import EngineHost
from edgepipe.daemon.serving.replan_watch import ReplanWatch
from edgepipe.daemon.serving.replanning import Replanner
from edgepipe.daemon.serving.replica_changing import ReplicaChanges
from edgepipe.daemon.serving.replica_watch import ReplicaWatch
from edgepipe.daemon.serving.replication import Replication
from edgepipe.daemon.serving.serving import Serving
from edgepipe.daemon.serving.survey import Surveyor
from edgepipe.daemon.tasks.commands import arguments_of
from edgepipe.daemon.tasks.runner import Tasks
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import ServeEvent, ServeRequest


class NodeHosting:
    """Create it once the node listens; everything that it starts ends with ``tasks``."""

    def __init__(self, basis: NodeBasis, presence: NodePresence, tasks: asyncio.TaskGroup, node: NodeLife) -> None:
        self._node = node
        self._basis = basis
        self._presence = presence
        self._tasks = tasks
        self._local = presence.local
        self.book = presence.book
        self.guests = Guests(self._local)
        self.models = Models(
            models_dir=basis.config.models_dir,
            peers=presence.peers,
            timeouts=basis.timeouts,
            local=self._local,
        )
        self.views = self._new_views()
        self._layers = LayerProfiles(basis.data_dir.path / "layers.json")
        self.device = self._new_device()
        surveyor = Surveyor(presence.peers)
        replanner = Replanner(
            peers=presence.peers, models=self.models, surveyor=surveyor, taken=self.book.nodes_of_others
        )
        self.engines = self._new_engines(replanner)
        self._replan_watch = self._new_replan_watch(replanner)
        self.replication = self._new_replication()
        self.drain = self._new_drain(replanner)
        self._keeper = self._new_keeper()
        self._kept_models = KeptModelsFile(basis.data_dir.path / "keep_alive.json")
        self.batches = BatchSources(basis.data_dir.path / "batches" / "files", local=self._local)
        self.gateway = self._new_gateway()
        self._follower = EngineFollower(peers=presence.peers, local=self._local, gateway=self.gateway, book=self.book)
        changes = self._new_replica_changes(surveyor)
        self._replica_watch = self._new_replica_watch(changes)
        self.serving = self._new_serving(surveyor, changes)
        self.commands = self._new_commands()
        presence.local.add_part(self._tell)
        presence.local.add_part(self.batches.tell)

    async def start(self) -> None:
        """Start the gateway. Raises PortInUse and other errors that prevent the start."""
        gateway = await self.gateway.start()
        self._tasks.create_task(self.gateway.keep(gateway), name="gateway")

    def keep(self) -> None:
        """Start the background tasks."""
        for name, keeping in (
            ("spare", self.device.keep_spare()),
            ("layer-profiles", self._layers.run()),
            ("kept-models", self._kept_models.run()),
            ("serve-book", self.book.run()),
            ("engine-keeper", self._keeper.run()),
            ("replan-watch", self._replan_watch.run()),
            ("replica-watch", self._replica_watch.run()),
            ("replication", self.replication.run()),
            ("metadata", self.models.keep_served_metadata(self._local.watch)),
        ):
            self._tasks.create_task(keeping, name=name)

    async def stop(self) -> None:
        """End tasks and engines first, then the stages, then the gateway."""
        await self.commands.stop()
        self.engines.hand_over()
        await self.device.release_all()
        await self._basis.children.stop_all("gateway")

    def holds_something(self) -> bool:
        """Return whether a stage or an engine is here."""
        return any(device.reserved_bytes for device in self.device.state()) or bool(self.engines.states())

    def _tell(self, state: NodeState) -> NodeState:
        return replace(
            state,
            devices=tuple(self.device.state()),
            engines=tuple(self.engines.states()),
            models=tuple(self.models.on_disk()),
            transfers=tuple(self.models.transfers()),
            http_port=self.gateway.http_port,
            gateways=(self.gateway.certificate, *self.guests.certificates()),
            serves=self.book.records(),
            draining=self.drain.active,
            disk_free_bytes=self.models.free_bytes,
        )

    def has_engine(self, pipeline_id: str) -> bool:
        """Return whether a pipeline's engine runs on a reachable node."""
        return any(engine.pipeline_id == pipeline_id for _, engine in self.serving.engines())

    def load(self, model: str) -> AsyncGenerator[ServeEvent]:
        """Serve a model for a request, in its best placement. End when it answers, or raise the reason why not."""
        return self.serving.serve(ServeRequest(options=ServeSpec(model=model, on_request=True)))

    async def unload(self, model: str) -> None:
        """Stop a model that ``load`` served."""
        await self.serving.unload(model)

    def _new_views(self) -> ClusterViews:
        return ClusterViews(
            local=self._presence.local,
            membership=self._presence.membership,
            heartbeats=self._presence.heartbeats,
            peers=self._presence.peers,
            models=self.models,
            trust=self._basis.trust,
            neighbours=self._presence.neighbours,
            children=self._basis.children,
            handshakes=self._basis.handshakes,
            discovery_problem=self._presence.discovery_problem,
            load_on_request=self._basis.config.load_on_request,
            book=self.book,
            data_dir=self._basis.data_dir.path,
            clock=self._basis.clock,
        )

    def _new_device(self) -> DeviceHost:
        config = self._basis.config
        return DeviceHost(
            node_name=config.name,
            backend=choose_backend(config.backend),
            children=self._basis.children,
            setup=self._basis,
            introductions=self._presence.introductions,
            memory_limit_bytes=config.memory_limit_bytes,
            disk_free=lambda: shutil.disk_usage(self._basis.data_dir.path).free,
            timeouts=self._basis.timeouts,
            tasks=self._tasks,
            directory=self,
            local=self._local,
            layers=self._layers,
        )

    def _new_engines(self, replanner: Replanner) -> EngineHost:
        return EngineHost(
            children=self._basis.children,
            setup=self._basis,
            peers=self._presence.peers,
            replanner=replanner,
            local=self._local,
            heartbeats=self._presence.heartbeats,
            tasks=self._tasks,
            device=self.device,
            node=self._node,
            book=self.book,
            clock=self._basis.clock,
        )

    def _new_replan_watch(self, replanner: Replanner) -> ReplanWatch:
        return ReplanWatch(
            engines=self.engines,
            replanner=replanner,
            clock=self._basis.clock,
            local=self._local,
            tasks=self._tasks,
        )

    def _new_replication(self) -> Replication:
        return Replication(
            peers=self._presence.peers,
            models=self.models,
            engines=self.engines,
            copies=self._basis.config.copies,
            local=self._local,
        )

    def _new_drain(self, replanner: Replanner) -> Drain:
        return Drain(
            device=self.device,
            engines=self.engines,
            peers=self._presence.peers,
            replanner=replanner,
            book=self.book,
            directory=self,
            local=self._local,
        )

    def _new_keeper(self) -> EngineKeeper:
        return EngineKeeper(
            book=self.book,
            engines=self.engines,
            models=self.models,
            peers=self._presence.peers,
            proofs=self._presence.proofs,
            vacancies=self._presence.vacancies,
            clock=self._basis.clock,
            timeouts=self._basis.timeouts,
            local=self._local,
            node=self._node,
            tasks=self._tasks,
        )

    def _new_gateway(self) -> GatewayKeeper:
        return GatewayKeeper(
            children=self._basis.children,
            setup=self._basis,
            http_port=self._basis.config.http_port,
            views=self.views,
            requested=self,
            kept=self._kept_models,
            batches=self.batches,
            tasks=self._tasks,
            local=self._local,
        )

    def _new_replica_changes(self, surveyor: Surveyor) -> ReplicaChanges:
        return ReplicaChanges(
            peers=self._presence.peers,
            models=self.models,
            ids=self._basis.ids,
            book=self.book,
            surveyor=surveyor,
            follower=self._follower,
            tasks=self._tasks,
        )

    def _new_replica_watch(self, changes: ReplicaChanges) -> ReplicaWatch:
        return ReplicaWatch(
            peers=self._presence.peers,
            book=self.book,
            follower=self._follower,
            changes=changes,
            clock=self._basis.clock,
            local=self._local,
            tasks=self._tasks,
        )

    def _new_serving(self, surveyor: Surveyor, changes: ReplicaChanges) -> Serving:
        return Serving(
            peers=self._presence.peers,
            models=self.models,
            ids=self._basis.ids,
            local=self._local,
            follower=self._follower,
            replicas=changes,
            heartbeats=self._presence.heartbeats,
            book=self.book,
            surveyor=surveyor,
            tasks=self._tasks,
            clock=self._basis.clock,
        )

    def _new_commands(self) -> Tasks:
        arguments = partial(arguments_of, data_dir=self._basis.data_dir.path, models_dir=self._basis.config.models_dir)
        return Tasks(arguments=arguments, clock=self._basis.clock, ids=self._basis.ids, tasks=self._tasks)
