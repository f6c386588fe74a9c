"""A directed link's arithmetic, without a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.network.lan_switch import CableShape, DirectedLink


def test_an_ideal_link_delivers_at_once() -> None:
    assert DirectedLink(CableShape()).admit(5.0, 1500) == 5.0


def test_delay_and_rate_add_up_and_frames_queue() -> None:
    link = DirectedLink(CableShape(delay_s=0.01, bytes_per_s=1000))
    assert link.admit(0.0, 100) == pytest.approx(0.11)
    assert link.admit(0.0, 100) == pytest.approx(0.21)
    assert link.admit(1.0, 100) == pytest.approx(1.11)


def test_a_full_queue_and_a_cut_drop() -> None:
    link = DirectedLink(CableShape(bytes_per_s=1000, queue_bytes=150))
    assert [link.admit(0.0, 100) is None for _ in range(3)] == [False, False, True]
    link.change(cut=True)
    assert link.admit(10.0, 1) is None
    assert link.frames_dropped == 2


def test_a_shorter_delay_lets_nothing_overtake() -> None:
    link = DirectedLink(CableShape(delay_s=1.0))
    first = link.admit(0.0, 100)
    link.change(delay_s=0.0)
    assert link.admit(0.5, 100) == first


@given(gaps=st.lists(st.floats(0, 0.1), min_size=1, max_size=50), jitter_s=st.floats(0, 1), rate=st.floats(1e3, 1e9))
def test_arrivals_never_go_back(gaps: list[float], jitter_s: float, rate: float) -> None:
    link = DirectedLink(CableShape(delay_s=0.01, jitter_s=jitter_s, bytes_per_s=rate, queue_bytes=10**9))
    now_s, arrivals = 0.0, []
    for gap in gaps:
        now_s += gap
        arrives_at_s = link.admit(now_s, 1500)
        assert arrives_at_s is not None
        assert arrives_at_s >= now_s + 0.01
        arrivals.append(arrives_at_s)
    assert arrivals == sorted(arrivals)


def test_the_same_seed_loses_the_same_frames() -> None:
    def lost(seed: int) -> list[bool]:
        link = DirectedLink(CableShape(loss=0.5), seed=seed)
        return [link.admit(float(i), 100) is None for i in range(100)]

    assert lost(1) == lost(1) != lost(2)
    assert 30 < sum(lost(1)) < 70
