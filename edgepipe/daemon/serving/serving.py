"""From ``serve MODEL`` to a ready engine: resolve, place, start, follow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from dataclasses import asdict, replace
from enum import Enum
from functools import partial
from typing import Any

from edgepipe.addresses import host_and_port
from edgepipe.backend.types import DEFAULT_BLOCK_SIZE, DEFAULT_SETTINGS, DeviceProfile, StageSettings
from edgepipe.cluster.heartbeats import Heartbeats
from edgepipe.daemon.device.memory import modest_kv_bytes
from edgepipe.daemon.files.models import LocalModel, Models
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.offers import PublishedState
from edgepipe.daemon.processes.gateway_keeper import GatewayKeeper
from edgepipe.daemon.serving.capacity import cannot_keep, placement_need, rooms_of, stages_of
from edgepipe.daemon.serving.replanning import DEFAULT_SEQUENCE_TOKENS, DEFAULT_SEQUENCES
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.daemon.serving.serve_planner import ServePlanner
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
from edgepipe.ids import Epoch, IdSource, PipelineId
from edgepipe.link.shut_ports import shut_port
from edgepipe.planner.expert_shares import place_with_shares, rooms_as_placed
from edgepipe.planner.placement import NodeRoom, Placed
from edgepipe.scheduler.pacing import DEFAULT_ITL_GOAL
from edgepipe.spec.expert_places import check_has_experts, in_words
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.longrope import factors_in_words
from edgepipe.spec.memory_classes import most_within
from edgepipe.store.further_names import checked_names
from edgepipe.store.typed_names import meant_names, understood
from edgepipe.weights.weight_table import FLOATS, WeightTable
from edgepipe.wire.engines import EngineState, ServeSpec
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import (
    LinkProfile,
    Moves,
    ServeBody,
    ServeEvent,
    ServeRecord,
    ServeRequest,
    StartEngineRequest,
    SurveyReply,
)

logger = logging.getLogger(__name__)

_DEVICES_S = 30.0  # importing torch and measuring takes 2-10 s; a device that takes longer is left out
_CONNECT_S = 3.0  # time to connect to an engine that is ready
_FLAGS = {"context_length": "--context", "activation_type": "--activations"}  # settings whose flag has another name
_GATEWAY_S = 2.0  # time for this node's gateway to get a model's tokenizer from a peer


class Serving:
    """Serves and stops models anywhere in the cluster, for a command line at this node."""

    def __init__(
        self,
        *,
        peers: Peers,
        models: Models,
        ids: IdSource,
        local: PublishedState,
        gateway: GatewayKeeper,
        heartbeats: Heartbeats,
        book: ServeBook,
        surveyor: Surveyor,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._book = book
        self._peers = peers
        self._models = models
        self._ids = ids
        self._local = local
        self._gateway = gateway
        self._heartbeats = heartbeats
        self._surveyor = surveyor
        self._tasks = tasks
        self._planner = ServePlanner(surveyor)

    def engines(self) -> list[tuple[NodeState, EngineState]]:
        """Return every engine of the cluster with its node."""
        return [(node, engine) for node in self._peers.nodes() for engine in node.engines]

    async def serve(self, request: ServeRequest) -> AsyncGenerator[ServeEvent]:
        """Serve a model: yield progress, then the ready engine. Only follow a model that is served already.

        Raises ModelUnknown, ConfigInvalid, PlanInvalid, NoFeasiblePlacement, NodeUnreachable, and the engine's error.
        If the caller leaves before the end, the model that it began to serve is stopped.
        """
        self._check_names([*request.exclude, *filter(None, [request.first])])
        yield ServeEvent(message=f"looking for {request.model}")
        model = await self._models.resolve(request.model)
        context = model.config.context_for(request.options.settings.context_length)
        self._check_further_names(request.options.names, model.name)
        if running := self._running(model.name):
            node, engine = running
            if request.rebalance:
                async for event in self._rebalance(node.node_id, engine, request):
                    yield event
                return
            _check_served_as_asked(request, engine, model.manifest_hash, self._book.held(engine.pipeline_id))
            if not request.options.on_request:
                self._book.note_kept(model.name)
            if request.options.names:
                self._book.note_named(model.name, request.options.names)
            if engine.starts_at_us:
                await self._start_now(node, engine)
            async for event in self._follow(node.node_id, engine.pipeline_id):
                yield event
            return
        if waited_for := self._starting():
            yield ServeEvent(message=f"waiting for the device of {', '.join(waited_for)}")
            await self._devices_started()
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

    async def _start_now(self, node: NodeState, engine: EngineState) -> None:
        """End the pause of a crashed engine. Only follow it if this node may not: it starts by itself later."""
        held, record = self._book.held(engine.pipeline_id), self._book.record(engine.pipeline_id)
        if held is None or record is None:
            return
        with contextlib.suppress(AccessDenied):
            request = StartEngineRequest(pipeline_id=engine.pipeline_id, spec=held.spec, record=record)
            await self._peers.start_engine(node.node_id, request)

    async def _serve_anew(
        self, request: ServeRequest, model: LocalModel, context: int, shut: dict[str, EdgepipeError]
    ) -> AsyncGenerator[ServeEvent]:
        """Serve on nodes outside ``shut``, and add nodes that others do not reach.

        Raises the first error of ``shut`` if the others allow no placement.
        """
        pipeline_id, engine_node = PipelineId(self._ids.new("pipeline")), ""
        ready = False
        try:
            if not request.plan:
                yield ServeEvent(message="measuring devices and links")
            try:
                told = len(shut)
                changes: list[str] = []
                spec, engine_node = await self._spec(request, model, context, shut, changes)
            except (NoFeasiblePlacement, PlanInvalid) as error:
                raise next(iter(shut.values()), error) from None
            newest = [_left_out(error) for error in list(shut.values())[max(0, told - 1) :]]
            lacking = [f"{reason}: it is left out" for reason in self._lacking(model, spec.settings)]
            factors = [found for found in [factors_in_words(model.config, context)] if found]
            notes = "\n".join([*lacking, *newest, *changes, *factors])
            yield ServeEvent(message=f"{model.name}: {self._describe(spec)}", note=notes)
            record = self._book.ask(pipeline_id, spec, engine_node=engine_node)
            await self._peers.start_engine(engine_node, self._start_request(pipeline_id, spec, record))
            async for event in self._follow(engine_node, pipeline_id):
                if event.engine is not None and (error := await self._no_way_to(event.engine, engine_node)):
                    if not request.plan:
                        raise error
                    event = replace(event, note=f"{error.what}: {error.next_step}")
                ready = event.engine is not None
                yield event
        finally:
            if engine_node and not ready and not self._has_failed(pipeline_id):
                self._tasks.create_task(self._stop_quietly(engine_node, pipeline_id), name=f"abandon:{pipeline_id}")

    async def _no_way_to(self, engine: EngineState, node_id: str) -> ConnectTimeout | None:
        """Return why this node's gateway cannot send requests to a ready engine; None if it can."""
        host, port = host_and_port(engine.address)
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(host, int(port))
        except TimeoutError:
            own, node = self._peers.node(self._peers.own_id), self._peers.node(node_id)
            return shut_port(own.name, node.name, address=engine.address, node_address=node.address)
        except (OSError, ValueError):  # refused, or a malformed address: a node may report anything
            return None  # the gateway that sends it requests gets the error
        writer.close()
        return None

    def _check_names(self, names: Iterable[str]) -> None:
        """Raise PlanInvalid for a name that no node has."""
        nodes = self._peers.nodes()
        known = {name for node in nodes for name in (node.name, node.node_id)}
        if unknown := [name for name in names if name not in known]:
            raise PlanInvalid(
                f"'{unknown[0]}' is no node of this cluster",
                fact=f"nodes: {', '.join(sorted(node.name for node in nodes))}",
                next_step="see 'edgepipe status'",
            )

    def _check_further_names(self, names: Sequence[str], model: str) -> None:
        """Raise ConfigInvalid for a further name that cannot be one, or that means another served model."""
        taken = {name.lower(): body.spec.model for body in self._book.served() for name in body.spec.names}
        for name in checked_names(names):
            if (other := taken.get(name.lower(), model)) != model:
                raise ConfigInvalid(
                    f"the name '{name}' is taken",
                    fact=f"{other} is served by it",
                    next_step=f"choose another name, or first: edgepipe stop {other}",
                )

    def _named(self, name: str) -> NodeState | None:
        return next((node for node in self._peers.nodes() if name and node.name == name), None)

    async def survey(self, name: str, settings: StageSettings, *, fresh: bool = False) -> SurveyReply:
        """Collect the inputs of a model's plan: of the cluster's, else of a known shape. Raises ModelUnknown.

        Nodes measure what they have never measured; ``fresh`` measures all again.
        """
        try:
            model: PlannedModel = await self._models.resolve(name)
        except ModelUnknown:
            meant = understood(name)
            there = (stored.model for node in self._peers.nodes() for stored in node.models)
            if meant is None or not meant.planned or meant_names(name, there):
                raise
            model = await asyncio.to_thread(known_shape, meant.planned)
        if self._starting():
            await self._devices_started()
        return await self._planner.survey(model, settings, fresh=fresh)

    async def measure_links(self) -> list[LinkProfile]:
        """Measure every directed link between nodes; leave out links that carry nothing."""
        return await self._surveyor.links()

    async def _rebalance(self, node_id: str, engine: EngineState, request: ServeRequest) -> AsyncGenerator[ServeEvent]:
        """Move the model's stages to the best placement now; yield events until they serve there."""
        yield ServeEvent(message=f"placing {engine.model} anew")
        if not await self._peers.rebalance(
            node_id, engine.pipeline_id, num_nodes=request.num_nodes, moves=request.moves
        ):
            yield ServeEvent(message="it is placed as well as can be", progress=1.0, engine=engine)
            return
        async for event in self._follow(node_id, engine.pipeline_id, after=engine.epoch):
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
        if any(body.spec.model == model and body.spec.on_request for body in self._book.served()):
            await self._stop({model})

    def _called(self, name: str) -> list[str]:
        """Return the served models that have a further name."""
        bodies = self._book.served()
        return [body.spec.model for body in bodies if name.lower() in (own.lower() for own in body.spec.names)]

    def _wanted(self) -> set[str]:
        return {body.spec.model for body in self._book.served()}

    async def _stop(self, models: AbstractSet[str]) -> None:
        engines = [(node, engine) for node, engine in self.engines() if engine.model in models]
        denied: dict[str, AccessDenied] = {}
        for name in sorted(models):  # first, so that no node starts it again
            try:
                self._book.note_stopped(name)
            except AccessDenied as error:
                denied[name] = error
        for node, engine in engines:
            if engine.model not in denied:
                record = self._book.record(engine.pipeline_id)
                await self._peers.stop_engine(node.node_id, engine.pipeline_id, record)
        if denied:
            raise next(iter(denied.values()))

    def _running(self, model: str) -> tuple[NodeState, EngineState] | None:
        for node, engine in self.engines():
            if engine.model == model and engine.state in ("starting", "loading", "ready", "recovering", "waiting"):
                return node, engine
        return None

    def _has_failed(self, pipeline_id: str) -> bool:
        return any(engine.pipeline_id == pipeline_id and engine.state == "failed" for _, engine in self.engines())

    def _starting(self) -> list[str]:
        """Return the nodes whose device is being measured: at their start, or after a model was stopped."""
        return [node.name for node in self._peers.nodes() if any(device.state == "starting" for device in node.devices)]

    def _failed_devices(self) -> list[str]:
        """Describe each unusable device with its node."""
        return [
            f"{node.name} cannot: {device.error.what}"
            for node in self._peers.nodes()
            for device in node.devices
            if device.state == "failed" and device.error is not None
        ]

    def _lacking(self, model: LocalModel, settings: StageSettings) -> list[str]:
        """Describe each node that could compute, but cannot keep what the model needs."""
        states = bool(model.config.state_bytes())
        lacks = [(node.name, cannot_keep(node, settings, states=states)) for node in self._peers.nodes()]
        return [f"{name} {lack}" for name, lack in lacks if lack]

    async def _devices_started(self) -> None:
        """Wait at most ``_DEVICES_S`` until every device is known, so that a placement leaves none out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DEVICES_S):
                async for _ in self._local.watch():
                    if not self._starting():
                        return

    async def _spec(
        self,
        request: ServeRequest,
        model: LocalModel,
        context: int,
        shut: dict[str, EdgepipeError],
        changes: list[str],
    ) -> tuple[ServeSpec, str]:
        """Choose what to serve and the engine's node, without the nodes in ``shut``.

        ``changes`` gets a sentence if a plan of the last minutes no longer holds.
        """
        options = request.options
        check_has_experts(options.experts_in_ram, model.config)
        nodes = self._peers.nodes()
        states = bool(model.config.state_bytes())
        rooms = [room for node in nodes for room in rooms_of(node, options.settings, states=states)]
        try:
            if request.plan:
                need = placement_need(model.config, context, model.weights)
                placed = place_with_shares(need, rooms, request.plan, options.experts_in_ram)
                engine_node = placed[0].node_id
            else:
                found = await self._planner.plan(request, model, context, shut, changes)
                placed, engine_node = found.placed, found.engine
        except (NoFeasiblePlacement, PlanInvalid) as error:
            lacking = self._lacking(model, options.settings)
            if isinstance(error, PlanInvalid):
                raise error.changed(fact="; ".join([error.fact, *lacking])) from error
            mismatch = next(
                (refusal for refusal in self._heartbeats.refusals.values() if isinstance(refusal, VersionMismatch)),
                None,
            )
            if mismatch is not None and request.num_nodes > len(rooms):
                raise VersionMismatch(error.what, fact=mismatch.fact, next_step=mismatch.next_step) from error
            raise error.changed(fact="; ".join([error.fact, *lacking, *self._failed_devices()])) from error
        rooms = rooms_as_placed(rooms, placed)
        _check_kv_room(model.config, options.kv_tokens, placed, rooms, weights=model.weights)
        profiles = [device.profile for node in nodes for device in node.devices]
        spec = replace(
            options,
            model=model.name,
            manifest_hash=model.manifest_hash,
            stages=stages_of(placed),
            settings=replace(
                options.settings,
                context_length=context,
                block_size=common_block_size(profile for profile in profiles if profile is not None),
            ),
            kv_tokens=options.kv_tokens
            or default_kv_tokens(model.config, context, placed, rooms, weights=model.weights),
            throughput=request.throughput,
            concurrency=request.concurrency,
            moves=request.moves is Moves.AUTO,
            num_nodes=request.num_nodes,
            exclude=(*options.exclude, *request.exclude),
            first=request.first,
            fixed=bool(request.plan),
        )
        return spec, engine_node

    def _describe(self, spec: ServeSpec) -> str:
        """Describe a placement: ``layers 0-14 on gamer, 15-29 on mac``."""
        parts = [
            f"{part.layers.shown} on {self._peers.node(stage.node_id).name}{in_words(stage.ram_percent)}"
            for stage in spec.stages
            for part in stage.slices
        ]
        return f"layers {', '.join(parts)}"

    def _start_request(self, pipeline_id: PipelineId, spec: ServeSpec, record: ServeRecord) -> StartEngineRequest:
        nodes = tuple(self._peers.node(stage.node_id).introduction for stage in spec.stages)
        return StartEngineRequest(pipeline_id=pipeline_id, spec=spec, record=record, nodes=nodes)

    async def _follow(self, node_id: str, pipeline_id: str, *, after: Epoch | None = None) -> AsyncIterator[ServeEvent]:
        """Yield events until the engine is ready, in an epoch later than ``after`` if that is given.

        Raises the engine's error, or NodeUnreachable when its node goes.
        """
        sent: tuple[str, float] | None = None
        seen = False
        async for _ in self._local.watch():
            engine = next((each for each in self._peers.node(node_id).engines if each.pipeline_id == pipeline_id), None)
            if engine is None:
                if seen:
                    raise NodeUnreachable("the engine was stopped", next_step="serve the model again")
                continue  # its node has not reported it yet
            seen = True
            if engine.state == "failed":
                raise engine.error or EdgepipeError(f"the engine of {engine.model} failed")
            if engine.state == "ready" and (after is None or engine.epoch > after):
                with contextlib.suppress(TimeoutError):  # the engine is ready even if this node's gateway is not
                    async with asyncio.timeout(_GATEWAY_S):
                        await self._gateway.knows(pipeline_id)
                yield ServeEvent(message=f"{engine.model} is ready", progress=1.0, engine=engine)
                return
            if sent != (engine.message, engine.progress):
                sent = (engine.message, engine.progress)
                yield ServeEvent(message=engine.message or engine.state, progress=engine.progress)

    async def _stop_quietly(self, node_id: str, pipeline_id: str) -> None:
        try:
            if (held := self._book.held(pipeline_id)) is not None:
                self._book.note_stopped(held.spec.model)
            await self._peers.stop_engine(node_id, pipeline_id, self._book.record(pipeline_id))
        except EdgepipeError as error:
            logger.info("not stopped pipeline=%s: %s", pipeline_id, error)


def _left_out(error: EdgepipeError) -> str:
    return f"{error.node} is left out: {error.what} ({error.fact}). {error.next_step}"


def default_kv_tokens(
    config: ModelConfig,
    context: int,
    placed: Sequence[Placed],
    rooms: Sequence[NodeRoom],
    *,
    weights: WeightTable = FLOATS,
) -> int:
    """Return the default KV tokens: some long chats' worth, less where stages use the host's memory."""
    tokens = DEFAULT_SEQUENCES * min(context, DEFAULT_SEQUENCE_TOKENS)
    by_id = {room.node_id: room for room in rooms}
    for stage in placed:
        room = by_id[stage.node_id]
        if room.shares_host_memory:
            most = modest_kv_bytes(weight_bytes=room.sizes(config, weights).of_slice(stage.part))
            tokens = most_within(most, partial(room.kv_bytes, config, stage.part.layers), at_most=tokens)
    return max(tokens, context)


def _check_kv_room(
    config: ModelConfig,
    kv_tokens: int,
    placed: Sequence[Placed],
    rooms: Sequence[NodeRoom],
    *,
    weights: WeightTable,
) -> None:
    """Raise NoFeasiblePlacement if ``kv_tokens`` do not fit beside the weights."""
    by_id = {room.node_id: room for room in rooms}
    most = min(
        most_within(
            room.free_bytes - room.sizes(config, weights).of_slice(piece.part),
            partial(room.kv_bytes, config, piece.part.layers),
        )
        for piece in placed
        for room in (by_id[piece.node_id],)
    )
    if kv_tokens > most:
        raise NoFeasiblePlacement(
            f"--kv-tokens {kv_tokens} do not fit",
            fact=f"beside the weights there is room for {most} tokens",
            next_step=f"give --kv-tokens {most} or less, or leave it out",
        )


def common_block_size(profiles: Iterable[DeviceProfile]) -> int:
    """Return the tokens per KV block: the fewest that all devices serve well, as any device may hold a stage."""
    supported = [profile.block_sizes for profile in profiles if profile.block_sizes]
    common = (size for size in supported[0] if all(size in sizes for sizes in supported)) if supported else ()
    return min(common, default=DEFAULT_BLOCK_SIZE)


def _check_served_as_asked(
    request: ServeRequest, engine: EngineState, manifest_hash: str, held: ServeBody | None
) -> None:
    """Raise PlanInvalid if the served model has other content, other nodes, other layers or other settings than the
    caller wants."""
    if engine.manifest_hash and engine.manifest_hash != manifest_hash:
        raise PlanInvalid(
            f"another model is served by the name {engine.model}",
            fact=f"its content is {engine.manifest_hash[:12]}, the model here has {manifest_hash[:12]}",
            next_step=f"edgepipe stop {engine.model}, then serve it again",
        )
    parts = sorted(
        (part.layers.start, str(part.layers), stage.node_name, stage.node_id)
        for stage in engine.stages
        for part in stage.slices
    )
    if request.plan:
        wanted = [text.strip() for text in request.plan.split(",")]
        allowed = [(f"{name}:{layers}", f"{node_id}:{layers}") for _, layers, name, node_id in parts]
        same = len(wanted) == len(allowed) and all(part in both for part, both in zip(wanted, allowed, strict=True))
    else:
        names = [{name, node_id} for _, _, name, node_id in parts]
        same = request.num_nodes in (0, len(engine.stages))
        same = same and (not names or request.first in ("", *names[0]))
        same = same and not any(both & set(request.exclude) for both in names)
    fact = (
        "" if same or not parts else f"it is served as {','.join(f'{name}:{layers}' for _, layers, name, _ in parts)}"
    )
    fact = fact or (_other_setting(request, held.spec) if held is not None else "")
    if fact:
        raise PlanInvalid(
            f"{engine.model} is served already, but not as asked",
            fact=fact,
            next_step=f"edgepipe stop {engine.model}, then serve it again",
        )


def _other_setting(request: ServeRequest, spec: ServeSpec) -> str:
    """Name a setting that a flag asked for and the served model lacks; empty if all agree."""
    asked = request.options
    flags = {
        "--kv-tokens": (asked.kv_tokens, spec.kv_tokens),
        "--micro-batches": (asked.micro_batches, spec.micro_batches),
        "--policy": (asked.policy, spec.policy or "throttled"),
        "--itl-goal": (asked.itl_goal, spec.itl_goal or DEFAULT_ITL_GOAL),
        "--experts-in-ram": (asked.experts_in_ram, spec.experts_in_ram or "none"),
        "--template-keywords": (asked.template_keywords, spec.template_keywords or "none"),
        "--concurrency": (request.concurrency, spec.concurrency),
        **_stage_flags(asked.settings, spec.settings),
    }
    other = next(((flag, now) for flag, (wanted, now) in flags.items() if wanted not in (0, "", "auto", now)), None)
    return f"it is served with {other[0]} {other[1] or 'auto'}" if other is not None else ""


def _stage_flags(asked: StageSettings, now: StageSettings) -> dict[str, tuple[Any, Any]]:
    """Return the flag of each setting with the value that the user gave (empty: none) and the served model's value."""
    unset, current = asdict(DEFAULT_SETTINGS), asdict(now)
    return {
        _FLAGS.get(name, f"--{name.replace('_', '-')}"): (
            value if value != unset[name] else "",
            current[name].value if isinstance(current[name], Enum) else current[name],
        )
        for name, value in asdict(asked).items()
    }
