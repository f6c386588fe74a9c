"""The receiving end of one hop, independent of the transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from edgepipe.clock import Clock
from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import Epoch, StepId
from edgepipe.link.assembly import Assembler
from edgepipe.link.protocol import OnStep
from edgepipe.wire.reports import LinkSample

MAX_HELD_BYTES = 64 << 20  # size of steps without a plan: one prefill of 2048 tokens at a hidden size of 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Express steps up to ``step`` have arrived whole; ``credits`` more may be sent. The same for bulk steps."""

    step: StepId
    credits: int
    bulk_step: StepId
    bulk_credits: int
    sample: LinkSample | None


class _FirstPiece(NamedTuple):
    """The first piece of a class's newest step."""

    sent_us: int = 0  # sender's wall clock
    received_us: int = 0  # receiver's wall clock
    total_bytes: int = 0  # bytes of all steps that had come, this piece included


_Whole = tuple[StepId, int, _FirstPiece, int, int]
"""A step, its bytes, its first piece, the wall clock at its last piece, and the bytes that came between the two."""


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
        self._assemblers = (Assembler(window=window), Assembler(window=window))  # express, bulk
        self._firsts = [_FirstPiece(), _FirstPiece()]
        self._total_bytes = 0  # bytes of all frames
        self._clock = clock
        self._on_step = on_step
        self._on_held = on_held  # called when bytes come before their plan
        self._newest: _Whole | None = None  # not granted yet
        self._feed: Feed | None = None
        self._window = window
        self._ungranted = 0  # steps taken since the last grant
        self._closed = False
        self._room = asyncio.Event()  # set while less than MAX_HELD_BYTES wait for plans
        self._room.set()

    @property
    def repeats(self) -> int:
        """Chunks that came again and were dropped."""
        return sum(assembler.repeats for assembler in self._assemblers)

    def waiting_for_plan(self, *, bulk: bool) -> StepId | None:
        """The step of a class whose bytes came before its plan; None without such a step."""
        return self._assemblers[bulk].arriving

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
        newest, self._newest = self._newest, None
        self._ungranted = 0
        sample = None
        if newest is not None:
            step, num_bytes, first, last_received_us, spread_bytes = newest
            sample = LinkSample(
                step=step,
                num_bytes=num_bytes,
                first_sent_us=first.sent_us,
                first_received_us=first.received_us,
                last_received_us=last_received_us,
                spread_bytes=spread_bytes,
                told_us=self._now_us(),
            )
        express, bulk = self._assemblers
        return Grant(
            step=express.complete,
            credits=express.credits,
            bulk_step=bulk.complete,
            bulk_credits=bulk.credits,
            sample=sample,
        )

    def frame(self, step: StepId, chunk: int, data: bytes, sent_us: int, *, bulk: bool) -> None:
        """Take a frame. Raises RemoteProtocolError, which ends the stream and not the stage."""
        self._total_bytes += len(data)
        self._check_class(step, bulk=bulk)
        if chunk == 0:
            self._firsts[bulk] = _FirstPiece(sent_us, self._now_us(), self._total_bytes)
        assembler = self._assemblers[bulk]
        whole = assembler.add(step, chunk, data)
        if assembler.held_bytes:
            self._on_held()
            if self._held_bytes > MAX_HELD_BYTES:
                self._room.clear()
        if whole is not None:
            first = self._firsts[bulk]
            self._newest = (step, whole.nbytes, first, self._now_us(), self._total_bytes - first.total_bytes)
            self._on_step(step, whole, bulk)

    async def room(self) -> None:
        """Wait until plans have caught up with the bytes held for them."""
        await self._room.wait()

    def expect(self, step: StepId, num_bytes: int, *, bulk: bool) -> None:
        """Take from the plan that ``step`` brings ``num_bytes``. Call it in step order, before or after bytes arrive.

        Raises RemoteProtocolError if the bytes that arrived do not fit.
        """
        self._check_class(step, bulk=bulk)
        whole = self._assemblers[bulk].expect(step, num_bytes)
        if self._held_bytes <= MAX_HELD_BYTES:
            self._room.set()
        if whole is not None:
            self._on_step(step, whole, bulk)  # unmeasured: its last byte came before its plan

    def taken(self, *, bulk: bool) -> None:
        """Return the credit of the oldest delivered step of the class to the sender: compute has the step.

        While the sender knows of half the window, the grant can wait: one message per step would cost both ends too
        much.
        """
        self._assemblers[bulk].taken()
        self._ungranted += 1
        if self._feed is not None:
            self._feed.granted(soon=2 * self._ungranted < self._window)

    def close(self) -> None:
        """End the stream in use and take no more."""
        self._closed = True
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.ended()

    @property
    def _held_bytes(self) -> int:
        return sum([assembler.held_bytes for assembler in self._assemblers])

    def _check_class(self, step: StepId, *, bulk: bool) -> None:
        if self._assemblers[not bulk].awaits(step):
            raise RemoteProtocolError(
                f"the plan and the activations of step {step} disagree on its class",
                fact="steps with prompt tokens are bulk, others are not",
            )

    def _now_us(self) -> int:
        return int(self._clock.wall_s() * 1e6)
