"""Another number of pipelines for a model while it is served: plan, then one step after the other.

``replica_change`` decides which pipelines stay, move, end and start. This module carries that out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from edgepipe.daemon.files.models import LocalModel, Models
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.serving.capacity import rooms_of, stages_of
from edgepipe.daemon.serving.draft_models import as_drafted
from edgepipe.daemon.serving.engine_following import EngineFollower
from edgepipe.daemon.serving.engine_starts import described, start_all, start_request
from edgepipe.daemon.serving.replanning import UNMEASURED, demand_of
from edgepipe.daemon.serving.replica_change import (
    EndPipeline,
    MovePipeline,
    ReplicaChange,
    RunningPipeline,
    StartPipeline,
    change_to,
)
from edgepipe.daemon.serving.replica_facts import ReplicaFacts, number_of
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.daemon.serving.serve_rules import lead, place_of
from edgepipe.daemon.serving.spec_room import pipeline_spec
from edgepipe.daemon.serving.survey import Surveyor
from edgepipe.errors import EdgepipeError, NodeUnreachable, NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import IdSource, NodeId, PipelineId
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand
from edgepipe.planner.plan import Plan
from edgepipe.planner.profiles import Links, Machine
from edgepipe.planner.regrouping import Regrouping, best_number, regrouped, with_more
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import (
    Moves,
    RebalanceRequest,
    ServeBody,
    ServeEvent,
    ServeRequest,
    StartEngineRequest,
    SurveyReply,
)
from edgepipe.wire.surveys import cluster_of

logger = logging.getLogger(__name__)


class _Inputs(NamedTuple):
    """What the planner searches."""

    demand: Demand
    machines: Sequence[Machine]
    links: Links
    constraints: Constraints


@dataclass(slots=True, kw_only=True)
class _Work:
    """A change under way."""

    model: LocalModel  # as the first pipeline has it
    first: ServeSpec  # settings of the first pipeline; the new ones get the same
    found: Regrouping
    change: ReplicaChange
    auto: bool
    concurrency: int
    places: dict[PipelineId, int]  # places of the pipelines that count now
    shares: dict[PipelineId, float]  # planned shares of the pipelines that go on
    recorded: set[tuple[PipelineId, ...]]  # all sets of pipelines that this change has found or recorded
    starting: list[tuple[str, PipelineId]] = field(default_factory=list[tuple[str, PipelineId]])  # nodes and pipelines

    @property
    def facts(self) -> ReplicaFacts:
        """The facts of the pipelines that count now."""
        pipelines = tuple(sorted(self.places, key=lambda pipeline_id: self.places[pipeline_id]))
        return ReplicaFacts(pipelines=pipelines, shares=self.shares, auto=self.auto, concurrency=self.concurrency)


@dataclass(kw_only=True, eq=False)
class ReplicaChanges:
    """Changes the number of a model's pipelines, for a command line at this node or because a machine joined."""

    peers: Peers
    models: Models
    ids: IdSource
    book: ServeBook
    surveyor: Surveyor
    follower: EngineFollower
    tasks: asyncio.TaskGroup

    def __post_init__(self) -> None:
        self._open: set[str] = set()  # models whose pipelines change now

    def is_open(self, model: str) -> bool:
        """Return whether the model's pipelines change now, by this node."""
        return model in self._open

    async def change(self, request: ServeRequest, model: LocalModel) -> AsyncGenerator[ServeEvent]:
        """Give a served model as many pipelines as the request asks for; yield progress. Do nothing if it has them.

        Pipelines whose machines stay serve on. Those that end leave their requests to the others. Raises PlanInvalid,
        NoFeasiblePlacement, AccessDenied, NodeUnreachable and the engines' errors. If an engine does not start, or the
        caller leaves, the pipelines that are ready go on.
        """
        bodies = self._bodies(model.name)
        if not bodies:
            return  # it was stopped meanwhile
        wanted = request.options
        concurrency = wanted.concurrency or bodies[0].spec.concurrency
        facts = self._facts(bodies, auto=wanted.auto_replicas, concurrency=concurrency)
        if wanted.num_replicas == len(bodies) and not self.is_open(model.name):
            self.book.note_replicas(model.name, facts)
            yield _told(f"{model.name} has {_pipelines(len(bodies))} already")
            return
        with self._alone(bodies):
            yield ServeEvent(message=f"placing the pipelines of {model.name}")
            model = await self._as_first(model, bodies[0].spec)
            inputs = await self._inputs(model, bodies, concurrency)
            count = wanted.num_replicas or await asyncio.to_thread(best_number, *inputs)
            if count == len(bodies):
                self.book.note_replicas(model.name, facts)
                yield _told(f"{model.name} has {_pipelines(count)} already, as many as give most by forecast")
                return
            self._check_can_shrink(bodies, count)
            found = await asyncio.to_thread(regrouped, *inputs, running=[*map(_nodes_of, bodies)], count=count)
            work = self._work(model, bodies, found, auto=wanted.auto_replicas, concurrency=concurrency)
            async with aclosing(self._carry_out(work)) as events:
                async for event in events:
                    yield event

    async def grow(self, model_name: str) -> bool:
        """Add pipelines on machines that hold nothing, if they pay. Return whether there are more now.

        All other pipelines stay as they are. Raises as ``change``.
        """
        bodies = self._bodies(model_name)
        if not bodies:
            return False
        first = bodies[0].spec
        with self._alone(bodies):
            stored = await self.models.adopt(model_name, manifest_hash=first.manifest_hash)
            model = await self._as_first(stored, first)
            inputs = await self._inputs(model, bodies, first.concurrency)
            ours = {*self._idle(bodies), *(node_id for body in bodies for node_id in _nodes_of(body))}
            inputs = inputs._replace(machines=[each for each in inputs.machines if each.node_id in ours])
            found = await asyncio.to_thread(with_more, *inputs, running=[*map(_nodes_of, bodies)])
            if found is None:
                return False
            work = self._work(model, bodies, found, auto=True, concurrency=first.concurrency)
            async for event in self._carry_out(work):
                logger.info("%s", event.message)
        return True

    # What is asked

    def _bodies(self, model: str) -> list[ServeBody]:
        """Return the records of the model's pipelines, the first one first; not those of a start that was given up."""
        counting = {body.pipeline_id for body in self.book.bodies()}
        running = {engine.pipeline_id for _, engine in self.follower.running(model)}
        return [
            body
            for body in self.book.replicas(model)
            if body.pipeline_id in counting and (body.begun or body.pipeline_id in running)
        ]

    def _facts(self, bodies: Sequence[ServeBody], *, auto: bool, concurrency: int) -> ReplicaFacts:
        """Return the facts of the pipelines as they are."""
        return ReplicaFacts(
            pipelines=tuple(body.pipeline_id for body in bodies),
            shares={body.pipeline_id: body.spec.replica_share for body in bodies},
            auto=auto,
            concurrency=concurrency,
        )

    @contextlib.contextmanager
    def _alone(self, bodies: Sequence[ServeBody]) -> Generator[None]:
        """Refuse a second change of a model's pipelines meanwhile. Raises PlanInvalid."""
        model = bodies[0].spec.model
        coming = [body for body in bodies if not body.begun]
        if model in self._open or coming:
            places = self._names(_nodes_of(coming[0])) if coming else ""
            raise PlanInvalid(
                f"the pipelines of {model} change already",
                fact=f"one starts on {places} now" if coming else "another command on this machine changes them",
                next_step="see 'edgepipe ps', then type the command again",
            )
        first = bodies[0].spec
        if first.fixed or first.first:
            raise PlanInvalid(
                f"{model} was placed by hand",
                fact=f"it is served with {'--plan' if first.fixed else '--first'}; the planner places replicas",
                next_step=f"edgepipe stop {model}, then serve it with --replicas",
            )
        self._open.add(model)
        try:
            yield
        finally:
            self._open.discard(model)

    def _check_can_shrink(self, bodies: Sequence[ServeBody], count: int) -> None:
        """Raise PlanInvalid if no pipeline that stays would answer."""
        model = bodies[0].spec.model
        ready = {engine.pipeline_id for _, engine in self.follower.running(model) if engine.state == "ready"}
        if count == 1 and len(bodies) > 1 and bodies[0].pipeline_id not in ready:
            raise PlanInvalid(
                f"the first pipeline of {model} does not answer now",
                fact="it is the one that would stay",
                next_step=f"edgepipe stop {model}, then serve it again",
            )

    # The plan

    async def _inputs(self, model: LocalModel, bodies: Sequence[ServeBody], concurrency: int) -> _Inputs:
        """Return the planner's inputs. ``model``: as the first pipeline has it."""
        first = bodies[0].spec
        cluster = cluster_of(await self._survey(model, bodies))
        whole = replace(first, replica=0, num_replicas=0, concurrency=concurrency, throughput=True)
        must_keep = first.settings.context_length if first.must_keep_context else 0
        present = {name for machine in cluster.machines for name in (machine.name, str(machine.node_id))}
        return _Inputs(
            demand=demand_of(model.config, whole, weights=model.weights, must_keep_tokens=must_keep),
            machines=cluster.machines,
            links=replace(cluster.links, assumed=UNMEASURED),
            constraints=Constraints(
                num_nodes=first.num_nodes,
                exclude=tuple(name for name in first.exclude if name in present),
                first=first.first,
                experts_in_ram=first.experts_in_ram,
            ),
        )

    async def _survey(self, model: LocalModel, bodies: Sequence[ServeBody]) -> SurveyReply:
        """Return what is known of the machines. Memory of the model's pipelines counts as free.

        Idle machines are measured if those of the pipelines were. Else all speeds are estimates: a measured machine
        beside an estimated one says little about either.
        """
        settings, used = bodies[0].spec.settings, {node_id for body in bodies for node_id in _nodes_of(body)}
        own = frozenset(body.pipeline_id for body in bodies)
        known = await self.surveyor.known(model, settings, own=own)
        if all(machine.layer is not None for machine in known.machines if machine.node_id in used):
            return await self.surveyor.known(model, settings, own=own, measure=self._idle(bodies))
        return replace(known, machines=tuple(replace(machine, layer=None) for machine in known.machines))

    def _idle(self, bodies: Sequence[ServeBody]) -> list[NodeId]:
        """Return the machines that hold nothing."""
        used = {node_id for body in bodies for node_id in _nodes_of(body)}
        return [
            node.node_id
            for node in self.peers.nodes()
            if node.node_id not in used and not any(device.reserved for device in node.devices)
        ]

    async def _as_first(self, model: LocalModel, first: ServeSpec) -> LocalModel:
        """Return the model as the first pipeline has it: with the same layers and the same drafts."""
        return await as_drafted(self.models, first, model.as_placed(first.stages))

    def _work(
        self, model: LocalModel, bodies: Sequence[ServeBody], found: Regrouping, *, auto: bool, concurrency: int
    ) -> _Work:
        running = [
            RunningPipeline(
                pipeline_id=body.pipeline_id,
                place=place_of(body.spec)[1],
                nodes=frozenset(map(str, _nodes_of(body))),
            )
            for body in bodies
        ]
        change = change_to(running, [frozenset(map(str, group)) for group in found.groups])
        return _Work(
            model=model,
            first=bodies[0].spec,
            found=found,
            change=change,
            auto=auto,
            concurrency=concurrency,
            places={each.pipeline_id: each.place for each in running},
            shares={pipeline_id: found.layout.shares[group] for pipeline_id, group in change.groups.items()},
            recorded={tuple(each.pipeline_id for each in running), _named(bodies)},
        )

    def _in_words(self, work: _Work) -> str:
        """Say what stays, moves, ends and starts."""
        bodies = {body.pipeline_id: body for body in self._bodies(work.model.name)}
        parts = [f"{self._title(bodies[key])} stays" for key in work.change.kept]
        for step in work.change.steps:
            match step:
                case MovePipeline():
                    names = self._names(work.found.groups[step.group])
                    parts.append(f"{self._title(bodies[step.pipeline_id])} moves to {names}")
                case EndPipeline():
                    parts.append(f"{self._title(bodies[step.pipeline_id])} ends")
                case StartPipeline():
                    parts.append(f"one starts on {self._names(work.found.groups[step.group])}")
        rate = work.found.layout.tokens_per_s
        count = len(work.found.groups)
        return f"{work.model.name} gets {_pipelines(count)}, {rate:.0f} tok/s by forecast: {', '.join(parts)}"

    def _title(self, body: ServeBody) -> str:
        number = number_of(body.pipeline_id, lead(self.book.replicas(body.spec.model)))
        return f"{f'replica {number}' if number else 'the one'} on {self._names(_nodes_of(body))}"

    def _names(self, nodes: Iterable[str]) -> str:
        names = {node.node_id: node.name for node in self.peers.nodes()}
        return " and ".join(sorted(names.get(NodeId(node_id), "a machine that is away") for node_id in nodes))

    # The steps

    async def _carry_out(self, work: _Work) -> AsyncGenerator[ServeEvent]:
        yield _told(self._in_words(work))
        try:
            for kind, steps in groupby(work.change.steps, key=type):
                if kind is StartPipeline:
                    started = [step for step in steps if isinstance(step, StartPipeline)]
                    async for event in self._start(work, started):
                        yield event
                    continue
                for step in steps:
                    if isinstance(step, EndPipeline):
                        yield ServeEvent(message=f"a pipeline of {work.model.name} ends")
                        await self._end(work, step.pipeline_id)
                    elif isinstance(step, MovePipeline):
                        async for event in self._move(work, step):
                            yield event
            self._record(work)
        except EdgepipeError as error:
            await self._abandon(work)
            self._check_alone(work)
            left = f"{work.model.name} goes on with {_pipelines(len(self._bodies(work.model.name)))}"
            raise error.changed(fact="; ".join(filter(None, [error.fact, left]))) from error
        finally:
            if work.starting:  # the caller left
                self.tasks.create_task(self._abandon(work), name=f"abandon:{work.model.name}")

    def _record(self, work: _Work) -> None:
        """Record which pipelines count now. Raises AccessDenied, and PlanInvalid if another command changed them.

        A record of an engine's node may have replaced one of this change: it has the facts of before.
        """
        self._check_alone(work)
        work.recorded.add(work.facts.pipelines)
        self.book.note_replicas(work.model.name, work.facts)

    def _check_alone(self, work: _Work) -> None:
        """Raise PlanInvalid if another command has recorded other pipelines meanwhile."""
        if _named(self.book.replicas(work.model.name)) not in work.recorded:
            raise PlanInvalid(
                f"another command changed the pipelines of {work.model.name} at the same time",
                next_step="see 'edgepipe ps', then type the command again",
            )

    async def _end(self, work: _Work, pipeline_id: PipelineId) -> None:
        """End a pipeline. Gateways continue its requests at the others."""
        held = self.book.held(pipeline_id)
        self.book.note_ended(pipeline_id)
        work.places.pop(pipeline_id, None)
        self._record(work)
        try:
            if held is not None:
                await self.peers.stop_engine(held.engine_node, pipeline_id, self.book.record(pipeline_id))
        except EdgepipeError as error:  # its node ends it by the record
            logger.info("not stopped pipeline=%s: %s", pipeline_id, error)

    async def _move(self, work: _Work, step: MovePipeline) -> AsyncGenerator[ServeEvent]:
        held = self.book.held(step.pipeline_id)
        engine = self.follower.engine_of(held.engine_node, step.pipeline_id) if held is not None else None
        if held is None or engine is None:
            raise NodeUnreachable(f"a pipeline of {work.model.name} has no engine now", next_step="see 'edgepipe ps'")
        stages = stages_of(work.found.layout.plans[step.group].placed)
        wanted = RebalanceRequest(pipeline_id=step.pipeline_id, stages=stages)
        if await self.peers.rebalance(held.engine_node, wanted):
            async for event in self.follower.follow([(held.engine_node, step.pipeline_id)], after=engine.epoch):
                yield replace(event, engines=())

    async def _start(self, work: _Work, steps: Sequence[StartPipeline]) -> AsyncGenerator[ServeEvent]:
        """Start pipelines, all at once, and follow them until they are ready."""
        specs: list[tuple[PipelineId, ServeSpec, str]] = []  # with the engine's node
        for step in steps:
            pipeline_id, found = PipelineId(self.ids.new("pipeline")), work.found.layout.plans[step.group]
            specs.append((pipeline_id, self._spec(work, found), found.engine))
            work.places[pipeline_id] = step.place
            work.shares[pipeline_id] = work.found.layout.shares[step.group]
        self._record(work)
        requests: list[tuple[str, StartEngineRequest]] = []
        for pipeline_id, spec, engine_node in specs:
            spec = work.facts.of(spec, pipeline_id, place=work.places[pipeline_id])
            work.starting.append((engine_node, pipeline_id))
            record = self.book.ask(pipeline_id, spec, engine_node=engine_node)
            requests.append((engine_node, start_request(pipeline_id, spec, record, self.peers)))
            yield ServeEvent(message=f"{work.model.name}: {described(spec, self.peers)}")
        await start_all(self.peers, requests)
        async for event in self.follower.follow(work.starting):
            if event.engines and (error := await self.follower.no_way_to_any(work.starting)):
                event = replace(event, note=f"{error.what}: {error.next_step}")
            yield replace(event, engines=())
        work.starting.clear()

    def _spec(self, work: _Work, found: Plan) -> ServeSpec:
        """Return the spec of a further pipeline: like the first one, with as many tokens of KV if they fit."""
        nodes = self.peers.nodes()
        own, settings = frozenset(work.places), work.first.settings
        states = bool(work.model.config.state_bytes())
        rooms = [room for node in nodes for room in rooms_of(node, settings, states=states, own=own)]
        profiles = [device.profile for node in nodes for device in node.devices if device.profile is not None]
        moves = Moves.AUTO if work.first.moves else Moves.OFF

        def spec(kv_tokens: int) -> ServeSpec:
            request = ServeRequest(
                options=replace(work.first, kv_tokens=kv_tokens),
                must_keep_context=work.first.must_keep_context,
                moves=moves,
            )
            context = settings.context_length
            most_slots = found.most_slots
            return pipeline_spec(request, work.model, context, found.placed, rooms, profiles, most_slots=most_slots)

        try:
            return spec(work.first.kv_tokens)
        except NoFeasiblePlacement:
            return spec(0)

    async def _abandon(self, work: _Work) -> None:
        """End the pipelines that started and are not ready; those that are count as the others."""
        starting, work.starting = work.starting, []
        ready = {engine.pipeline_id for _, engine in self.follower.running(work.model.name) if engine.state == "ready"}
        for _, pipeline_id in starting:
            if pipeline_id not in ready:
                with contextlib.suppress(EdgepipeError):
                    await self._end(work, pipeline_id)


def _named(bodies: Sequence[ServeBody]) -> tuple[PipelineId, ...]:
    """Return the pipelines that count by the first record."""
    return (bodies[0].spec.replica_pipelines or (bodies[0].pipeline_id,)) if bodies else ()


def _nodes_of(body: ServeBody) -> frozenset[NodeId]:
    return frozenset(stage.node_id for stage in body.spec.stages)


def _pipelines(count: int) -> str:
    return "one pipeline" if count == 1 else f"{count} replicas"


def _told(text: str) -> ServeEvent:
    return ServeEvent(message=text, note=text)
