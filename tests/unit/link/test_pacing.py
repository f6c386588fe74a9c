"""The window of bulk bytes over an imagined link: the link stays busy, and a small step waits for little."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.errors import RemoteProtocolError
from edgepipe.link.pacing import LEAST_PIECE_BYTES, MOST_PIECE_BYTES, PIECE_S, QUEUE_S, Pacing

BEGIN_S = 1_000_000.0
HOST_S = 0.0003  # until a receipt is written
SMALL_BYTES = 4096
SMALL_EVERY_S = 0.01


@dataclass
class Link:
    """A link with a rate and a delay, on which a bulk step without end leaves, and a small step every 10 ms."""

    rate: float
    one_way_s: float
    pacing: Pacing = field(default_factory=Pacing)
    now_s: float = BEGIN_S
    free_s: float = BEGIN_S
    sent: int = 0
    received: int = 0
    receipts: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    waits_s: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # when, how long
    next_small_s: float = BEGIN_S
    last_receipt_s: float = 0.0
    late: random.Random | None = None  # receipts are up to 12 ms late

    def carry(self, num_bytes: int, *, bulk: bool) -> None:
        receipt = self.pacing.sent(num_bytes, bulk=bulk, now_s=self.now_s)
        self.free_s = max(self.now_s, self.free_s) + num_bytes / self.rate
        self.sent += num_bytes
        if receipt:
            late_s = 0.012 * self.late.random() if self.late is not None else 0.0
            comes_s = max(self.last_receipt_s, self.free_s + 2 * self.one_way_s + HOST_S + late_s)
            self.last_receipt_s = comes_s
            heapq.heappush(self.receipts, (comes_s, self.sent))

    def run(self, until_s: float) -> None:
        while self.now_s < until_s:
            while self.receipts and self.receipts[0][0] <= self.now_s:
                self.received = heapq.heappop(self.receipts)[1]
                self.pacing.received(self.received, self.now_s)
            if self.next_small_s <= self.now_s:
                self.waits_s.append((self.now_s, max(0.0, self.free_s - self.now_s)))
                self.carry(SMALL_BYTES, bulk=False)
                self.next_small_s += SMALL_EVERY_S
            while self.pacing.may_send:
                self.carry(self.pacing.piece_bytes, bulk=True)
            self.now_s = min(self.next_small_s, *(moment_s for moment_s, _ in self.receipts))


@settings(max_examples=30, deadline=None)
@given(rate=st.floats(5e6, 1.25e9), one_way_s=st.floats(0.00005, 0.005))
def test_the_link_stays_busy_and_a_small_step_waits_for_two_pieces(rate: float, one_way_s: float) -> None:
    link = Link(rate, one_way_s)
    link.run(BEGIN_S + 0.6)
    steady_s, before = link.now_s, link.received
    link.run(BEGIN_S + 1.2)
    assert (link.received - before) / (link.now_s - steady_s) == pytest.approx(rate, rel=0.08)
    piece_s = max(PIECE_S, LEAST_PIECE_BYTES / rate)
    waits_s = sorted(wait_s for moment_s, wait_s in link.waits_s if moment_s > steady_s)
    assert waits_s[len(waits_s) // 2] <= 3 * piece_s, "two pieces, and the one that was written when the window opened"
    assert waits_s[-1] <= 4 * piece_s


@pytest.mark.parametrize("rate", [12.5e6, 37.5e6, 125e6])
def test_a_link_between_busy_hosts_stays_busy(rate: float) -> None:
    link = Link(rate, 0.0003, late=random.Random(1))
    link.run(BEGIN_S + 0.5)
    before, steady_s = link.received, link.now_s
    link.run(BEGIN_S + 2.0)
    assert link.received - before >= 0.8 * rate * (link.now_s - steady_s)


def test_pieces_follow_the_rate_within_their_bounds() -> None:
    sizes: list[int] = []
    for rate in (1e6, 37.5e6, 125e6, 5e9):
        link = Link(rate, 0.0003)
        link.run(BEGIN_S + 0.6)
        sizes.append(link.pacing.piece_bytes)
    assert sizes[0] == LEAST_PIECE_BYTES
    assert sizes[1] == pytest.approx(37.5e6 * PIECE_S, rel=0.1)
    assert sizes[2] == pytest.approx(125e6 * PIECE_S, rel=0.1)
    assert sizes[3] == MOST_PIECE_BYTES


def test_a_link_that_becomes_slower_is_noticed() -> None:
    link = Link(125e6, 0.0003)
    link.run(BEGIN_S + 0.5)
    link.rate = 12.5e6
    link.run(BEGIN_S + 3.0)
    assert link.pacing.window_bytes <= 1.2 * 12.5e6 * (0.0006 + HOST_S + QUEUE_S)


def test_small_steps_alone_need_no_receipts() -> None:
    pacing = Pacing()
    assert not any(pacing.sent(100_000, bulk=False, now_s=BEGIN_S + step) for step in range(100))
    assert pacing.may_send


def test_a_new_stream_begins_with_an_empty_window() -> None:
    pacing = Pacing()
    while pacing.may_send:
        pacing.sent(LEAST_PIECE_BYTES, bulk=True, now_s=BEGIN_S)
    pacing.restart()
    assert pacing.may_send
    pacing.received(0, BEGIN_S + 1)
    assert pacing.may_send


def test_a_receipt_for_bytes_that_were_not_sent_is_refused() -> None:
    pacing = Pacing()
    pacing.sent(1000, bulk=True, now_s=BEGIN_S)
    with pytest.raises(RemoteProtocolError, match="acknowledges activations that were not sent"):
        pacing.received(1001, BEGIN_S + 0.1)
