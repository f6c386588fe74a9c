"""Everything that a plan is made of: every node's room and speed with a model, every link; measured where unknown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from itertools import groupby

from edgepipe.daemon.device.memory import headroom_bytes, uses_host_memory
from edgepipe.daemon.files.models import LocalModel
from edgepipe.daemon.network.peers import Peers
from edgepipe.daemon.serving.capacity import rooms_of
from edgepipe.errors import EdgepipeError, LinkNotMeasured
from edgepipe.wire.v1 import node_pb2 as pb

logger = logging.getLogger(__name__)


class Surveyor:
    """Asks the cluster's nodes."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def survey(self, model: LocalModel, dtype: str, *, fresh: bool = False) -> pb.SurveyReply:
        """``fresh``: what is known is measured again. Raises LinkNotMeasured when a node goes meanwhile."""
        told, usable = self._machines(model, dtype)
        hosts = groupby(sorted(usable, key=_host), key=_host)
        await asyncio.gather(*(self._profile_all(list(nodes), told, dtype, fresh=fresh) for _, nodes in hosts))
        if len(usable) > 1:
            told.links.extend(await self._links(usable, fresh=fresh))
        return told

    async def known(
        self, model: LocalModel, dtype: str, *, own: str = "", measure: Collection[str] = ()
    ) -> pb.SurveyReply:
        """The same at once, with what was measured before; the rest is left out.

        own      a running pipeline that is placed again: what it holds counts as free
        measure  nodes that do nothing yet: they are measured, with the links from and to them
        """
        told, usable = self._machines(model, dtype, own=own)
        new = frozenset(measure)
        machines = {one.node_id: one for one in told.machines}
        layers = [
            self._profile(machines[node.node_id], node, told, dtype, known_only=node.node_id not in new)
            for node in usable
        ]
        links = [
            self._links_from(node, ids, known_only=known_only)
            for node in usable
            for known_only, ids in _links_to_ask(node, usable, new)
        ]
        _, found = await asyncio.gather(asyncio.gather(*layers), asyncio.gather(*links))
        for each in found:
            told.links.extend(each)
        return told

    def _machines(self, model: LocalModel, dtype: str, *, own: str = "") -> tuple[pb.SurveyReply, list[pb.NodeState]]:
        """A survey with every node that can compute, and those nodes."""
        told = pb.SurveyReply(model=model.name, model_config=model.config_json)
        usable: list[pb.NodeState] = []
        for node in self._peers.nodes():
            machine = _machine(node, dtype, own=own)
            if machine is not None:
                usable.append(node)
                told.machines.append(machine)
            else:
                told.unusable.append(_why_not(node))
        for one, other in self._peers.broken_links():
            told.broken.add(node_id=one, other_id=other)
        return told, usable

    async def _links_from(self, node: pb.NodeState, ids: Sequence[str], *, known_only: bool) -> list[pb.LinkProfile]:
        request = pb.ProfileLinksRequest(hello=self._peers.hello, node_ids=ids, known_only=known_only)
        try:
            return await self._peers.profile_links(node.node_id, request)
        except EdgepipeError as error:
            logger.info("links not known node=%s: %s", node.name, error)
            return []

    async def links(self) -> list[pb.LinkProfile]:
        """Every directed link between nodes. Raises LinkNotMeasured when a node goes meanwhile."""
        nodes = list(self._peers.nodes())
        return await self._links(nodes) if len(nodes) > 1 else []

    async def _profile_all(
        self, nodes: Sequence[pb.NodeState], told: pb.SurveyReply, dtype: str, *, fresh: bool
    ) -> None:
        """Nodes of one machine one after the other: side by side they would slow each other."""
        machines = {one.node_id: one for one in told.machines}
        for node in nodes:
            await self._profile(machines[node.node_id], node, told, dtype, fresh=fresh)

    async def _profile(
        self,
        machine: pb.SurveyedMachine,
        node: pb.NodeState,
        told: pb.SurveyReply,
        dtype: str,
        *,
        known_only: bool = False,
        fresh: bool = False,
    ) -> None:
        request = pb.ProfileLayerRequest(
            hello=self._peers.hello,
            model_config=told.model_config,
            dtype="" if dtype == "auto" else dtype,
            known_only=known_only,
            fresh=fresh,
        )
        try:
            machine.layer.CopyFrom(await self._peers.profile_layer(node.node_id, request))
        except EdgepipeError as error:  # what it can do is then estimated from its memory's and matrix rates
            logger.info("not measured node=%s: %s", node.name, error)

    async def _links(self, nodes: Sequence[pb.NodeState], *, fresh: bool = False) -> list[pb.LinkProfile]:
        """All directed links that carry anything; each node begins with its successor, so that few meet at one node."""
        ids, broken = [node.node_id for node in nodes], self._peers.broken_links()

        async def ask(index: int) -> list[pb.LinkProfile]:
            others = [one for one in (*ids[index + 1 :], *ids[:index]) if (ids[index], one) not in broken]
            request = pb.ProfileLinksRequest(hello=self._peers.hello, node_ids=others, fresh=fresh)
            return await self._peers.profile_links(ids[index], request)

        found: list[pb.LinkProfile] = []
        for answer in await asyncio.gather(*(ask(index) for index in range(len(ids))), return_exceptions=True):
            if isinstance(answer, EdgepipeError):
                raise LinkNotMeasured(
                    "a node went away while links were measured", fact=answer.what, next_step="try again"
                ) from answer
            if isinstance(answer, BaseException):
                raise answer
            found += answer
        return found


def _host(node: pb.NodeState) -> str:
    return node.address.rpartition(":")[0]


def _links_to_ask(
    node: pb.NodeState, usable: Sequence[pb.NodeState], new: Collection[str]
) -> list[tuple[bool, list[str]]]:
    """Whether a node shall only tell what it knows, and of the links to whom: those that touch a new node are
    measured."""
    others = [one.node_id for one in usable if one.node_id != node.node_id]
    measured = [one for one in others if node.node_id in new or one in new]
    known = [one for one in others if one not in measured]
    return [(known_only, ids) for known_only, ids in ((True, known), (False, measured)) if ids]


def _machine(node: pb.NodeState, dtype: str, *, own: str = "") -> pb.SurveyedMachine | None:
    """What a node offers; None while it cannot compute."""
    room = next(iter(rooms_of(node, dtype, own=own)), None)
    if room is None:
        return None
    unusable = ("failed",) if own else ("starting", "failed")  # as ``rooms_of`` has it
    device = next(one for one in node.devices if one.state not in unusable)
    profile = device.profile
    on_host = uses_host_memory(profile)
    ours = device.free_bytes + device.reserved_bytes
    headroom = headroom_bytes(total_bytes=profile.memory_total_bytes, on_host=on_host)
    return pb.SurveyedMachine(
        node_id=node.node_id,
        name=node.name,
        device=profile,
        free_bytes=room.free_bytes,
        taken_bytes=max(0, profile.memory_total_bytes - headroom - ours),
        value_bytes=room.bytes_per_weight,
        shares_host_memory=on_host,
    )


def _why_not(node: pb.NodeState) -> str:
    failed = next((device.error.what for device in node.devices if device.state == "failed"), "")
    return f"{node.name}: {failed or ('its device is still starting' if node.devices else 'no backend')}"
