"""When a crashed engine starts again, and on which node."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.daemon.serving.restarts import (
    GOOD_S,
    LONGEST_PAUSE_S,
    MOVES_AFTER,
    Restarts,
    next_host,
    pause_after,
)
from edgepipe.testing.clock import START_S


def test_the_first_restart_comes_at_once_and_later_ones_after_pauses_that_double() -> None:
    restarts = Restarts()
    pauses = [restarts.ended(START_S + second) for second in range(14)]
    assert pauses[:7] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert pauses[-4:] == [LONGEST_PAUSE_S] * 4
    assert restarts.left_s(START_S + 13.0) == LONGEST_PAUSE_S
    assert restarts.left_s(START_S + 13.0 + LONGEST_PAUSE_S) == 0.0


def test_a_moment_of_serving_makes_up_for_nothing() -> None:
    restarts, pauses = Restarts(), list[float]()
    for second in range(6):
        restarts.serves(START_S + second)
        pauses.append(restarts.ended(START_S + second + 0.1))
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]


def test_an_engine_that_serves_well_for_a_while_is_as_good_as_new() -> None:
    restarts, now_s = Restarts(), START_S
    for _ in range(4):
        restarts.ended(now_s)
    assert restarts.should_move
    restarts.serves(now_s)
    restarts.serves(now_s + 1.0)
    assert restarts.ended(now_s + 4 * GOOD_S) == 0.0
    assert not restarts.should_move


def test_time_between_two_processes_is_no_time_of_serving() -> None:
    restarts = Restarts()
    restarts.serves(START_S)
    for _ in range(3):
        restarts.ended(START_S + 1.0)
    restarts.serves(START_S + 10.0)
    restarts.stopped(START_S + 11.0)
    assert restarts.ended(START_S + 10_000.0) == pause_after(3)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500)), min_size=1, max_size=60))
def test_it_always_starts_again_and_a_crash_loop_costs_ever_less(lives: list[tuple[float, float]]) -> None:
    """Each life: seconds to load, then seconds that it serves."""
    restarts, now_s, before = Restarts(), START_S, 0.0
    for loading_s, serving_s in lives:
        now_s += loading_s
        if serving_s:
            restarts.serves(now_s)
        now_s += serving_s
        pause_s = restarts.ended(now_s)
        assert 0.0 <= pause_s <= LONGEST_PAUSE_S
        if serving_s == 0.0:
            assert pause_s >= min(2 * before, LONGEST_PAUSE_S)
        before = pause_s
        now_s += pause_s
        assert restarts.left_s(now_s) == 0.0


def test_the_next_host_is_the_next_node_of_the_ring_that_may() -> None:
    ring = ("a", "b", "c", "b")
    assert next_host("a", ring, frozenset("abc")) == "b"
    assert next_host("b", ring, frozenset("abc")) == "c"
    assert next_host("c", ring, frozenset("ac")) == "a"
    assert next_host("d", ring, frozenset("abcd")) == "a"
    assert next_host("a", ring, frozenset("az")) is None, "a machine outside the ring learns no prompts"
    assert next_host("a", ("a",), frozenset("ab")) is None
    assert MOVES_AFTER == 4, "docs/usage.md says so"
