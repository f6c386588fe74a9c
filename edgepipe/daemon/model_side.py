"""A node's work for models: its device, engines and gateway, and the tasks that keep them running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from edgepipe.daemon.cluster_side import NodePresence
from edgepipe.daemon.cluster_views import ClusterViews
from edgepipe.daemon.context import NodeBasis
from edgepipe.daemon.device.device import DeviceHost
from edgepipe.daemon.device.layer_profiles import LayerProfiles
from edgepipe.daemon.files.models import Models
from edgepipe.daemon.machine.backends import choose_backend
from edgepipe.daemon.network.guests import Guests
from edgepipe.daemon.processes.gateway_keeper import GatewayKeeper
from edgepipe.daemon.processes.kept_models import KeptModelsFile
from edgepipe.daemon.serving.drain import Drain
from edgepipe.daemon.serving.engine_keeper import EngineKeeper
from edgepipe.daemon.serving.engines import EngineHost
from edgepipe.daemon.serving.replan_watch import ReplanWatch
from edgepipe.daemon.serving.replanning import Replanner
from edgepipe.daemon.serving.replication import Replication
from edgepipe.daemon.serving.serving import Serving
from edgepipe.daemon.serving.survey import Surveyor
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import ServeRequest


class NodeHosting:
    """Create it once the node listens; everything that it starts ends with ``tasks``."""

    def __init__(
        self, basis: NodeBasis, presence: NodePresence, tasks: asyncio.TaskGroup, *, ends: Callable[[], bool]
    ) -> None:
        """``ends``: whether this node is about to stop."""
        self._ends = ends
        self._basis = basis
        self._presence = presence
        self._tasks = tasks
        self._changes = presence.local.changes.watch
        self._refresh = presence.local.refresh
        self.book = presence.book
        self.guests = Guests(self._refresh)
        self.models = Models(
            models_dir=basis.config.models_dir,
            peers=presence.peers,
            timeouts=basis.timeouts,
            on_change=self._refresh,
        )
        self.views = self._new_views()
        self._layers = LayerProfiles(basis.data_dir.path / "layers.json")
        self.device = self._new_device()
        surveyor = Surveyor(presence.peers)
        replanner = Replanner(peers=presence.peers, models=self.models, surveyor=surveyor)
        self.engines = self._new_engines(replanner)
        self._replan_watch = self._new_replan_watch(replanner)
        self.replication = self._new_replication()
        self.drain = self._new_drain(replanner)
        self._keeper = self._new_keeper()
        self._kept_models = KeptModelsFile(basis.data_dir.path / "keep_alive.json")
        self.gateway = self._new_gateway()
        self.serving = self._new_serving(surveyor)
        presence.local.add_part(self._tell)

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
            ("replication", self.replication.run()),
            ("metadata", self.models.keep_served_metadata(self._changes)),
        ):
            self._tasks.create_task(keeping, name=name)

    async def stop(self) -> None:
        """End the engines first, then the stages, then the gateway."""
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

    def _has_engine(self, pipeline_id: str) -> bool:
        return any(engine.pipeline_id == pipeline_id for _, engine in self.serving.engines())

    def _own_highest(self, pipeline_id: str) -> int:
        epoch = self.device.epoch_of(pipeline_id)
        return epoch.counter if epoch is not None else 0

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
            new_settings=lambda: self._basis.child_settings("stage"),
            introduce=self._presence.introductions.greet,
            memory_limit_bytes=config.memory_limit_bytes,
            timeouts=self._basis.timeouts,
            tasks=self._tasks,
            has_engine=self._has_engine,
            on_change=self._refresh,
            layers=self._layers,
        )

    def _new_engines(self, replanner: Replanner) -> EngineHost:
        return EngineHost(
            children=self._basis.children,
            new_settings=lambda: self._basis.child_settings("engine"),
            peers=self._presence.peers,
            replanner=replanner,
            changes=self._changes,
            spread=self._presence.heartbeats.spread,
            tasks=self._tasks,
            own_highest=self._own_highest,
            ends=self._ends,
            counts=self.book.is_here,
            move_engine=self.book.move_engine,
            clock=self._basis.clock,
            on_change=lambda urgent: self._refresh(urgent=urgent),
        )

    def _new_replan_watch(self, replanner: Replanner) -> ReplanWatch:
        return ReplanWatch(
            engines=self.engines,
            replanner=replanner,
            clock=self._basis.clock,
            changes=self._changes,
            tasks=self._tasks,
        )

    def _new_replication(self) -> Replication:
        return Replication(
            peers=self._presence.peers,
            models=self.models,
            engines=self.engines,
            copies=self._basis.config.copies,
            changes=self._changes,
        )

    def _new_drain(self, replanner: Replanner) -> Drain:
        return Drain(
            device=self.device,
            engines=self.engines,
            peers=self._presence.peers,
            replanner=replanner,
            book=self.book,
            has_engine=self._has_engine,
            changes=self._changes,
            on_change=self._refresh,
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
            changes=self._changes,
            ends=self._ends,
            tasks=self._tasks,
        )

    def _new_gateway(self) -> GatewayKeeper:
        return GatewayKeeper(
            children=self._basis.children,
            new_settings=lambda http_port: self._basis.child_settings("gateway", http_port=http_port),
            http_port=self._basis.config.http_port,
            view=self.views.for_gateway,
            load=lambda model: self.serving.serve(
                ServeRequest(model=model, options=ServeSpec(model=model, on_request=True))
            ),
            unload=lambda model: self.serving.unload(model),
            kept=self._kept_models,
            changes=self._changes,
            tasks=self._tasks,
            on_change=self._refresh,
        )

    def _new_serving(self, surveyor: Surveyor) -> Serving:
        return Serving(
            peers=self._presence.peers,
            models=self.models,
            ids=self._basis.ids,
            changes=self._changes,
            gateway_knows=self.gateway.knows,
            refused=self._presence.heartbeats.refusals.values,
            book=self.book,
            surveyor=surveyor,
            tasks=self._tasks,
        )
