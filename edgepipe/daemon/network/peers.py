"""Calls from this daemon to nodes, itself included: one control channel per node, and a channel per transfer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc.aio

from edgepipe.clock import Clock
from edgepipe.cluster.membership import Membership
from edgepipe.config import Timeouts
from edgepipe.daemon.network.local_node import LocalNode
from edgepipe.daemon.offers import EngineRecords
from edgepipe.errors import EdgepipeError, NodeUnreachable
from edgepipe.ids import Epoch, NodeId
from edgepipe.link.channels import make_channel, translated
from edgepipe.planner.layer_profile import LayerProfile
from edgepipe.security.mutual_tls import Security
from edgepipe.wire.children import PrepareProgress, ProfileLayerRequest
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.common import Hello, epoch_from_wire, epoch_to_wire, hello_to_wire
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import (
    KeepCopyRequest,
    ProfileLinksReply,
    RebalanceRequest,
    ServeRecord,
    StartEngineRequest,
    VouchReply,
)
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.wire.v1 import node_pb2_grpc
from edgepipe.wire.v1.engine_pb2 import DescribeEngine
from edgepipe.wire.v1.engine_pb2_grpc import EngineStub

logger = logging.getLogger(__name__)

_PROFILE_S = 60.0  # several shapes may wait for one device
_KNOWN_S = 0.5  # time to report earlier measurements; the plan estimates a node that does not answer in time
_STAND_BY_S = 10.0  # a busy machine starts Python slowly; a draining node rather ends than wait longer
_COPY_S = 24 * 3600.0  # a model's 40 GB at a third of a slow radio link; received parts are kept for the next attempt

_R = TypeVar("_R", pb.StartEngineRequest, pb.RebalanceRequest, pb.ProfileLayerRequest, pb.KeepCopyRequest)


@dataclass(frozen=True, slots=True)
class _Control:
    """The control channel to a node."""

    address: str
    channel: grpc.aio.Channel


@dataclass(kw_only=True, eq=False)
class Peers:
    """Addresses and channels of the cluster's nodes."""

    local: LocalNode
    membership: Membership
    hello: Hello
    security: Security
    timeouts: Timeouts
    clock: Clock
    book: EngineRecords

    def __post_init__(self) -> None:
        self._hello = hello_to_wire(self.hello)
        self._since_s = self.clock.monotonic_s()
        # One per node id: an address may pass to another node, with another key.
        self._channels: dict[str, _Control] = {}

    def nodes(self) -> list[NodeState]:
        """Return this node and every reachable member, without engines that no record names."""
        return [self.local.state, *(self.bound(member.node) for member in self.membership.reachable())]

    def bound(self, node: NodeState) -> NodeState:
        """Return a node's state without engines that no record names."""
        engines = tuple(engine for engine in node.engines if self.book.binds(node.node_id, engine))
        return node if len(engines) == len(node.engines) else replace(node, engines=engines)

    def node(self, node_id: str) -> NodeState:
        """Return a present node. Raises NodeUnreachable."""
        for node in self.nodes():
            if node.node_id == node_id:
                return node
        known = self.membership.member(node_id)
        name = known.node.name if known else node_id
        raise NodeUnreachable(f"node {name} is not in the cluster now", next_step="see 'edgepipe status'", node=name)

    @property
    def own_id(self) -> NodeId:
        """This node's id."""
        return self.local.state.node_id

    @property
    def own_drains(self) -> bool:
        """Whether this node is draining."""
        return self.local.state.draining

    def is_gone(self, node_id: str) -> bool:
        """Return whether this node itself knows that the node is away or hands its engines over."""
        if self.is_self(node_id):
            return self.own_drains
        member = self.membership.member(node_id)
        if member is None:  # never met: after a power cut the node may be a little late
            return self.clock.monotonic_s() - self._since_s >= self.timeouts.dead_max_s
        return not member.reachable or member.node.draining

    def reaches(self, node_id: str) -> bool:
        """Return whether the node is this one or a member that is heard, and is not draining."""
        return any(node.node_id == node_id and not node.draining for node in self.nodes())

    def broken_links(self) -> frozenset[tuple[NodeId, NodeId]]:
        """Return both directions of every pair of nodes that are heard here and do not hear each other."""
        pairs = self.membership.broken_links()
        return frozenset([*pairs, *((other, node_id) for node_id, other in pairs)])

    def is_self(self, node_id: str) -> bool:
        """Return whether this is this node's id."""
        return node_id == self.local.state.node_id

    async def start_engine(self, node_id: str, request: StartEngineRequest) -> None:
        """Call ``Node.StartEngine``. Raises its errors and LinkError."""
        with translated(self.node(node_id).name):
            message = self._with_hello(to_wire(request, pb.StartEngineRequest))
            await self._stub(node_id).StartEngine(message, timeout=self.timeouts.child_start_s)

    async def stand_by(self, node_id: str) -> None:
        """Call ``Node.StandBy``. Raises its errors and LinkError."""
        with translated(self.node(node_id).name):
            await self._stub(node_id).StandBy(pb.StandByRequest(hello=self._hello), timeout=_STAND_BY_S)

    def engine_state(self, node_id: str, pipeline_id: str) -> str:
        """Return the state that a node reports for its engine of the pipeline; empty without an engine."""
        engines = (engine for node in self.nodes() if node.node_id == node_id for engine in node.engines)
        return next((engine.state for engine in engines if engine.pipeline_id == pipeline_id), "")

    async def stop_engine(self, node_id: str, pipeline_id: str, record: ServeRecord | None) -> None:
        """Call ``Node.StopEngine`` with the record of the stop. Raises its errors and LinkError."""
        message = to_wire(record, pb.ServeRecord) if record is not None else None
        request = pb.StopEngineRequest(hello=self._hello, pipeline_id=pipeline_id, record=message)
        with translated(self.node(node_id).name):
            await self._stub(node_id).StopEngine(request, timeout=2 * self.timeouts.child_stop_s)

    async def rebalance(self, node_id: str, request: RebalanceRequest) -> bool:
        """Call ``Node.Rebalance``; return whether stages move. Raises its errors and LinkError."""
        with translated(self.node(node_id).name):
            message = self._with_hello(to_wire(request, pb.RebalanceRequest))
            return (await self._stub(node_id).Rebalance(message, timeout=self.timeouts.child_start_s)).changed

    async def vouch_all(self, pipeline_id: str, node_id: str, *, challenge: bytes = b"") -> dict[str, VouchReply]:
        """Ask all other reachable members about the pipeline and the node; leave out those that do not answer.

        ``challenge``: members that hear the node get the node's proof for it.
        """
        timeout_s = self.timeouts.connect_s
        others = [node.node_id for node in self.nodes() if not self.is_self(node.node_id)]
        replies = await asyncio.gather(
            *(self._vouch(other, pipeline_id, node_id, challenge, timeout_s=timeout_s) for other in others)
        )
        return {other: reply for other, reply in zip(others, replies, strict=True) if reply is not None}

    async def proof_of(self, node_id: str, pipeline_id: str, challenge: bytes) -> bytes:
        """Return another node's proof that it runs the pipeline's engine; empty without an answer.

        It takes at most half of the time that the node that asked this one waits.
        """
        timeout_s = self.timeouts.connect_s / 2
        reply = await self._vouch(node_id, pipeline_id, node_id, challenge, timeout_s=timeout_s)
        return reply.proof if reply is not None else b""

    async def _vouch(
        self, asked: str, pipeline_id: str, node_id: str, challenge: bytes, *, timeout_s: float
    ) -> VouchReply | None:
        request = pb.VouchRequest(hello=self._hello, pipeline_id=pipeline_id, node_id=node_id, challenge=challenge)
        try:
            with translated(self.node(asked).name):
                reply = await self._stub(asked).Vouch(request, timeout=timeout_s)
                return from_wire(reply, VouchReply)
        except EdgepipeError as error:
            logger.info("no answer about pipeline=%s from node=%s: %s", pipeline_id, asked, error)
            return None

    async def release(self, node_id: str, pipeline_id: str, epoch: Epoch) -> None:
        """Call ``Node.Release`` for that epoch and earlier ones. Raises its errors and LinkError."""
        request = pb.ReleaseRequest(hello=self._hello, pipeline_id=pipeline_id, epoch=epoch_to_wire(epoch))
        with translated(self.node(node_id).name):
            await self._stub(node_id).Release(request, timeout=2 * self.timeouts.child_stop_s)

    async def profile_layer(self, node_id: str, request: ProfileLayerRequest) -> LayerProfile:
        """Call ``Node.ProfileLayer``. Raises its errors and LinkError."""
        timeout_s = _KNOWN_S if request.known_only else _PROFILE_S
        with translated(self.node(node_id).name):
            message = self._with_hello(to_wire(request, pb.ProfileLayerRequest))
            return from_wire(await self._stub(node_id).ProfileLayer(message, timeout=timeout_s), LayerProfile)

    async def profile_links(
        self, node_id: str, others: Iterable[str], *, known_only: bool = False, fresh: bool = False
    ) -> ProfileLinksReply:
        """Call ``Node.ProfileLinks`` for the links to ``others``. Raises its errors and LinkError."""
        request = pb.ProfileLinksRequest(hello=self._hello, node_ids=others, known_only=known_only, fresh=fresh)
        timeout_s = _KNOWN_S if known_only else _PROFILE_S
        with translated(self.node(node_id).name):
            reply = await self._stub(node_id).ProfileLinks(request, timeout=timeout_s)
            return from_wire(reply, ProfileLinksReply)

    async def keep_copy(self, node_id: str, request: KeepCopyRequest) -> AsyncGenerator[PrepareProgress]:
        """Call ``Node.KeepCopy``. Raises its errors and LinkError; a lost node ends the call by its channel."""
        with translated(self.node(node_id).name):
            message = self._with_hello(to_wire(request, pb.KeepCopyRequest))
            async for progress in self._stub(node_id).KeepCopy(message, timeout=_COPY_S):
                yield from_wire(progress, PrepareProgress)

    async def engine_epoch(self, node_id: str, pipeline_id: str) -> Epoch | None:
        """Ask a pipeline's engine for its epoch; None if it does not answer in time."""
        try:
            engine = next(each for each in self.node(node_id).engines if each.pipeline_id == pipeline_id)
            async with make_channel(engine.address, self.security.to_process(engine.certificate)) as channel:
                with translated("the engine"):
                    state = await EngineStub(channel).Describe(
                        DescribeEngine(), wait_for_ready=True, timeout=self.timeouts.connect_s
                    )
        except (StopIteration, EdgepipeError):
            return None
        return epoch_from_wire(state.epoch)

    async def close(self) -> None:
        """Close the control channels."""
        for control in self._channels.values():
            await control.channel.close()
        self._channels.clear()

    def _with_hello(self, request: _R) -> _R:
        request.hello.CopyFrom(self._hello)
        return request

    def _stub(self, node_id: str) -> node_pb2_grpc.NodeAsyncStub:
        address = self.node(node_id).address
        control = self._channels.get(node_id)
        if control is None or control.address != address:
            control = _Control(address, make_channel(address, self.security.to_node(node_id)))
            # Replaced channels, and those of absent nodes, end with their last call. ``close`` would cancel its task.
            present = {node.node_id for node in self.nodes()}
            self._channels = {key: kept for key, kept in self._channels.items() if key in present}
            self._channels[node_id] = control
        return node_pb2_grpc.NodeStub(control.channel)
