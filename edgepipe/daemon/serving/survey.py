"""The inputs of a plan: every node's room and speed with a model, and every link; measured where unknown."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Protocol

from edgepipe.backend.types import StageSettings
from edgepipe.daemon.device.memory import headroom_bytes, uses_host_memory
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.serving.capacity import cannot_keep, rooms_of, usable_device
from edgepipe.daemon.serving.unreached import Way, left_out
from edgepipe.errors import ConnectTimeout, EdgepipeError
from edgepipe.ids import NodeId
from edgepipe.link.channels import is_refused
from edgepipe.link.shut_ports import shut_port
from edgepipe.planner.layer_profile import LayerProfile
from edgepipe.spec.config_json import config_to_json
from edgepipe.spec.facts import ModelConfig
from edgepipe.weights.mixes import named_model
from edgepipe.wire.children import ProfileLayerRequest
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import BrokenLink, LinkProfile, ProfileLinksReply, SurveyedMachine, SurveyReply

logger = logging.getLogger(__name__)


class PlannedModel(Protocol):
    """A model to plan: ``LocalModel``, or a known shape that is on no disk yet."""

    @property
    def name(self) -> str:
        """The model's name."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Its shape."""
        ...

    @property
    def config_json(self) -> str:
        """Its shape, as an engine takes it."""
        ...

    @property
    def weights_json(self) -> str:
        """The forms of its weights, as an engine takes them."""
        ...

    @property
    def manifest_hash(self) -> str:
        """Hash of its content; empty if no machine has it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownShape:
    """A model whose shape and mix of types are known without its files."""

    name: str
    config: ModelConfig
    config_json: str
    weights_json: str
    manifest_hash: str = ""  # there is no model yet


def known_shape(name: str) -> KnownShape:
    """Return a model by shape and type: ``qwen3-8b:q4_k_m``. Takes a while for a large one. Raises ModelUnknown."""
    config, weights = named_model(name)
    return KnownShape(
        name=name, config=config, config_json=json.dumps(config_to_json(config)), weights_json=weights.to_json()
    )


_Layer = tuple[NodeId, LayerProfile | None]  # a node's measurements; None: it has none


class Surveyor:
    """Collects measurements from the cluster's nodes."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def survey(
        self, model: PlannedModel, settings: StageSettings, *, fresh: bool = False, to_serve: bool = False
    ) -> SurveyReply:
        """Collect a plan's inputs.

        fresh     measure known values again
        to_serve  the plan is served at once: measure values of busy machines again, but nothing of a lone machine for a
                  model without experts, which is placed there whatever its speed

        Layers of a ``KnownShape`` are measured if ``fresh`` only, which takes a slow device some 20 s. People who look
        for a model to pull want an answer at once, and the estimate from the device's rates will do.

        Nodes that cannot keep KV as the settings ask are unusable. A node that others do not reach, or that goes
        meanwhile, has an obstacle.
        """
        reply, usable = self._machines(model, settings)
        hosts = [list(nodes) for _, nodes in groupby(sorted(usable, key=_host), key=_host)]
        has_experts = any(layer.experts is not None for layer in model.config.layers)
        is_placed = to_serve and len(usable) == 1 and not has_experts
        known_only = is_placed or (isinstance(model, KnownShape) and not fresh)
        asked = replace(_layer_request(reply, fresh=fresh, again_if_busy=to_serve), known_only=known_only)
        layers = await asyncio.gather(*(self._profile_all(nodes, asked) for nodes in hosts))
        measured = await self._links(usable, fresh=fresh) if len(usable) > 1 else _Links()
        return _with(reply, chain.from_iterable(layers), measured.links, measured.obstacles)

    async def known(
        self,
        model: PlannedModel,
        settings: StageSettings,
        *,
        own: frozenset[str] = frozenset(),
        measure: Collection[str] = (),
    ) -> SurveyReply:
        """Collect earlier measurements without waiting; leave unknown values out.

        own      running pipelines that are placed again: their reservations count as free
        measure  idle nodes: they are measured now, with the links from and to them
        """
        reply, usable = self._machines(model, settings, own=own)
        new = frozenset(measure)
        asked = _layer_request(reply, again_if_busy=True)
        profiling = [self._profile(node, replace(asked, known_only=node.node_id not in new)) for node in usable]
        asking = [
            self._links_from(node, ids, known_only=known_only)
            for node in usable
            for known_only, ids in _links_to_ask(node, usable, new)
        ]
        layers, links = await asyncio.gather(asyncio.gather(*profiling), asyncio.gather(*asking))
        return _with(reply, layers, chain.from_iterable(links))

    def _machines(
        self, model: PlannedModel, settings: StageSettings, *, own: frozenset[str] = frozenset()
    ) -> tuple[SurveyReply, list[NodeState]]:
        """Return a survey of every node that can compute, and those nodes."""
        states = bool(model.config.state_bytes())
        looked_at = [(node, _machine(node, settings, states=states, own=own)) for node in self._peers.nodes()]
        broken = self._peers.broken_links()
        reply = SurveyReply(
            model=model.name,
            model_config=model.config_json,
            model_weights=model.weights_json,
            machines=tuple(machine for _, machine in looked_at if machine is not None),
            unusable=tuple(_why_not(node, settings, states=states) for node, machine in looked_at if machine is None),
            broken=tuple(BrokenLink(node_id=node_id, other_id=other) for node_id, other in broken),
            settings=settings,
        )
        return reply, [node for node, machine in looked_at if machine is not None]

    async def _links_from(self, node: NodeState, ids: Sequence[str], *, known_only: bool) -> list[LinkProfile]:
        try:
            return list((await self._peers.profile_links(node.node_id, ids, known_only=known_only)).links)
        except EdgepipeError as error:
            logger.info("links not known node=%s: %s", node.name, error)
            return []

    async def links(self) -> list[LinkProfile]:
        """Measure every directed link between nodes; leave out links that carry nothing."""
        nodes = list(self._peers.nodes())
        return list((await self._links(nodes)).links) if len(nodes) > 1 else []

    async def _profile_all(self, nodes: Sequence[NodeState], request: ProfileLayerRequest) -> list[_Layer]:
        """Profile nodes of one machine in turn: at the same time they would slow each other."""
        return [await self._profile(node, request) for node in nodes]

    async def _profile(self, node: NodeState, request: ProfileLayerRequest) -> _Layer:
        try:
            return node.node_id, await self._peers.profile_layer(node.node_id, request)
        except EdgepipeError as error:  # a plan then estimates its speed from its memory and matrix rates
            logger.info("not measured node=%s: %s", node.name, error)
            return node.node_id, None

    async def _links(self, nodes: Sequence[NodeState], *, fresh: bool = False) -> _Links:
        """Measure all working directed links. Each node begins with its successor, so that few meet at one node."""
        by_id, broken = {node.node_id: node for node in nodes}, self._peers.broken_links()
        ids = list(by_id)

        async def ask(index: int) -> ProfileLinksReply | EdgepipeError:
            others = [node_id for node_id in (*ids[index + 1 :], *ids[:index]) if (ids[index], node_id) not in broken]
            try:
                return await self._peers.profile_links(ids[index], others, fresh=fresh)
            except EdgepipeError as error:
                return error

        answers = dict(zip(ids, await asyncio.gather(*(ask(index) for index in range(len(ids)))), strict=True))
        missed: list[Way] = []
        gone: dict[NodeId, EdgepipeError] = {}
        for node_id, answer in answers.items():
            if isinstance(answer, ProfileLinksReply):
                missed += [(node_id, NodeId(target)) for target in answer.unreached if target in ids]
            elif isinstance(answer, ConnectTimeout) and not is_refused(answer):
                missed.append((self._peers.own_id, node_id))
            else:
                gone[node_id] = answer.on_node(by_id[node_id].name)
        chosen = left_out([way for way in missed if way[1] not in gone], own=self._peers.own_id)
        return _Links(
            links=tuple(
                link for reply in answers.values() if isinstance(reply, ProfileLinksReply) for link in reply.links
            ),
            obstacles={**gone, **{node_id: _obstacle(node_id, way, by_id) for node_id, way in chosen.items()}},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    """Measured links, and why some nodes cannot be used."""

    links: tuple[LinkProfile, ...] = ()
    obstacles: Mapping[NodeId, EdgepipeError] = field(default_factory=dict[NodeId, EdgepipeError])


def _layer_request(reply: SurveyReply, *, fresh: bool = False, again_if_busy: bool = False) -> ProfileLayerRequest:
    return ProfileLayerRequest(
        model_config=reply.model_config,
        model_weights=reply.model_weights,
        settings=reply.settings.of_layer(),
        fresh=fresh,
        again_if_busy=again_if_busy,
    )


def _obstacle(node_id: NodeId, way: Way, nodes: Mapping[NodeId, NodeState]) -> ConnectTimeout:
    """Return why a node is left out: one node does not reach the other."""
    source, target = nodes[way[0]], nodes[way[1]]
    error = shut_port(source.name, target.name, address=target.address, node_address=target.address)
    return error.changed(node=nodes[node_id].name)


def _with(
    reply: SurveyReply,
    layers: Iterable[_Layer],
    links: Iterable[LinkProfile],
    obstacles: Mapping[NodeId, EdgepipeError] | None = None,
) -> SurveyReply:
    """Return the survey with measurements."""
    measured, obstacles = dict(layers), obstacles or {}
    return replace(
        reply,
        machines=tuple(
            replace(machine, layer=measured[machine.node_id], obstacle=obstacles.get(machine.node_id))
            for machine in reply.machines
        ),
        links=tuple(links),
    )


def _host(node: NodeState) -> str:
    return node.address.rpartition(":")[0]


def _links_to_ask(
    node: NodeState, usable: Sequence[NodeState], new: Collection[str]
) -> list[tuple[bool, list[NodeId]]]:
    """Split the other nodes by whether a node only reports the link (True) or measures it (False): it measures links
    that touch a new node."""
    others = [other.node_id for other in usable if other.node_id != node.node_id]
    measured = [node_id for node_id in others if node.node_id in new or node_id in new]
    known = [node_id for node_id in others if node_id not in measured]
    return [(known_only, ids) for known_only, ids in ((True, known), (False, measured)) if ids]


def _machine(
    node: NodeState, settings: StageSettings, *, states: bool, own: frozenset[str] = frozenset()
) -> SurveyedMachine | None:
    """Return a node's entry in a survey; None while it cannot compute."""
    room = next(iter(rooms_of(node, settings, states=states, own=own)), None)
    device = usable_device(node, own=own)
    if room is None or device is None or device.profile is None:
        return None
    profile = device.profile
    on_host = uses_host_memory(profile)
    ours = device.free_bytes + device.reserved_bytes
    headroom = headroom_bytes(total_bytes=profile.memory_total_bytes, on_host=on_host)
    return SurveyedMachine(
        node_id=node.node_id,
        name=node.name,
        device=profile,
        free_bytes=room.free_bytes,
        taken_bytes=max(0, profile.memory_total_bytes - headroom - ours),
        value_bytes=room.bytes_per_weight,
        shares_host_memory=on_host,
        ram_free_bytes=room.ram_bytes,
    )


def _why_not(node: NodeState, settings: StageSettings, *, states: bool) -> str:
    if lack := cannot_keep(node, settings, states=states):
        return f"{node.name}: it {lack}"
    errors = [device.error for device in node.devices if device.state == "failed"]
    failed = next((error.what for error in errors if error is not None), "")
    return f"{node.name}: {failed or ('its device is still starting' if node.devices else 'no backend')}"
