"""The sending end of a hop without a network: frames go straight to the receiver, on the event loop. For tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from edgepipe.backend.types import Activations, TokenIds
from edgepipe.clock import Clock
from edgepipe.errors import ConnectTimeout
from edgepipe.ids import StepId
from edgepipe.link.departures import Departures, Piece
from edgepipe.link.pacing import MOST_PIECE_BYTES
from edgepipe.link.protocol import OnSample, RingTarget, SendStats
from edgepipe.link.receiver import RingReceiver
from edgepipe.wire.pipelines import OpenRing


class MemorySender:
    """Follows the rules of the gRPC link: order, credits, chunks, copies. Clear ``flowing`` to stall it."""

    def __init__(
        self,
        target: RingTarget,
        *,
        find_receiver: Callable[[OpenRing], Awaitable[RingReceiver]],
        clock: Clock,
        on_sample: OnSample,
        most_piece_bytes: int = MOST_PIECE_BYTES,
    ) -> None:
        self.stats = SendStats()
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._target = target
        self._find_receiver = find_receiver
        self._clock = clock
        self._on_sample = on_sample
        self._departures = Departures(max_queued=target.max_queued, most_piece_bytes=most_piece_bytes)
        self._carried = 0  # bytes
        self._receiver: RingReceiver | None = None
        self._wake = asyncio.Event()
        self._connected = asyncio.Event()

    async def connected(self) -> None:
        """See ``Outgoing.connected``."""
        await self._connected.wait()

    def send(self, step: StepId, activations: Activations | TokenIds, *, bulk: bool) -> None:
        """See ``Outgoing.send``."""
        self._departures.put(step, activations, self._clock.monotonic_s(), bulk=bulk)
        self._wake.set()

    async def run(self) -> None:
        """See ``Outgoing.run``."""
        try:
            async with asyncio.timeout(self._target.connect_s):
                self._receiver = await self._find_receiver(self._target.opening)
        except TimeoutError as exc:
            raise ConnectTimeout("the next stage did not open its end of the link") from exc
        self._receiver.attach(self)
        self._connected.set()
        try:
            while True:
                while (piece := self._departures.next(self._clock.monotonic_s())) is not None:
                    await self._carry(self._receiver, piece)
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._receiver.detach(self)

    def granted(self, *, soon: bool = False) -> None:
        """See ``Feed.granted``: always at once."""
        if self._receiver is None:
            return
        grant = self._receiver.grant()
        self._departures.grant(grant.step, grant.credits, bulk=False)
        self._departures.grant(grant.bulk_step, grant.bulk_credits, bulk=True)
        self._wake.set()
        if grant.sample is not None:
            self._on_sample(replace(grant.sample, acknowledged_us=int(self._clock.wall_s() * 1e6)))

    def ended(self) -> None:
        """See ``Feed.ended``: no more frames are taken."""
        self.flowing.clear()

    async def _carry(self, receiver: RingReceiver, piece: Piece) -> None:
        await self.flowing.wait()
        sent_us = int(self._clock.wall_s() * 1e6)
        receiver.frame(piece.parcel.step, piece.chunk, bytes(piece.data), sent_us, bulk=piece.bulk)
        self._carried += len(piece.data)
        self._departures.pacing.received(self._carried, self._clock.monotonic_s())
        await receiver.room()
        self.stats.steps += piece.last
