"""Who is left alone after failures, and for how long."""

from __future__ import annotations

from edgepipe.engine.quarantine import QuarantineTimes
from edgepipe.ids import NodeId
from edgepipe.testing.clock import START_S

A, B = NodeId("a"), NodeId("b")


def test_a_failure_bars_a_node_for_a_while_and_the_next_one_for_twice_as_long() -> None:
    held = QuarantineTimes[NodeId]()
    held.failed(A, START_S + 100.0)
    assert held.quarantined(START_S + 100.0).keys() == held.quarantined(START_S + 129.9).keys() == {A}
    assert not held.quarantined(START_S + 130.0)
    held.failed(A, START_S + 131.0)
    assert held.quarantined(START_S + 181.0) == {A: 10.0}, "that long still"
    assert held.quarantined(START_S + 190.9).keys() == {A}
    assert not held.quarantined(START_S + 191.0)


def test_long_after_its_last_failure_a_node_starts_anew() -> None:
    held = QuarantineTimes[NodeId]()
    for now_s in (0.0, 40.0, 110.0, 240.0):
        held.failed(A, START_S + now_s)
    held.failed(A, START_S + 5000.0)
    assert held.quarantined(START_S + 5029.0).keys() == {A}
    assert not held.quarantined(START_S + 5030.0)


def test_being_lost_three_times_within_five_minutes_counts_as_a_failure() -> None:
    held = QuarantineTimes[NodeId]()
    for now_s in (0.0, 100.0):
        held.lost(A, START_S + now_s)
        held.lost(B, START_S + 2 * now_s)
    assert not held.quarantined(START_S + 200.0)
    assert held.lost(A, START_S + 250.0)
    assert not held.lost(B, START_S + 301.0)
    assert held.quarantined(START_S + 279.0).keys() == {A}


def test_a_node_that_is_lost_soon_after_it_came_back_is_left_out_for_twice_as_long() -> None:
    held = QuarantineTimes[NodeId]()
    held.failed(A, START_S)
    assert held.lost(A, START_S + 40.0)
    assert held.quarantined(START_S + 40.0) == {A: 60.0}
    assert not held.lost(A, START_S + 701.0), "long after, it is forgiven"


def test_links_are_held_down_by_direction_for_ten_minutes_at_the_most() -> None:
    held = QuarantineTimes[tuple[NodeId, NodeId]]()
    now_s, lasted_s = START_S, list[float]()
    for _ in range(7):
        held.failed((A, B), now_s)
        assert held.quarantined(now_s).keys() == {(A, B)}, "the way back is another link"
        lasted_s.append(next(s for s in range(601) if not held.quarantined(now_s + s)))
        now_s += lasted_s[-1]
    assert lasted_s == [30, 60, 120, 240, 480, 600, 600]
    held.failed((B, A), now_s)
    assert held.quarantined(now_s).keys() == {(B, A)}
