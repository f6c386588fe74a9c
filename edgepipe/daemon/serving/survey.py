"""The inputs of a plan: every node's room and speed with a model, and every link; measured where unknown."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Protocol

from edgepipe.daemon.device.memory import headroom_bytes, uses_host_memory
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.serving.capacity import cannot_keep, rooms_of, usable_device
from edgepipe.errors import EdgepipeError, LinkNotMeasured
from edgepipe.ids import NodeId
from edgepipe.model.config_json import config_to_json
from edgepipe.model.facts import ModelConfig
from edgepipe.model.mixes import named_model
from edgepipe.planner.layer_profile import LayerProfile
from edgepipe.wire.children import ProfileLayerRequest
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import BrokenLink, LinkProfile, SurveyedMachine, SurveyReply

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownShape:
    """A model whose shape and mix of types are known without its files."""

    name: str
    config: ModelConfig
    config_json: str
    weights_json: str


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

    async def survey(self, model: PlannedModel, dtype: str, *, kv: str = "", fresh: bool = False) -> SurveyReply:
        """Collect a plan's inputs; ``fresh`` measures known values again. Raises LinkNotMeasured when a node goes.

        Nodes that cannot keep KV in the form ``kv`` are unusable.
        """
        reply, usable = self._machines(model, dtype, kv)
        hosts = [list(nodes) for _, nodes in groupby(sorted(usable, key=_host), key=_host)]
        layers = await asyncio.gather(*(self._profile_all(nodes, reply, dtype, kv, fresh=fresh) for nodes in hosts))
        links = await self._links(usable, fresh=fresh) if len(usable) > 1 else []
        return _with(reply, chain.from_iterable(layers), links)

    async def known(
        self, model: PlannedModel, dtype: str, *, kv: str = "", own: str = "", measure: Collection[str] = ()
    ) -> SurveyReply:
        """Collect earlier measurements without waiting; leave unknown values out.

        own      a running pipeline that is placed again: its reservations count as free
        measure  idle nodes: they are measured now, with the links from and to them
        """
        reply, usable = self._machines(model, dtype, kv, own=own)
        new = frozenset(measure)
        profiling = [self._profile(node, reply, dtype, kv, known_only=node.node_id not in new) for node in usable]
        asking = [
            self._links_from(node, ids, known_only=known_only)
            for node in usable
            for known_only, ids in _links_to_ask(node, usable, new)
        ]
        layers, links = await asyncio.gather(asyncio.gather(*profiling), asyncio.gather(*asking))
        return _with(reply, layers, chain.from_iterable(links))

    def _machines(
        self, model: PlannedModel, dtype: str, kv: str, *, own: str = ""
    ) -> tuple[SurveyReply, list[NodeState]]:
        """Return a survey of every node that can compute, and those nodes."""
        states = bool(model.config.state_bytes())
        looked_at = [(node, _machine(node, dtype, kv, states=states, own=own)) for node in self._peers.nodes()]
        broken = self._peers.broken_links()
        reply = SurveyReply(
            model=model.name,
            model_config=model.config_json,
            model_weights=model.weights_json,
            machines=tuple(machine for _, machine in looked_at if machine is not None),
            unusable=tuple(_why_not(node, kv, states=states) for node, machine in looked_at if machine is None),
            broken=tuple(BrokenLink(node_id=node_id, other_id=other) for node_id, other in broken),
        )
        return reply, [node for node, machine in looked_at if machine is not None]

    async def _links_from(self, node: NodeState, ids: Sequence[str], *, known_only: bool) -> list[LinkProfile]:
        try:
            return await self._peers.profile_links(node.node_id, ids, known_only=known_only)
        except EdgepipeError as error:
            logger.info("links not known node=%s: %s", node.name, error)
            return []

    async def links(self) -> list[LinkProfile]:
        """Measure every directed link between nodes. Raises LinkNotMeasured when a node goes meanwhile."""
        nodes = list(self._peers.nodes())
        return await self._links(nodes) if len(nodes) > 1 else []

    async def _profile_all(
        self, nodes: Sequence[NodeState], reply: SurveyReply, dtype: str, kv: str, *, fresh: bool
    ) -> list[_Layer]:
        """Profile nodes of one machine in turn: at the same time they would slow each other."""
        return [await self._profile(node, reply, dtype, kv, fresh=fresh) for node in nodes]

    async def _profile(
        self,
        node: NodeState,
        reply: SurveyReply,
        dtype: str,
        kv: str,
        *,
        known_only: bool = False,
        fresh: bool = False,
    ) -> _Layer:
        request = ProfileLayerRequest(
            model_config=reply.model_config,
            model_weights=reply.model_weights,
            dtype="" if dtype == "auto" else dtype,
            known_only=known_only,
            fresh=fresh,
            kv=kv,
        )
        try:
            return node.node_id, await self._peers.profile_layer(node.node_id, request)
        except EdgepipeError as error:  # a plan then estimates its speed from its memory and matrix rates
            logger.info("not measured node=%s: %s", node.name, error)
            return node.node_id, None

    async def _links(self, nodes: Sequence[NodeState], *, fresh: bool = False) -> list[LinkProfile]:
        """Measure all working directed links. Each node begins with its successor, so that few meet at one node."""
        ids, broken = [node.node_id for node in nodes], self._peers.broken_links()

        async def ask(index: int) -> list[LinkProfile]:
            others = [node_id for node_id in (*ids[index + 1 :], *ids[:index]) if (ids[index], node_id) not in broken]
            return await self._peers.profile_links(ids[index], others, fresh=fresh)

        found: list[LinkProfile] = []
        for answer in await asyncio.gather(*(ask(index) for index in range(len(ids))), return_exceptions=True):
            if isinstance(answer, EdgepipeError):
                raise LinkNotMeasured(
                    "a node went away while links were measured", fact=answer.what, next_step="try again"
                ) from answer
            if isinstance(answer, BaseException):
                raise answer
            found += answer
        return found


def _with(reply: SurveyReply, layers: Iterable[_Layer], links: Iterable[LinkProfile]) -> SurveyReply:
    """Return the survey with measurements."""
    measured = dict(layers)
    return replace(
        reply,
        machines=tuple(replace(machine, layer=measured[machine.node_id]) for machine in reply.machines),
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


def _machine(node: NodeState, dtype: str, kv: str, *, states: bool, own: str = "") -> SurveyedMachine | None:
    """Return a node's entry in a survey; None while it cannot compute."""
    room = next(iter(rooms_of(node, dtype, kv=kv, states=states, own=own)), None)
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


def _why_not(node: NodeState, kv: str, *, states: bool) -> str:
    if lack := cannot_keep(node, kv=kv, states=states):
        return f"{node.name}: it {lack}"
    errors = [device.error for device in node.devices if device.state == "failed"]
    failed = next((error.what for error in errors if error is not None), "")
    return f"{node.name}: {failed or ('its device is still starting' if node.devices else 'no backend')}"
