"""The inputs of a plan: every node's room and speed with a model, and every link; measured where unknown."""

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
    """Collects measurements from the cluster's nodes."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def survey(self, model: LocalModel, dtype: str, *, fresh: bool = False) -> pb.SurveyReply:
        """Collect a plan's inputs; ``fresh`` measures known values again. Raises LinkNotMeasured when a node goes."""
        reply, usable = self._machines(model, dtype)
        hosts = groupby(sorted(usable, key=_host), key=_host)
        await asyncio.gather(*(self._profile_all(list(nodes), reply, dtype, fresh=fresh) for _, nodes in hosts))
        if len(usable) > 1:
            reply.links.extend(await self._links(usable, fresh=fresh))
        return reply

    async def known(
        self, model: LocalModel, dtype: str, *, own: str = "", measure: Collection[str] = ()
    ) -> pb.SurveyReply:
        """Collect earlier measurements without waiting; leave unknown values out.

        own      a running pipeline that is placed again: its reservations count as free
        measure  idle nodes: they are measured now, with the links from and to them
        """
        reply, usable = self._machines(model, dtype, own=own)
        new = frozenset(measure)
        machines = {machine.node_id: machine for machine in reply.machines}
        layers = [
            self._profile(machines[node.node_id], node, reply, dtype, known_only=node.node_id not in new)
            for node in usable
        ]
        links = [
            self._links_from(node, ids, known_only=known_only)
            for node in usable
            for known_only, ids in _links_to_ask(node, usable, new)
        ]
        _, found = await asyncio.gather(asyncio.gather(*layers), asyncio.gather(*links))
        for each in found:
            reply.links.extend(each)
        return reply

    def _machines(self, model: LocalModel, dtype: str, *, own: str = "") -> tuple[pb.SurveyReply, list[pb.NodeState]]:
        """Return a survey of every node that can compute, and those nodes."""
        reply = pb.SurveyReply(model=model.name, model_config=model.config_json)
        usable: list[pb.NodeState] = []
        for node in self._peers.nodes():
            machine = _machine(node, dtype, own=own)
            if machine is not None:
                usable.append(node)
                reply.machines.append(machine)
            else:
                reply.unusable.append(_why_not(node))
        for node_id, other in self._peers.broken_links():
            reply.broken.add(node_id=node_id, other_id=other)
        return reply, usable

    async def _links_from(self, node: pb.NodeState, ids: Sequence[str], *, known_only: bool) -> list[pb.LinkProfile]:
        request = pb.ProfileLinksRequest(hello=self._peers.hello, node_ids=ids, known_only=known_only)
        try:
            return await self._peers.profile_links(node.node_id, request)
        except EdgepipeError as error:
            logger.info("links not known node=%s: %s", node.name, error)
            return []

    async def links(self) -> list[pb.LinkProfile]:
        """Measure every directed link between nodes. Raises LinkNotMeasured when a node goes meanwhile."""
        nodes = list(self._peers.nodes())
        return await self._links(nodes) if len(nodes) > 1 else []

    async def _profile_all(
        self, nodes: Sequence[pb.NodeState], reply: pb.SurveyReply, dtype: str, *, fresh: bool
    ) -> None:
        """Profile nodes of one machine in turn: at the same time they would slow each other."""
        machines = {machine.node_id: machine for machine in reply.machines}
        for node in nodes:
            await self._profile(machines[node.node_id], node, reply, dtype, fresh=fresh)

    async def _profile(
        self,
        machine: pb.SurveyedMachine,
        node: pb.NodeState,
        reply: pb.SurveyReply,
        dtype: str,
        *,
        known_only: bool = False,
        fresh: bool = False,
    ) -> None:
        request = pb.ProfileLayerRequest(
            hello=self._peers.hello,
            model_config=reply.model_config,
            dtype="" if dtype == "auto" else dtype,
            known_only=known_only,
            fresh=fresh,
        )
        try:
            machine.layer.CopyFrom(await self._peers.profile_layer(node.node_id, request))
        except EdgepipeError as error:  # a plan then estimates its speed from its memory and matrix rates
            logger.info("not measured node=%s: %s", node.name, error)

    async def _links(self, nodes: Sequence[pb.NodeState], *, fresh: bool = False) -> list[pb.LinkProfile]:
        """Measure all working directed links. Each node begins with its successor, so that few meet at one node."""
        ids, broken = [node.node_id for node in nodes], self._peers.broken_links()

        async def ask(index: int) -> list[pb.LinkProfile]:
            others = [node_id for node_id in (*ids[index + 1 :], *ids[:index]) if (ids[index], node_id) not in broken]
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
    """Split the other nodes by whether a node only reports the link (True) or measures it (False): it measures links
    that touch a new node."""
    others = [other.node_id for other in usable if other.node_id != node.node_id]
    measured = [node_id for node_id in others if node.node_id in new or node_id in new]
    known = [node_id for node_id in others if node_id not in measured]
    return [(known_only, ids) for known_only, ids in ((True, known), (False, measured)) if ids]


def _machine(node: pb.NodeState, dtype: str, *, own: str = "") -> pb.SurveyedMachine | None:
    """Return a node's entry in a survey; None while it cannot compute."""
    room = next(iter(rooms_of(node, dtype, own=own)), None)
    if room is None:
        return None
    unusable = ("failed",) if own else ("starting", "failed")  # the same rule as in ``rooms_of``
    device = next(candidate for candidate in node.devices if candidate.state not in unusable)
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
