"""The receiving end of one hop, independent of the transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from edgepipe.clock import Clock
from edgepipe.ids import Epoch, StepId
from edgepipe.link.assembly import Assembler
from edgepipe.link.protocol import OnStep
from edgepipe.wire.plans import LinkSample

MAX_HELD_BYTES = 64 << 20  # size of steps without a plan: one prefill of 2048 tokens at a hidden size of 16384


@dataclass(frozen=True, slots=True)
class Grant:
    """Steps up to ``step`` have arrived whole; ``credits`` more may be sent beyond it."""

    step: StepId
    credits: int
    sample: LinkSample | None


class Feed(Protocol):
    """One stream that brings frames to a receiver."""

    def granted(self, *, soon: bool = False) -> None:
        """Send the new grant to the sender; ``soon``: the sender has room left, so the grant may wait for others."""
        ...

    def ended(self) -> None:
        """Stop: the receiver is closed or has a newer feed."""
        ...


class RingReceiver:
    """Feeds one slice of one epoch. Streams come and go (a broken one is redialled); received bytes stay.

    Only the newest stream is in use; an older one must end.
    """

    def __init__(
        self, *, epoch: Epoch, window: int, clock: Clock, on_step: OnStep, on_held: Callable[[], None]
    ) -> None:
        self.epoch = epoch
        self._assembler = Assembler(window=window)
        self._clock = clock
        self._on_step = on_step
        self._on_held = on_held  # called when bytes come before their plan
        self._first_sent_us = 0
        self._first_received_us = 0
        self._sample: LinkSample | None = None
        self._feed: Feed | None = None
        self._window = window
        self._ungranted = 0  # steps taken since the last grant
        self._closed = False
        self._room = asyncio.Event()  # set while less than MAX_HELD_BYTES wait for plans
        self._room.set()

    @property
    def repeats(self) -> int:
        """Chunks that came again and were dropped."""
        return self._assembler.repeats

    @property
    def waiting_for_plan(self) -> StepId | None:
        """The step whose bytes came before its plan; None without such a step."""
        return self._assembler.arriving

    def attach(self, feed: Feed) -> None:
        """Begin a stream, which replaces the one before."""
        previous, self._feed = self._feed, feed
        if previous is not None:
            previous.ended()
        if self._closed:
            feed.ended()
        else:
            feed.granted()

    def detach(self, feed: Feed) -> None:
        """Note the end of a stream."""
        if self._feed is feed:
            self._feed = None

    def grant(self) -> Grant:
        """Return what the sender may do now, and the newest measurement, once."""
        sample, self._sample = self._sample, None
        self._ungranted = 0
        if sample is not None:
            sample = replace(sample, told_us=self._now_us())
        return Grant(self._assembler.complete, self._assembler.credits, sample)

    def frame(self, step: StepId, chunk: int, data: bytes, sent_us: int) -> None:
        """Take a frame. Raises RemoteProtocolError, which ends the stream and not the stage."""
        if chunk == 0:
            self._first_sent_us, self._first_received_us = sent_us, self._now_us()
        whole = self._assembler.add(step, chunk, data)
        if self._assembler.held_bytes:
            self._on_held()
            if self._assembler.held_bytes > MAX_HELD_BYTES:
                self._room.clear()
        if whole is not None:
            self._sample = self._measured(step, whole.nbytes)
            self._on_step(step, whole)

    async def room(self) -> None:
        """Wait until plans have caught up with the bytes held for them."""
        await self._room.wait()

    def expect(self, step: StepId, num_bytes: int) -> None:
        """See ``Incoming.expect``."""
        whole = self._assembler.expect(step, num_bytes)
        if self._assembler.held_bytes <= MAX_HELD_BYTES:
            self._room.set()
        if whole is not None:
            self._on_step(step, whole)  # unmeasured: its last byte came before its plan

    def taken(self) -> None:
        """See ``Incoming.taken``. While the sender knows of half the window, the grant can wait: one message per step
        would cost both ends too much."""
        self._assembler.taken()
        self._ungranted += 1
        if self._feed is not None:
            self._feed.granted(soon=2 * self._ungranted < self._window)

    def close(self) -> None:
        """End the stream in use and take no more."""
        self._closed = True
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.ended()

    def _measured(self, step: StepId, num_bytes: int) -> LinkSample:
        return LinkSample(
            step=step,
            num_bytes=num_bytes,
            first_sent_us=self._first_sent_us,
            first_received_us=self._first_received_us,
            last_received_us=self._now_us(),
        )

    def _now_us(self) -> int:
        return int(self._clock.wall_s() * 1e6)
