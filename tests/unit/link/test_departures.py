"""What leaves next: express steps pass bulk ones, both in step order, and neither stops the other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.ids import StepId
from edgepipe.link.departures import Departures, Piece
from edgepipe.link.pacing import LEAST_PIECE_BYTES

NOW_S = 1_000_000.0
SMALL = np.zeros((1, 8), np.uint16)
LARGE = np.zeros((1, 64 * LEAST_PIECE_BYTES), np.uint16)


def departures() -> Departures:
    made = Departures(max_queued=20)
    for bulk in (False, True):
        made.grant(StepId(0), 20, bulk=bulk)
    return made


def take(made: Departures, count: int) -> list[Piece]:
    """Take pieces; each is acknowledged at once, as over a link that takes no time."""
    taken: list[Piece] = []
    total = 0
    while len(taken) < count and (piece := made.next(NOW_S + len(taken))) is not None:
        taken.append(piece)
        total += len(piece.data)
        made.pacing.received(total, NOW_S + len(taken) - 0.5)
    return taken


def test_an_express_step_leaves_before_the_rest_of_a_bulk_step() -> None:
    made = departures()
    made.put(StepId(1), LARGE, NOW_S, bulk=True)
    (first,) = take(made, 1)
    made.put(StepId(2), SMALL, NOW_S, bulk=False)
    second = made.next(NOW_S)
    assert (first.parcel.step, second and second.parcel.step) == (1, 2)
    third = made.next(NOW_S)
    assert third is not None
    assert (third.parcel.step, third.chunk) == (1, 1)


def test_bulk_bytes_wait_for_receipts_and_express_steps_do_not() -> None:
    made = departures()
    made.put(StepId(1), LARGE, NOW_S, bulk=True)
    sent = 0
    while (piece := made.next(NOW_S)) is not None:
        sent += len(piece.data)
    assert 0 < sent < LARGE.nbytes / 4
    made.put(StepId(2), SMALL, NOW_S, bulk=False)
    express = made.next(NOW_S)
    assert express is not None
    assert express.parcel.step == 2
    assert made.next(NOW_S) is None


def test_a_piece_of_a_bulk_step_is_due_after_each_express_step() -> None:
    made = departures()
    made.put(StepId(1), LARGE, NOW_S, bulk=True)
    for step in range(2, 10):
        made.put(StepId(step), SMALL, NOW_S, bulk=False)
    assert [piece.bulk for piece in take(made, 10)] == [False, True] * 5


def test_after_a_break_whatever_was_not_acknowledged_is_sent_again() -> None:
    made = departures()
    made.put(StepId(1), LARGE, NOW_S, bulk=True)
    made.put(StepId(2), SMALL, NOW_S, bulk=False)
    made.put(StepId(3), SMALL, NOW_S, bulk=False)
    take(made, 8)
    made.grant(StepId(2), 20, bulk=False)
    made.rewind()
    assert made.next(NOW_S) is None, "the new stream has granted nothing"
    for bulk in (False, True):
        made.grant(StepId(2 * (not bulk)), 20, bulk=bulk)
    assert [(piece.parcel.step, piece.chunk) for piece in take(made, 3)] == [(3, 0), (1, 0), (1, 1)]


@given(st.data())
def test_each_class_leaves_whole_and_in_order_whatever_the_timing(data: st.DataObject) -> None:
    made = Departures(max_queued=64, most_piece_bytes=64)
    for bulk in (False, True):
        made.grant(StepId(0), 64, bulk=bulk)
    arrived: dict[int, bytearray] = {}
    wanted: dict[int, bytes] = {}
    order: list[list[int]] = [[], []]
    sent = step = 0
    now_s = NOW_S

    def leave(now_s: float) -> int:
        piece = made.next(now_s)
        if piece is None:
            return 0
        known = arrived.setdefault(piece.parcel.step, bytearray())
        assert (len(known) == 0) == (piece.chunk == 0)
        known += piece.data
        if piece.last:
            order[piece.bulk].append(piece.parcel.step)
        return len(piece.data)

    for _ in range(data.draw(st.integers(1, 60))):
        now_s += data.draw(st.floats(0, 0.01))
        match data.draw(st.sampled_from(["put", "leave", "leave", "receipt"])):
            case "put":
                step += 1
                size = data.draw(st.integers(1, 300))
                values = np.arange(step, step + size, dtype=np.uint16).reshape(1, -1)
                wanted[step] = values.tobytes()
                made.put(StepId(step), values, now_s, bulk=size > 100)
            case "leave":
                sent += leave(now_s)
            case _:
                made.pacing.received(sent, now_s)
    while True:
        made.pacing.received(sent, now_s + 1)
        if not (left := leave(now_s + 1)):
            break
        sent += left
    assert {number: bytes(known) for number, known in arrived.items()} == wanted
    assert order == [sorted(steps) for steps in order]
