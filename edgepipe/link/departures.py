"""PURE: what one hop sends next. Express steps pass the bytes of bulk steps that have not left.

A *bulk* step has prompt tokens, so its activations take many messages; any other step is *express*. Each class is sent
in step order and has credits of its own. A bulk step leaves in pieces, as ``Pacing`` allows. After each express step,
one piece of a waiting bulk step is due, so that many small steps cannot stop a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.backend.types import Activations, TokenIds
from edgepipe.ids import StepId
from edgepipe.link.outbox import Outbox, Parcel
from edgepipe.link.pacing import MOST_PIECE_BYTES, Pacing


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes of one step for one message."""

    parcel: Parcel
    bulk: bool
    chunk: int  # counts from 0
    data: memoryview
    last: bool
    receipt: bool  # the receiver's acknowledgement is wanted at once


class _Cursor:
    """The place in the step that is being sent."""

    def __init__(self) -> None:
        self.parcel: Parcel | None = None
        self.chunk = self.start = 0

    def take(self, parcel: Parcel, most_bytes: int) -> tuple[int, memoryview, bool]:
        """Return the next piece's number, its bytes, and whether it is the step's last."""
        if self.parcel is not parcel:
            self.parcel, self.chunk, self.start = parcel, 0, 0
        chunk, data = self.chunk, parcel.data[self.start : self.start + most_bytes]
        self.chunk, self.start = chunk + 1, self.start + len(data)
        return chunk, data, self.start >= len(parcel.data)


class Departures:
    """The steps that one hop owes its receiver, in both classes, and the place in each."""

    def __init__(self, *, max_queued: int, most_piece_bytes: int = MOST_PIECE_BYTES) -> None:
        """``max_queued``: steps of one class that may wait."""
        self.pacing = Pacing()
        self._most_piece_bytes = most_piece_bytes
        self._outboxes = (Outbox(max_queued=max_queued), Outbox(max_queued=max_queued))  # express, bulk
        self._cursors = (_Cursor(), _Cursor())
        self._bulk_is_due = False

    def waiting(self, *, bulk: bool) -> int:
        """Return the number of steps of a class that are not acknowledged."""
        return len(self._outboxes[bulk])

    def put(self, step: StepId, activations: Activations | TokenIds, queued_s: float, *, bulk: bool) -> None:
        """Queue a step. Raises LocalProtocolError if a class's steps are not ascending or too many wait."""
        self._outboxes[bulk].put(step, activations, queued_s)

    def rewind(self) -> None:
        """Begin again with a new stream: all that is not acknowledged is sent again, once grants allow it."""
        for outbox in self._outboxes:
            outbox.rewind()
        self._cursors = (_Cursor(), _Cursor())
        self._bulk_is_due = False
        self.pacing.restart()

    def grant(self, step: StepId, credits: int, *, bulk: bool) -> bool:
        """Drop steps of a class up to ``step``, which have arrived, and allow ``credits`` more.

        Returns whether any was dropped.
        """
        return self._outboxes[bulk].grant(step, credits)

    def next(self, now_s: float) -> Piece | None:
        """Return the piece to write at ``now_s`` (monotonic); None while nothing waits or may be written."""
        express, bulk = (outbox.next() for outbox in self._outboxes)
        if bulk is not None and not self.pacing.may_send:
            bulk = None
        express_has_begun = express is not None and self._cursors[False].parcel is express
        if bulk is not None and (express is None or (self._bulk_is_due and not express_has_begun)):
            self._bulk_is_due = False
            return self._take(bulk, min(self.pacing.piece_bytes, self._most_piece_bytes), now_s, bulk=True)
        return self._take(express, self._most_piece_bytes, now_s, bulk=False) if express is not None else None

    def _take(self, parcel: Parcel, most_bytes: int, now_s: float, *, bulk: bool) -> Piece:
        chunk, data, last = self._cursors[bulk].take(parcel, most_bytes)
        if last:
            self._outboxes[bulk].written(parcel)
            self._bulk_is_due |= not bulk
        receipt = self.pacing.sent(len(data), bulk=bulk, now_s=now_s)
        return Piece(parcel=parcel, bulk=bulk, chunk=chunk, data=data, last=last, receipt=receipt)
