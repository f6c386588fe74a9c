"""Measures the link to another node at the sizes of activations, on a channel of its own; keeps results a while."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgepipe.clock import Clock
from edgepipe.config import Timeouts
from edgepipe.daemon.network.peers import Peers
from edgepipe.errors import LinkError, NodeUnreachable, SendTimeout
from edgepipe.link.channels import make_channel, translated
from edgepipe.link.shaped import Network, PlainLine, delayed_replies
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import LinkProfile, ProfileLinksReply
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.wire.v1 import node_pb2_grpc

logger = logging.getLogger(__name__)

_SMALL_BYTES = 2 << 10  # one token's activations of a small model
_LARGE_BYTES = 256 << 10  # a frame
_PINGS = 9
_CALLS = 15
_ROUND_BYTES = (1 << 20, 1 << 20, 1 << 20, 4 << 20)
_SLOW_S = 0.2  # a slower round ends the measurement: so slow a wire dominates all other costs
_KEPT_S = 600.0
_FRESH_S = 10.0  # least age of a result to be measured again: no member can keep a wire busy with requests
_LONGEST_S = 10.0


@dataclass(frozen=True, slots=True)
class _Measured:
    """The newest measurement of the link to a node."""

    address: str  # the node's address at that time
    at_s: float  # monotonic
    link: LinkProfile


def sending_s(taken_s: float, trip_s: float) -> float:
    """Return the part of a round's seconds in which its bytes were sent.

    Small frames that waited for a busy machine can take longer than a whole round. At least half of a round is taken
    for sending, so that no link seems faster than twice what went over it.
    """
    return max(taken_s - trip_s, taken_s / 2)


class LinkProbes:
    """Measures the links that leave this node."""

    def __init__(self, *, peers: Peers, clock: Clock, timeouts: Timeouts, network: Network | None) -> None:
        """``network``: emulated, as it delays the node's activations; None: the real network."""
        self._peers = peers
        self._clock = clock
        self._timeouts = timeouts
        self._network = network
        self._known: dict[str, _Measured] = {}  # newest measurement by node id
        self._busy = asyncio.Lock()  # two measurements at a time would share the wire

    def known(self, node_ids: Sequence[str]) -> list[LinkProfile]:
        """Return earlier measurements of any age, including this node's host; leave unmeasured nodes out."""
        wanted = {*node_ids, self._peers.own_id}
        return [measured.link for node_id, measured in self._known.items() if node_id in wanted]

    async def measure(self, node_ids: Sequence[str], *, fresh: bool = False) -> ProfileLinksReply:
        """Measure one link after the other, this node's host first; ``fresh``: results older than 10 s, too.

        Nodes that do not answer on a new connection are reported as unreached.
        """
        links: list[LinkProfile] = []
        unreached: list[str] = []
        for node_id in [self._peers.own_id, *node_ids]:
            try:
                links.append(await self._one(self._peers.node(node_id), fresh=fresh))
            except (LinkError, NodeUnreachable) as error:
                logger.info("link not measured node=%s: %s", node_id, error)
                self._known.pop(node_id, None)
                unreached.append(node_id)
        return ProfileLinksReply(links=tuple(links), unreached=tuple(unreached))

    async def _one(self, node: NodeState, *, fresh: bool) -> LinkProfile:
        async with self._busy:
            known, kept_s = self._known.get(node.node_id), _FRESH_S if fresh else _KEPT_S
            # At another address the node may be behind another link, such as Wi-Fi instead of a cable.
            if known is not None and known.address == node.address and self._clock.monotonic_s() - known.at_s < kept_s:
                return known.link
            try:
                async with asyncio.timeout(_LONGEST_S):
                    own = self._peers.is_self(node.node_id)
                    found = await self._measure_host() if own else await self._measure(node)
            except TimeoutError as exc:
                raise SendTimeout(
                    f"node {node.name} does not answer probes", fact=f"waited {_LONGEST_S:.0f} s"
                ) from exc
            self._known[node.node_id] = _Measured(node.address, self._clock.monotonic_s(), found)
            return found

    async def _measure_host(self) -> LinkProfile:
        """Measure the cost of one small message: a call to this node is two messages, each handled at both ends."""
        own_id = self._peers.own_id
        trips: list[float] = []
        for _ in range(_CALLS):
            started_s = self._clock.monotonic_s()
            await self._peers.profile_links(own_id, (), known_only=True)
            trips.append(self._clock.monotonic_s() - started_s)
        return LinkProfile(sender=own_id, receiver=own_id, one_way_s=statistics.median(trips) / 4)

    async def _measure(self, node: NodeState) -> LinkProfile:
        credentials = self._peers.security.to_node(node.node_id)
        async with make_channel(node.address, credentials) as channel:
            with translated(f"node {node.name}"):
                call: Any = node_pb2_grpc.ProbesStub(channel).Echo()
                line = PlainLine(call.write, self._clock)
                carrier: asyncio.Future[None] | None = None
                if self._network is not None:
                    line = self._network.line(call.write, self._network.wire())
                    carrier = asyncio.ensure_future(line.run())
                try:
                    trips = [await self._round(call, line, [_SMALL_BYTES]) for _ in range(_PINGS)]
                    trip_s = statistics.median_low(trips)
                    rate = 0.0
                    for total in _ROUND_BYTES:
                        taken_s = await self._round(call, line, [_LARGE_BYTES] * (total // _LARGE_BYTES))
                        rate = max(rate, total / sending_s(taken_s, trip_s))  # other work only slows a round
                        if taken_s - trip_s > _SLOW_S:
                            break
                finally:
                    if carrier is not None:
                        carrier.cancel()
                await call.done_writing()
        return LinkProfile(sender=self._peers.own_id, receiver=node.node_id, one_way_s=trip_s / 2, bytes_per_s=rate)

    async def _round(self, call: Any, line: Any, sizes: list[int]) -> float:
        """Return the seconds from the first byte to the answer to the last frame."""
        started_s = self._clock.monotonic_s()
        for index, size in enumerate(sizes):
            frame = pb.EchoFrame(data=bytes(size), reply=index == len(sizes) - 1)
            await line.write(frame, size)
        await call.read()
        return self._clock.monotonic_s() - started_s


class ProbesService(node_pb2_grpc.ProbesServicer):
    """Answers probes."""

    def __init__(self, network: Network | None) -> None:
        self._network = network

    async def Echo(self, request_iterator: AsyncIterator[pb.EchoFrame], context: Any) -> AsyncGenerator[pb.EchoFrame]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Send a small answer to each frame that asks for one."""
        async with delayed_replies(self._network, context) as replies:
            async for frame in request_iterator:
                if frame.reply:
                    await replies.write(pb.EchoFrame())
        for reply in ():
            yield reply
