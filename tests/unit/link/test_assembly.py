"""Chunks become steps: whatever the timing of plans, resends and cuts, each step comes out once, whole and in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import StepId
from edgepipe.link.assembly import Assembler
from edgepipe.link.pacing import MOST_PIECE_BYTES


def step_bytes(step: int, size: int) -> bytes:
    return bytes((step * 31 + i) % 251 for i in range(size))


def cut(data: bytes, chunk_bytes: int) -> list[bytes]:
    return [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]


@given(data=st.data())
def test_every_step_comes_out_once_whole_and_in_order(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    chunk_bytes = data.draw(st.integers(1, 16))
    window = data.draw(st.integers(1, 4))
    assembler = Assembler(window=window)
    frames = [
        (step, chunk, part)
        for step, size in enumerate(sizes, 1)
        for chunk, part in enumerate(cut(step_bytes(step, size), chunk_bytes))
    ]
    out: list[tuple[int, bytes]] = []
    planned = sent = 0
    while len(out) < len(sizes):
        may_send = sent < len(frames) and frames[sent][0] <= len(out) + window
        if planned < len(sizes) and (not may_send or data.draw(st.booleans())):
            planned += 1
            whole = assembler.expect(StepId(planned), sizes[planned - 1])
        else:
            if data.draw(st.integers(0, 9)) == 0:  # the stream broke: sent again from the first unfinished step
                first = next(i for i, frame in enumerate(frames) if frame[0] == len(out) + 1)
                for step, chunk, part in frames[first:sent]:
                    assert assembler.add(StepId(step), chunk, part) is None
            step, chunk, part = frames[sent]
            sent += 1
            whole = assembler.add(StepId(step), chunk, part)
        if whole is not None:
            assert assembler.credits == window - 1
            assembler.taken()
            out.append((int(assembler.complete), whole.tobytes()))
    assert out == [(step, step_bytes(step, size)) for step, size in enumerate(sizes, 1)]
    assert assembler.held_bytes == 0


def test_a_missing_chunk_is_noticed_at_once() -> None:
    assembler = Assembler(window=2)
    assembler.expect(StepId(1), 30)
    assembler.add(StepId(1), 0, bytes(10))
    with pytest.raises(RemoteProtocolError, match="chunk of step 1 is missing"):
        assembler.add(StepId(1), 2, bytes(10))


def test_a_step_that_ends_early_is_noticed_when_the_next_begins() -> None:
    assembler = Assembler(window=2)
    assembler.expect(StepId(1), 30)
    assembler.add(StepId(1), 0, bytes(10))
    with pytest.raises(RemoteProtocolError, match="activations of step 1 are missing"):
        assembler.add(StepId(2), 0, bytes(10))


def test_a_step_that_ended_early_before_its_plan_came() -> None:
    assembler = Assembler(window=2)
    assembler.add(StepId(1), 0, bytes(10))
    assembler.add(StepId(2), 0, bytes(10))
    with pytest.raises(RemoteProtocolError, match="planned size"):
        assembler.expect(StepId(1), 30)


def test_more_bytes_than_planned() -> None:
    assembler = Assembler(window=2)
    assembler.expect(StepId(1), 5)
    with pytest.raises(RemoteProtocolError, match="planned size"):
        assembler.add(StepId(1), 0, bytes(6))
    assert assembler.add(StepId(1), 0, bytes(5)) is not None, "what was refused has left no trace"


def test_more_chunks_than_planned() -> None:
    assembler = Assembler(window=2)
    assembler.expect(StepId(1), 5)
    assert assembler.add(StepId(1), 0, bytes(5)) is not None
    with pytest.raises(RemoteProtocolError, match="more activations than were planned"):
        assembler.add(StepId(1), 1, bytes(5))


def test_more_bytes_than_planned_before_the_plan() -> None:
    assembler = Assembler(window=2)
    assembler.add(StepId(1), 0, bytes(6))
    with pytest.raises(RemoteProtocolError, match="planned size"):
        assembler.expect(StepId(1), 5)


def test_a_step_without_a_plan_between_planned_ones() -> None:
    assembler = Assembler(window=4)
    assembler.add(StepId(1), 0, bytes(4))
    with pytest.raises(RemoteProtocolError, match="step 1 came without a plan"):
        assembler.expect(StepId(2), 4)


def test_a_skipped_step_shows_when_the_plan_comes() -> None:
    assembler = Assembler(window=4)
    assembler.add(StepId(2), 0, bytes(4))
    with pytest.raises(RemoteProtocolError, match="step 1 are missing"):
        assembler.expect(StepId(1), 4)


def test_no_more_steps_than_the_credits_allow() -> None:
    assembler = Assembler(window=2)
    assert assembler.add(StepId(1), 0, bytes(4)) is None
    assert assembler.add(StepId(2), 0, bytes(4)) is None
    with pytest.raises(RemoteProtocolError, match="beyond the credits"):
        assembler.add(StepId(3), 0, bytes(4))
    assert assembler.expect(StepId(1), 4) is not None
    with pytest.raises(RemoteProtocolError, match="beyond the credits"):
        assembler.add(StepId(3), 0, bytes(4))
    assembler.taken()
    assert assembler.add(StepId(3), 0, bytes(4)) is None


@pytest.mark.parametrize("size", [0, MOST_PIECE_BYTES + 1])
def test_chunks_of_a_size_that_nobody_sends(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match="a chunk of step 1"):
        Assembler(window=1).add(StepId(1), 0, bytes(size))


def test_the_buffer_is_writable_and_its_own() -> None:
    assembler = Assembler(window=1)
    assembler.expect(StepId(1), 4)
    whole = assembler.add(StepId(1), 0, b"abcd")
    assert whole is not None
    assert whole.flags.writeable
    assert whole.dtype == np.uint8


def test_a_step_is_awaited_from_its_plan_or_its_first_bytes_until_it_is_whole() -> None:
    assembler = Assembler(window=2)
    assert not assembler.awaits(StepId(1))
    assembler.expect(StepId(1), 20)
    assert assembler.awaits(StepId(1))
    assert not assembler.awaits(StepId(2))
    assembler.add(StepId(1), 0, bytes(20))
    assert not assembler.awaits(StepId(1))
    assembler.add(StepId(2), 0, bytes(5))
    assert assembler.awaits(StepId(2))
    assert not assembler.awaits(StepId(1))
