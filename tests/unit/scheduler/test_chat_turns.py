"""Batches take less where the measured turns of chats grow more than forecasts say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.scheduler.chat_turns import ChatTurns

MOST = 1.35
LEAST_SHARE = 0.3


def settled(turns: ChatTurns, *, alone_s: float, per_share_s: float, fixed_s: float = 0.0, rounds: int = 400) -> float:
    """The turn beside batches in the end: it grows with their share."""
    for _ in range(rounds):
        turns.beside(alone_s + fixed_s + per_share_s * turns.share)
    return alone_s + fixed_s + per_share_s * turns.share


@given(alone_s=st.floats(1e-3, 1.0), growth=st.floats(0.0, 3.0))
def test_the_turn_comes_to_the_bound_or_batches_take_all_that_the_forecast_allows(
    alone_s: float, growth: float
) -> None:
    turns = ChatTurns(MOST)
    for _ in range(20):
        turns.alone(alone_s)
    turn_s = settled(turns, alone_s=alone_s, per_share_s=growth * alone_s)
    if growth <= MOST - 1:
        assert turns.share == 1.0
    elif growth < (MOST - 1) / LEAST_SHARE:
        assert turn_s == pytest.approx(MOST * alone_s, rel=0.01)
    else:
        assert turns.share == LEAST_SHARE


def test_a_share_is_left_however_long_turns_are_and_grows_again_when_they_are_short() -> None:
    turns = ChatTurns(MOST)
    turns.alone(0.01)
    settled(turns, alone_s=0.01, per_share_s=0.0, fixed_s=0.5)
    assert turns.share == LEAST_SHARE
    settled(turns, alone_s=0.01, per_share_s=0.0)
    assert turns.share == 1.0


def test_without_a_turn_alone_forecasts_decide() -> None:
    turns = ChatTurns(MOST)
    assert not any(turns.beside(5.0) for _ in range(100))
    assert turns.share == 1.0


def test_long_pauses_change_nothing() -> None:
    turns = ChatTurns(MOST)
    turns.alone(0.01)
    for place in range(90):
        turns.beside(30.0 if place % 9 == 3 else 0.0125)
    assert turns.share == 1.0


def test_more_chats_take_longer_alone_too() -> None:
    turns = ChatTurns(MOST)
    turns.alone(0.015)
    for _ in range(80):
        turns.beside(0.035, 0.02)
    assert turns.share == 1.0
    turns.alone(0.035, 0.02)
    for _ in range(80):
        turns.beside(0.035)
    assert turns.share == 1.0
    turns.alone(0.015, -0.02)
    for _ in range(80):
        turns.beside(0.035)
    assert turns.share == LEAST_SHARE
