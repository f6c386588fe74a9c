"""Serves a model for ``serve MODEL``: resolves it, places it, starts its engine and follows it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from dataclasses import dataclass, replace

from edgepipe.backend.types import StageSettings
from edgepipe.clock import Clock
from edgepipe.cluster.heartbeats import Heartbeats
from edgepipe.daemon.files.models import LocalModel, Models
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.offers import PublishedState
from edgepipe.daemon.serving.capacity import cannot_keep, rooms_of
from edgepipe.daemon.serving.draft_models import no_room, with_draft_model
from edgepipe.daemon.serving.engine_following import EngineFollower
from edgepipe.daemon.serving.engine_starts import described, start_all, start_request
from edgepipe.daemon.serving.replica_changing import ReplicaChanges
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.daemon.serving.serve_planner import ServePlanner
from edgepipe.daemon.serving.served_as_asked import check_served_as_asked
from edgepipe.daemon.serving.spec_room import pipeline_spec, placed_by_hand
from edgepipe.daemon.serving.survey import PlannedModel, Surveyor, known_shape
from edgepipe.errors import (
    AccessDenied,
    ConfigInvalid,
    ConnectTimeout,
    EdgepipeError,
    ModelUnknown,
    NodeUnreachable,
    NoFeasiblePlacement,
    PlanInvalid,
    VersionMismatch,
)
from edgepipe.ids import IdSource, PipelineId
from edgepipe.spec.drafting import draft_way
from edgepipe.spec.expert_places import check_has_experts
from edgepipe.spec.longrope import factors_in_words
from edgepipe.store.further_names import checked_names
from edgepipe.store.typed_names import meant_names, understood
from edgepipe.wire.engines import EngineState, ServeSpec
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import (
    MeasuredLinks,
    RebalanceRequest,
    ServeEvent,
    ServeRequest,
    StartEngineRequest,
    SurveyReply,
)

logger = logging.getLogger(__name__)

_DEVICES_S = 30.0  # importing torch and measuring takes 2-10 s; a device that takes longer is left out


@dataclass(kw_only=True, eq=False)
class Serving:
    """Serves and stops models anywhere in the cluster, for a command line at this node."""

    peers: Peers
    models: Models
    ids: IdSource
    local: PublishedState
    follower: EngineFollower
    replicas: ReplicaChanges
    heartbeats: Heartbeats
    book: ServeBook
    surveyor: Surveyor
    tasks: asyncio.TaskGroup
    clock: Clock

    def __post_init__(self) -> None:
        self._planner = ServePlanner(self.surveyor)
        self.measured_links = MeasuredLinks()  # the last measurement

    def engines(self) -> list[tuple[NodeState, EngineState]]:
        """Return every engine of the cluster with its node."""
        return self.follower.engines()

    async def serve(self, request: ServeRequest) -> AsyncGenerator[ServeEvent]:
        """Serve a model: yield progress, then the ready engines. Only follow a model that is served already.

        Raises ModelUnknown, ConfigInvalid, PlanInvalid, NoFeasiblePlacement, NodeUnreachable, and the engine's error.
        If the caller leaves before the end, the model that it began to serve is stopped.
        """
        options = request.options
        self._check_names([*options.exclude, *filter(None, [options.first])])
        yield ServeEvent(message=f"looking for {options.model}")
        model = await self.models.resolve(options.model)
        context = model.config.context_for(options.settings.context_length)
        self._check_further_names(options.names, model.name)
        if draft_way(options.draft) == "model":
            model = await with_draft_model(self.models, options.draft, model)
            assert model.draft is not None
            options = replace(options, draft=model.draft.name)
            request = replace(request, options=options)
        if running := self.follower.running(model.name):
            async for event in self._served_already(running, request, model):
                yield event
            return
        if waited_for := self._starting():
            yield ServeEvent(message=f"waiting for the device of {', '.join(waited_for)}")
            await self._devices_started()
        if draft_way(options.draft) == "mtp":
            try:
                model = model.drafting()
            except ConfigInvalid as lacks:  # it is served all the same, with drafts by lookup
                yield ServeEvent(message=lacks.what, note=f"{lacks.what}: {lacks.fact}. Drafts come from a lookup")
        shut: dict[str, EdgepipeError] = {}  # the reason by id, for nodes that cannot be used
        while True:
            try:
                async with aclosing(self._serve_anew(request, model, context, shut)) as events:
                    async for event in events:
                        yield event
                return
            except (ConnectTimeout, NodeUnreachable) as error:
                node = self._named(error.node)
                if request.plan or node is None or node.node_id in shut:
                    raise
                shut[node.node_id] = error
                yield ServeEvent(message=f"{error.what}: looking for another way")

    async def _served_already(
        self, running: Sequence[tuple[NodeState, EngineState]], request: ServeRequest, model: LocalModel
    ) -> AsyncIterator[ServeEvent]:
        """Follow the model's pipelines that run, or place them anew. Raises PlanInvalid if they are not as asked."""
        options = request.options
        if request.rebalance:
            moved: list[EngineState] = []
            for node, engine in running:
                async for event in self._rebalance(node.node_id, engine, request):
                    moved += event.engines
                    yield replace(event, engines=tuple(moved) if len(moved) == len(running) else ())
            return
        for _, engine in running:
            check_served_as_asked(request, engine, model.manifest_hash, self.book.held(engine.pipeline_id))
        if not options.on_request:
            self.book.note_kept(model.name)
        if options.names:
            self.book.note_named(model.name, options.names)
        if options.num_replicas or options.auto_replicas:
            async for event in self.replicas.change(request, model):
                yield event
            running = self.follower.running(model.name)
        for node, engine in running:
            if engine.starts_at_us:
                await self._start_now(node, engine)
        async for event in self.follower.follow([(node.node_id, engine.pipeline_id) for node, engine in running]):
            yield event

    async def _start_now(self, node: NodeState, engine: EngineState) -> None:
        """End the pause of a crashed engine. Only follow it if this node may not: it starts by itself later."""
        held, record = self.book.held(engine.pipeline_id), self.book.record(engine.pipeline_id)
        if held is None or record is None:
            return
        with contextlib.suppress(AccessDenied):
            request = StartEngineRequest(pipeline_id=engine.pipeline_id, spec=held.spec, record=record)
            await self.peers.start_engine(node.node_id, request)

    async def _serve_anew(
        self, request: ServeRequest, model: LocalModel, context: int, shut: dict[str, EdgepipeError]
    ) -> AsyncGenerator[ServeEvent]:
        """Serve on nodes outside ``shut``, and add nodes that others do not reach.

        Raises the first error of ``shut`` if the others allow no placement.
        """
        started: list[tuple[str, PipelineId]] = []  # engines' nodes and their pipelines
        ready = False
        try:
            if not request.plan:
                yield ServeEvent(message="measuring devices and links")
            try:
                told = len(shut)
                changes: list[str] = []
                specs = await self._specs_that_draft(request, model, context, shut, changes)
            except (NoFeasiblePlacement, PlanInvalid) as error:
                raise next(iter(shut.values()), error) from None
            newest = [_left_out(error) for error in list(shut.values())[max(0, told - 1) :]]
            settings = specs[0][0].settings
            lacking = [f"{reason}: it is left out" for reason in self._lacking(model, settings)]
            factors = [found for found in [factors_in_words(model.config, context)] if found]
            notes = "\n".join([*lacking, *newest, *changes, *factors])
            for spec, _ in specs:
                title = f"{spec.model} replica {spec.replica}/{spec.num_replicas}" if spec.replica else spec.model
                yield ServeEvent(message=f"{title}: {described(spec, self.peers)}", note=notes)
                notes = ""
            requests: list[StartEngineRequest] = []
            pipelines = tuple(PipelineId(self.ids.new("pipeline")) for _ in specs)
            for pipeline_id, (spec, engine_node) in zip(pipelines, specs, strict=True):
                spec = replace(spec, replica_pipelines=pipelines if len(specs) > 1 else ())
                started.append((engine_node, pipeline_id))
                record = self.book.ask(pipeline_id, spec, engine_node=engine_node)
                requests.append(start_request(pipeline_id, spec, record, self.peers))
            await start_all(self.peers, [(node_id, each) for (node_id, _), each in zip(started, requests, strict=True)])
            async for event in self.follower.follow(started):
                if event.engines and (error := await self.follower.no_way_to_any(started)):
                    if not request.plan:
                        raise error
                    event = replace(event, note=f"{error.what}: {error.next_step}")
                ready = bool(event.engines)
                yield event
        finally:
            if started and not ready and not (len(started) == 1 and self._has_failed(started[0][1])):
                for engine_node, pipeline_id in started:
                    self.tasks.create_task(self._stop_quietly(engine_node, pipeline_id), name=f"abandon:{pipeline_id}")

    def _check_names(self, names: Iterable[str]) -> None:
        """Raise PlanInvalid for a name that no node has."""
        nodes = self.peers.nodes()
        known = {name for node in nodes for name in (node.name, node.node_id)}
        if unknown := [name for name in names if name not in known]:
            raise PlanInvalid(
                f"'{unknown[0]}' is no node of this cluster",
                fact=f"nodes: {', '.join(sorted(node.name for node in nodes))}",
                next_step="see 'edgepipe status'",
            )

    def _check_further_names(self, names: Sequence[str], model: str) -> None:
        """Raise ConfigInvalid for a further name that cannot be one, or that means another served model."""
        taken = {name.lower(): body.spec.model for body in self.book.served() for name in body.spec.names}
        for name in checked_names(names):
            if (other := taken.get(name.lower(), model)) != model:
                raise ConfigInvalid(
                    f"the name '{name}' is taken",
                    fact=f"{other} is served by it",
                    next_step=f"choose another name, or first: edgepipe stop {other}",
                )

    def _named(self, name: str) -> NodeState | None:
        return next((node for node in self.peers.nodes() if name and node.name == name), None)

    async def survey(self, name: str, settings: StageSettings, *, fresh: bool = False) -> SurveyReply:
        """Collect the inputs of a model's plan: of the cluster's, else of a known shape. Raises ModelUnknown.

        Nodes measure what they have never measured, but no layers of a known shape; ``fresh`` measures all again.
        """
        try:
            model: PlannedModel = await self.models.resolve(name)
        except ModelUnknown:
            meant = understood(name)
            there = (stored.model for node in self.peers.nodes() for stored in node.models)
            if meant is None or not meant.planned or meant_names(name, there):
                raise
            model = await asyncio.to_thread(known_shape, meant.planned)
        if self._starting():
            await self._devices_started()
        return await self._planner.survey(model, settings, fresh=fresh)

    async def measure_links(self) -> None:
        """Measure every directed link between nodes; leave out links that carry nothing."""
        links = await self.surveyor.links()
        self.measured_links = MeasuredLinks(links=tuple(links), at_ms=int(self.clock.wall_s() * 1000))

    async def _rebalance(self, node_id: str, engine: EngineState, request: ServeRequest) -> AsyncGenerator[ServeEvent]:
        """Move the model's stages to the best placement now; yield events until they serve there."""
        yield ServeEvent(message=f"placing {engine.model} anew")
        wanted = RebalanceRequest(
            pipeline_id=engine.pipeline_id, num_nodes=request.options.num_nodes, moves=request.moves
        )
        if not await self.peers.rebalance(node_id, wanted):
            yield ServeEvent(message="it is placed as well as can be", progress=1.0, engines=(engine,))
            return
        async for event in self.follower.follow([(node_id, engine.pipeline_id)], after=engine.epoch):
            yield event

    async def stop(self, model: str) -> list[str]:
        """Stop a model, or all of them; return their names. Raises ModelUnknown."""
        known = {engine.model for _, engine in self.engines()}
        named = known | self._wanted()
        chosen = set(meant_names(model, named) or self._called(model)) if model else named
        if model and not chosen:
            raise ModelUnknown(
                f"the model '{model}' is not served",
                fact=f"served: {', '.join(sorted(known)) or 'none'}",
                next_step="see 'edgepipe ps'",
            )
        await self._stop(chosen)
        return sorted(chosen)

    async def unload(self, model: str) -> None:
        """Stop a model that a request loaded; a model that a person had served stays. Raises AccessDenied."""
        if any(body.spec.model == model and body.spec.on_request for body in self.book.served()):
            await self._stop({model})

    def _called(self, name: str) -> list[str]:
        """Return the served models that have a further name."""
        bodies = self.book.served()
        return [body.spec.model for body in bodies if name.lower() in (own.lower() for own in body.spec.names)]

    def _wanted(self) -> set[str]:
        return {body.spec.model for body in self.book.served()}

    async def _stop(self, models: AbstractSet[str]) -> None:
        engines = [(node, engine) for node, engine in self.engines() if engine.model in models]
        denied: dict[str, AccessDenied] = {}
        for name in sorted(models):  # first, so that no node starts it again
            try:
                self.book.note_stopped(name)
            except AccessDenied as error:
                denied[name] = error
        for node, engine in engines:
            if engine.model not in denied:
                record = self.book.record(engine.pipeline_id)
                await self.peers.stop_engine(node.node_id, engine.pipeline_id, record)
        if denied:
            raise next(iter(denied.values()))

    def _has_failed(self, pipeline_id: str) -> bool:
        return any(engine.pipeline_id == pipeline_id and engine.state == "failed" for _, engine in self.engines())

    def _starting(self) -> list[str]:
        """Return the nodes whose device is being measured: at their start, or after a model was stopped."""
        return [node.name for node in self.peers.nodes() if any(device.state == "starting" for device in node.devices)]

    def _failed_devices(self) -> list[str]:
        """Describe each unusable device with its node."""
        return [
            f"{node.name} cannot: {device.error.what}"
            for node in self.peers.nodes()
            for device in node.devices
            if device.state == "failed" and device.error is not None
        ]

    def _lacking(self, model: LocalModel, settings: StageSettings) -> list[str]:
        """Describe each node that could compute, but cannot keep what the model needs."""
        states = bool(model.config.state_bytes())
        lacks = [(node.name, cannot_keep(node, settings, states=states)) for node in self.peers.nodes()]
        return [f"{name} {lack}" for name, lack in lacks if lack]

    async def _devices_started(self) -> None:
        """Wait at most ``_DEVICES_S`` until every device is known, so that a placement leaves none out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DEVICES_S):
                async for _ in self.local.watch():
                    if not self._starting():
                        return

    async def _specs_that_draft(
        self,
        request: ServeRequest,
        model: LocalModel,
        context: int,
        shut: dict[str, EdgepipeError],
        changes: list[str],
    ) -> list[tuple[ServeSpec, str]]:
        """Choose as ``_specs`` does. With ``--draft auto``, the model's own layer for drafts comes along if it fits.

        A draft model comes along if it fits; ``changes`` gets a sentence if it does not.
        """
        way = draft_way(request.options.draft)
        if way == "model" and model.draft is not None:
            try:
                return await self._specs(request, model, context, shut, changes)
            except NoFeasiblePlacement as lacks:
                found = await self._specs(request, model.drafted_by(None), context, shut, changes)
                changes.append(no_room(model.draft.name, lacks))
                return found
        if way == "auto" and model.config.mtp is not None:
            own_changes: list[str] = []
            with contextlib.suppress(NoFeasiblePlacement, PlanInvalid):
                found = await self._specs(request, model.drafting(), context, shut, own_changes)
                changes += own_changes
                return found
        return await self._specs(request, model, context, shut, changes)

    async def _specs(
        self,
        request: ServeRequest,
        model: LocalModel,
        context: int,
        shut: dict[str, EdgepipeError],
        changes: list[str],
    ) -> list[tuple[ServeSpec, str]]:
        """Choose what to serve and the engine's node, for each pipeline, without the nodes in ``shut``.

        ``changes`` gets a sentence if a plan of the last minutes no longer holds, and on the number of replicas.
        """
        options = request.options
        check_has_experts(options.experts_in_ram, model.config)
        nodes = self.peers.nodes()
        states = bool(model.config.state_bytes())
        rooms = [room for node in nodes for room in rooms_of(node, options.settings, states=states)]
        shares: Sequence[float] = ()
        try:
            if request.plan:
                placed, most_slots = placed_by_hand(request, model, context, rooms)
                placements = [(placed, placed[0].node_id, most_slots)]
            elif options.auto_replicas or options.num_replicas > 1:
                layout = await self._planner.layout(request, model, context, shut, changes)
                placements = [(found.placed, found.engine, found.most_slots) for found in layout.plans]
                shares = layout.shares
            else:
                found = await self._planner.plan(request, model, context, shut, changes)
                placements = [(found.placed, found.engine, found.most_slots)]
        except (NoFeasiblePlacement, PlanInvalid) as error:
            lacking = self._lacking(model, options.settings)
            if isinstance(error, PlanInvalid):
                raise error.changed(fact="; ".join([error.fact, *lacking])) from error
            mismatch = next(
                (refusal for refusal in self.heartbeats.refusals.values() if isinstance(refusal, VersionMismatch)),
                None,
            )
            if mismatch is not None and options.num_nodes > len(rooms):
                raise VersionMismatch(error.what, fact=mismatch.fact, next_step=mismatch.next_step) from error
            raise error.changed(fact="; ".join([error.fact, *lacking, *self._failed_devices()])) from error
        count = len(placements)
        profiles = [device.profile for node in nodes for device in node.devices if device.profile is not None]
        return [
            (
                replace(
                    pipeline_spec(request, model, context, placed, rooms, profiles, most_slots=most_slots),
                    num_replicas=count if count > 1 else 0,
                    replica=number if count > 1 else 0,
                    replica_share=shares[number - 1] if count > 1 else 0.0,
                ),
                engine_node,
            )
            for number, (placed, engine_node, most_slots) in enumerate(placements, start=1)
        ]

    async def _stop_quietly(self, node_id: str, pipeline_id: str) -> None:
        try:
            if (held := self.book.held(pipeline_id)) is not None:
                self.book.note_stopped(held.spec.model)
            await self.peers.stop_engine(node_id, pipeline_id, self.book.record(pipeline_id))
        except EdgepipeError as error:
            logger.info("not stopped pipeline=%s: %s", pipeline_id, error)


def _left_out(error: EdgepipeError) -> str:
    return f"{error.node} is left out: {error.what} ({error.fact}). {error.next_step}"
