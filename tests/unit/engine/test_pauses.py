"""Pauses before a node that ends epochs is used again."""

from __future__ import annotations

from edgepipe.engine.pauses import Pauses
from edgepipe.engine.settings import EngineTimeouts
from edgepipe.ids import NodeId
from edgepipe.testing.clock import START_S

A, B = NodeId("a"), NodeId("b")


def pauses_after(count: int, *, further: bool, served_s: float = 1.0) -> list[float]:
    """The pause after each of so many ends of one node."""
    pauses, now_s, found = Pauses(EngineTimeouts()), START_S, list[float]()
    for _ in range(count):
        now_s += served_s
        pauses.ended(B, now_s, further=further, served_s=served_s)
        found.append(max(0.0, pauses.until_s([A, B]) - now_s))
        now_s += found[-1]
    return found


def test_after_ends_without_progress_the_pause_doubles_up_to_five_minutes() -> None:
    assert pauses_after(12, further=False) == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_after_ends_with_progress_the_pause_stays_short() -> None:
    assert pauses_after(8, further=True) == [0, 0, 0, 1, 2, 4, 5, 5]


def test_a_node_that_served_five_minutes_is_used_again_at_once() -> None:
    assert not any(pauses_after(10, further=False, served_s=300.0))
    assert not any(pauses_after(10, further=True, served_s=300.0))


def test_other_nodes_have_no_pause_but_an_unknown_cause_concerns_all() -> None:
    pauses = Pauses(EngineTimeouts())
    for _ in range(3):
        pauses.ended(B, START_S + 10.0, further=False, served_s=1.0)
    assert pauses.until_s([A]) == 0.0
    assert pauses.until_s([A, B]) == START_S + 12.0
    for _ in range(3):
        pauses.ended(None, START_S + 10.0, further=False, served_s=1.0)
    assert pauses.until_s([A]) == START_S + 12.0


def test_progress_clears_all_nodes_of_the_pipeline() -> None:
    pauses = Pauses(EngineTimeouts())
    for _ in range(5):
        pauses.ended(B, START_S + 10.0, further=False, served_s=1.0)
    pauses.worked()
    pauses.ended(B, START_S + 400.0, further=False, served_s=1.0)
    assert pauses.until_s([A, B]) == START_S + 400.0


def test_a_node_that_rejoins_waits_five_seconds_at_most() -> None:
    pauses = Pauses(EngineTimeouts())
    for _ in range(8):
        pauses.ended(B, START_S + 10.0, further=False, served_s=1.0)
    assert pauses.until_s([B]) == START_S + 74.0
    pauses.returned(B, START_S + 30.0)
    assert pauses.until_s([B]) == START_S + 35.0
    pauses.returned(A, START_S + 30.0)
    assert pauses.until_s([A]) == 0.0


def test_epochs_that_a_request_ended_are_taken_back() -> None:
    pauses = Pauses(EngineTimeouts())
    for _ in range(5):
        pauses.ended(B, START_S + 10.0, further=False, served_s=1.0)
    pauses.forgive([B, B, B, None, A])
    assert pauses.until_s([B]) == 0.0
    pauses.ended(B, START_S + 20.0, further=False, served_s=1.0)
    assert pauses.until_s([B]) == START_S + 22.0, "the third that remains"
