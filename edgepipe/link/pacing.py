"""PURE: how many bytes of bulk steps may be under way on a link. Knows no sockets; callers give the time.

What has left for the network cannot be passed any more: it waits in the buffers of gRPC, of both systems and of the
switch or access point between them, which together hold megabytes. So the sender keeps the bytes of bulk steps that the
receiver has not acknowledged within a window::

    window = rate * (base + QUEUE_S)

``rate`` is the fastest recent rate at which bytes arrived, ``base`` the fastest round trip of a piece without other
pieces ahead of it. Such a window keeps the slowest part of the way busy, with ``QUEUE_S`` of bytes in front of it,
wherever that part is. Where round trips vary, as beside busy programs, ``QUEUE_S`` grows to twice their mean
deviation: otherwise the link idles while a receipt is late. Rate and base are measured as BBR measures them (Cardwell
et al., "BBR: Congestion-Based Congestion Control", ACM Queue 2016), but a piece's round trip ends in the receiving
program. Express steps leave at once; only their bytes count.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from edgepipe.errors import RemoteProtocolError

PIECE_S = 0.002
"""Time of a piece of a bulk step on the link. A piece that is being sent is not interrupted."""

QUEUE_S = 2 * PIECE_S
"""Time of the bytes that wait for the link. It covers the time until an acknowledgement has been worked off."""

LEAST_PIECE_BYTES = 16 << 10  # a message costs both hosts about as much as copying and encrypting this
MOST_PIECE_BYTES = 512 << 10  # the wire's limit; 2 MB steps on loopback: 700 MB/s; with half of it: 500 MB/s

_FIRST_WINDOW_BYTES = 256 << 10  # window before the first measurement: 20 ms at 100 Mbit/s
_MOST_WINDOW_BYTES = 32 << 20  # 25 ms at 10 Gbit/s
_RECEIPTS = 4  # receipts per window: on a fast link a window has many pieces
_SAMPLES = 16  # rates in the current period and in the one before, of which the fastest counts
_SMOOTHING = 1 / 8  # weight of the newest round trip
_MOST_QUEUE_S = 0.01  # bound for hosts that are away for milliseconds now and then
_BASES = 8  # round trips without others ahead, of which the fastest counts


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A written piece whose receipt was asked for, and the stream's state when it was written."""

    end: int  # bytes of the stream up to its last
    bulk_end: int  # the same of bulk steps alone
    num_bytes: int
    sent_s: float
    received: int  # acknowledged bytes
    received_s: float  # time of the acknowledgement; after an idle time: when the first piece was written
    first_sent_s: float  # time when the newest acknowledged piece was written
    alone: bool  # no bulk bytes were under way
    full: bool  # the window was full behind it: the rate is the link's, not the stage's


class Pacing:
    """Bounds a link's bulk bytes that are under way, by the receipts for them. Measurements outlive a broken stream."""

    def __init__(self) -> None:
        self._rate = self._rate_before = 0.0  # fastest of this period and of the one before, bytes per second
        self._samples = 0  # samples of this period
        self._bases: deque[tuple[float, int]] = deque(maxlen=_BASES)  # round trips, and the pieces' bytes
        self._mean_s = self._deviation_s = 0.0  # round trips behind a full window
        self.restart()

    def restart(self) -> None:
        """Begin a new stream: nothing is under way."""
        self._sent = self._received = 0  # bytes of the stream
        self._bulk_sent = self._bulk_received = 0
        self._received_s = self._first_sent_s = 0.0
        self._asked = 0  # bulk bytes sent when the newest receipt was asked for
        self._under_way: deque[_UnderWay] = deque()

    @property
    def rate(self) -> float:
        """Bytes per second of the link; 0 before the first measurement."""
        return max(self._rate, self._rate_before)

    @property
    def piece_bytes(self) -> int:
        """Size of the pieces of bulk steps."""
        size = self.rate * PIECE_S or _FIRST_WINDOW_BYTES / 4
        return int(min(max(size, LEAST_PIECE_BYTES), MOST_PIECE_BYTES))

    @property
    def window_bytes(self) -> int:
        """Most bulk bytes that may be under way when a piece is written."""
        rate = self.rate
        if not self._bases or not rate:
            return _FIRST_WINDOW_BYTES
        base_s = min([max(0.0, round_trip_s - num_bytes / rate) for round_trip_s, num_bytes in self._bases])
        waits_s = max(QUEUE_S, min(2 * self._deviation_s, _MOST_QUEUE_S))
        return int(min(max(rate * (base_s + waits_s), 2 * self.piece_bytes), _MOST_WINDOW_BYTES))

    @property
    def may_send(self) -> bool:
        """Whether a piece of a bulk step may be written now."""
        return self._bulk_sent - self._bulk_received < self.window_bytes

    def sent(self, num_bytes: int, *, bulk: bool, now_s: float) -> bool:
        """Note a piece that is written at ``now_s`` (monotonic). Return whether its receipt is needed."""
        if self._sent == self._received:
            self._received_s = self._first_sent_s = now_s
        self._sent += num_bytes
        if not bulk:
            return False
        alone = self._bulk_sent == self._bulk_received
        self._bulk_sent += num_bytes
        full = not self.may_send
        if not (alone or full) and _RECEIPTS * (self._bulk_sent - self._asked) < self.window_bytes:
            return False
        self._asked = self._bulk_sent
        self._under_way.append(
            _UnderWay(
                end=self._sent,
                bulk_end=self._bulk_sent,
                num_bytes=num_bytes,
                sent_s=now_s,
                received=self._received,
                received_s=self._received_s,
                first_sent_s=self._first_sent_s,
                alone=alone,
                full=full,
            )
        )
        return True

    def received(self, num_bytes: int, now_s: float) -> None:
        """Take the acknowledgement of the stream's first ``num_bytes``.

        Raises RemoteProtocolError if fewer were sent.
        """
        if num_bytes > self._sent:
            raise RemoteProtocolError(
                "the next stage acknowledges activations that were not sent",
                fact=f"{num_bytes} bytes, {self._sent} were sent",
            )
        if num_bytes <= self._received:
            return
        self._received, self._received_s = num_bytes, now_s
        while self._under_way and self._under_way[0].end <= num_bytes:
            piece = self._under_way.popleft()
            self._bulk_received, self._first_sent_s = piece.bulk_end, piece.sent_s
            if piece.alone:
                self._bases.append((now_s - piece.sent_s, piece.num_bytes))
            self._measure(piece, now_s)
        if num_bytes == self._sent:
            self._bulk_received = self._bulk_sent

    def _measure(self, piece: _UnderWay, now_s: float) -> None:
        """Measure the rate since the last bytes that had arrived when the piece was written.

        Receipts that hosts delayed come together. So the time of writing the bytes counts where it is longer.
        """
        took_s = max(now_s - piece.received_s, piece.sent_s - piece.first_sent_s)
        if took_s <= 0:
            return
        rate = (piece.end - piece.received) / took_s
        if piece.full:
            self._note_round_trip(now_s - piece.sent_s)
            self._samples += 1
            if self._samples >= _SAMPLES:
                self._samples, self._rate_before, self._rate = 0, self._rate, 0.0
            self._rate = max(self._rate, rate)
        elif rate > self.rate:
            self._rate = rate

    def _note_round_trip(self, round_trip_s: float) -> None:
        self._mean_s = self._mean_s or round_trip_s
        self._deviation_s += _SMOOTHING * (abs(round_trip_s - self._mean_s) - self._deviation_s)
        self._mean_s += _SMOOTHING * (round_trip_s - self._mean_s)
