"""Batches take less where the measured turns of chats grow more than forecasts say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.scheduler.chat_turns import ChatTurns

MOST = 1.35


def settled(turns: ChatTurns, *, alone_s: float, per_share_s: float, fixed_s: float = 0.0, rounds: int = 400) -> float:
    """The turn beside batches in the end: it grows with their share."""
    for _ in range(rounds):
        turns.beside(alone_s + fixed_s + per_share_s * turns.share, alone_s)
    return alone_s + fixed_s + per_share_s * turns.share


@given(alone_s=st.floats(1e-3, 1.0), growth=st.floats(0.0, 3.0))
def test_the_turn_comes_to_the_bound_or_batches_take_all_that_the_forecast_allows(
    alone_s: float, growth: float
) -> None:
    turns = ChatTurns(MOST)
    for _ in range(20):
        turns.alone(alone_s, alone_s)
    turn_s = settled(turns, alone_s=alone_s, per_share_s=growth * alone_s)
    if growth <= MOST - 1:
        assert turns.share == 1.0
    else:
        assert turn_s == pytest.approx(MOST * alone_s, rel=0.01)


def test_a_share_is_left_however_long_turns_are_and_grows_again_when_they_are_short() -> None:
    turns = ChatTurns(MOST)
    turns.alone(0.01, 0.01)
    settled(turns, alone_s=0.01, per_share_s=0.0, fixed_s=0.5)
    assert 0 < turns.share < 0.2
    settled(turns, alone_s=0.01, per_share_s=0.0)
    assert turns.share == 1.0


def test_without_a_turn_alone_forecasts_decide() -> None:
    turns = ChatTurns(MOST)
    assert not any(turns.beside(5.0, 0.01) for _ in range(100))
    assert turns.share == 1.0


def test_one_long_pause_changes_little() -> None:
    turns = ChatTurns(MOST)
    turns.alone(0.01, 0.01)
    for place in range(8):
        turns.beside(30.0 if place == 3 else 0.0125, 0.01)
    assert turns.share > 0.7


def test_more_chats_take_longer_alone_too() -> None:
    turns = ChatTurns(MOST)
    turns.alone(0.015, 0.01)
    for _ in range(80):
        turns.beside(0.035, 0.03)
    assert turns.share == 1.0
