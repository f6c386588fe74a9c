"""What a sender keeps and may write."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import LocalProtocolError
from edgepipe.ids import StepId
from edgepipe.link.outbox import Outbox

ROWS = np.zeros((2, 3), np.uint16)


def write_all(outbox: Outbox) -> list[int]:
    steps: list[int] = []
    while (parcel := outbox.next()) is not None:
        steps.append(parcel.step)
        outbox.written(parcel)
    return steps


def filled(steps: int) -> Outbox:
    outbox = Outbox(max_queued=10)
    for step in range(1, steps + 1):
        outbox.put(StepId(step), ROWS, 0.0)
    return outbox


def test_nothing_is_written_before_the_first_grant() -> None:
    assert write_all(filled(2)) == []


def test_credits_bound_what_is_written() -> None:
    outbox = filled(5)
    outbox.grant(StepId(0), 2)
    assert write_all(outbox) == [1, 2]
    outbox.grant(StepId(1), 2)
    assert write_all(outbox) == [3]


def test_a_new_stream_begins_at_the_first_that_was_not_acknowledged() -> None:
    outbox = filled(5)
    outbox.grant(StepId(0), 3)
    write_all(outbox)
    outbox.rewind()
    assert write_all(outbox) == []
    outbox.grant(StepId(2), 2)
    assert write_all(outbox) == [3, 4]


def test_an_acknowledgement_may_overtake_the_end_of_the_write() -> None:
    outbox = filled(2)
    outbox.grant(StepId(0), 2)
    parcel = outbox.next()
    assert parcel is not None
    outbox.grant(StepId(1), 2)
    outbox.written(parcel)
    assert write_all(outbox) == [2]


def test_steps_ascend() -> None:
    with pytest.raises(LocalProtocolError, match="step 2 was to be sent after step 2"):
        filled(2).put(StepId(2), ROWS, 0.0)


def test_the_queue_is_bounded() -> None:
    with pytest.raises(LocalProtocolError, match="at most 10"):
        filled(11)


@given(st.data())
def test_every_step_is_written_in_order_and_again_after_a_break(data: st.DataObject) -> None:
    outbox, written, arrived, queued = Outbox(max_queued=8), list[int](), 0, 0
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["put", "write", "grant", "break"])):
            case "put" if len(outbox) < 8:
                queued += 1
                outbox.put(StepId(queued), ROWS, 0.0)
            case "write" if (parcel := outbox.next()) is not None:
                assert parcel.step in (arrived + 1, *range(1, arrived + 1))
                arrived = max(arrived, parcel.step)
                outbox.written(parcel)
                written.append(parcel.step)
            case "grant":
                outbox.grant(StepId(arrived), data.draw(st.integers(0, 4)))
            case "break":
                outbox.rewind()
            case _:
                pass
    assert sorted(set(written)) == list(range(1, arrived + 1))


@pytest.mark.parametrize("step", [0, -1])
def test_steps_begin_at_1(step: int) -> None:
    with pytest.raises(LocalProtocolError, match="was to be sent after step 0"):
        Outbox(max_queued=10).put(StepId(step), ROWS, 0.0)
