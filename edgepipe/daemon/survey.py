"""Everything that a plan is made of: every node's room and speed with a model, every link; measured where unknown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import groupby

from edgepipe.daemon.memory import headroom_bytes, uses_host_memory
from edgepipe.daemon.models import LocalModel
from edgepipe.daemon.peers import Peers
from edgepipe.daemon.rooms import rooms_of
from edgepipe.errors import EdgepipeError, LinkNotMeasured
from edgepipe.wire.v1 import node_pb2 as pb

logger = logging.getLogger(__name__)


class Surveyor:
    """Asks the cluster's nodes."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def survey(self, model: LocalModel, dtype: str) -> pb.SurveyReply:
        """Raises LinkNotMeasured when a node goes while its links are measured."""
        told = pb.SurveyReply(model=model.name, model_config=model.config_json)
        usable: list[pb.NodeState] = []
        for node in self._peers.nodes():
            machine = _machine(node, dtype)
            if machine is not None:
                usable.append(node)
                told.machines.append(machine)
            else:
                told.unusable.append(_why_not(node))
        await asyncio.gather(
            *(self._profile_all(list(nodes), told, dtype) for _, nodes in groupby(sorted(usable, key=_host), key=_host))
        )
        if len(usable) > 1:
            told.links.extend(await self._links(usable))
        return told

    async def links(self) -> list[pb.LinkProfile]:
        """Every directed link between nodes. Raises LinkNotMeasured when a node goes meanwhile."""
        nodes = list(self._peers.nodes())
        return await self._links(nodes) if len(nodes) > 1 else []

    async def _profile_all(self, nodes: Sequence[pb.NodeState], told: pb.SurveyReply, dtype: str) -> None:
        """Nodes of one machine one after the other: side by side they would slow each other."""
        machines = {one.node_id: one for one in told.machines}
        for node in nodes:
            request = pb.ProfileLayerRequest(
                hello=self._peers.hello, model_config=told.model_config, dtype="" if dtype == "auto" else dtype
            )
            try:
                machines[node.node_id].layer.CopyFrom(await self._peers.profile_layer(node.node_id, request))
            except EdgepipeError as error:  # what it can do is then estimated from its memory's and matrix rates
                logger.info("not measured node=%s: %s", node.name, error)

    async def _links(self, nodes: Sequence[pb.NodeState]) -> list[pb.LinkProfile]:
        """All directed links; each node begins with its successor, so that few pairs meet at one node."""
        ids = [node.node_id for node in nodes]

        async def ask(index: int) -> list[pb.LinkProfile]:
            others = [*ids[index + 1 :], *ids[:index]]
            request = pb.ProfileLinksRequest(hello=self._peers.hello, node_ids=others)
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


def _machine(node: pb.NodeState, dtype: str) -> pb.SurveyedMachine | None:
    """What a node offers; None while it cannot compute."""
    room = next(iter(rooms_of(node, dtype)), None)
    if room is None:
        return None
    device = next(one for one in node.devices if one.state not in ("starting", "failed"))
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
