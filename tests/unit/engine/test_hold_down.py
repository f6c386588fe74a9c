"""Who is left alone after failures, and for how long."""

from __future__ import annotations

from edgepipe.engine.hold_down import HoldDown
from edgepipe.ids import NodeId

A, B = NodeId("a"), NodeId("b")


def test_a_failure_bars_a_node_for_a_while_and_the_next_one_for_twice_as_long() -> None:
    held = HoldDown[NodeId]()
    held.failed(A, 100.0)
    assert held.barred(100.0).keys() == held.barred(129.9).keys() == {A}
    assert not held.barred(130.0)
    held.failed(A, 131.0)
    assert held.barred(181.0) == {A: 10.0}, "that long still"
    assert held.barred(190.9).keys() == {A}
    assert not held.barred(191.0)


def test_long_after_its_last_failure_a_node_starts_anew() -> None:
    held = HoldDown[NodeId]()
    for now_s in (0.0, 40.0, 110.0, 240.0):
        held.failed(A, now_s)
    held.failed(A, 5000.0)
    assert held.barred(5029.0).keys() == {A}
    assert not held.barred(5030.0)


def test_being_lost_three_times_within_a_minute_counts_as_a_failure() -> None:
    held = HoldDown[NodeId]()
    for now_s in (0.0, 20.0):
        held.lost(A, now_s)
        held.lost(B, 2 * now_s)
    assert not held.barred(20.0)
    held.lost(A, 50.0)
    held.lost(B, 101.0)
    assert not held.barred(101.0)
    assert held.barred(79.0).keys() == {A}


def test_links_are_held_down_by_direction_for_ten_minutes_at_the_most() -> None:
    held = HoldDown[tuple[NodeId, NodeId]]()
    now_s, lasted_s = 0.0, list[float]()
    for _ in range(7):
        held.failed((A, B), now_s)
        assert held.barred(now_s).keys() == {(A, B)}, "the way back is another link"
        lasted_s.append(next(s for s in range(601) if not held.barred(now_s + s)))
        now_s += lasted_s[-1]
    assert lasted_s == [30, 60, 120, 240, 480, 600, 600]
    held.failed((B, A), now_s)
    assert held.barred(now_s).keys() == {(B, A)}
