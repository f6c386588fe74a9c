"""The beats that a node takes from one member are bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.cluster.beats import BEATS_PER_S, BURST_BEATS, BeatPace
from edgepipe.ids import NodeId
from edgepipe.testing.clock import START_S

B, C = NodeId("b"), NodeId("c")


@given(gaps=st.lists(st.floats(0.0, 0.05), min_size=1, max_size=60), repeats=st.integers(1, 20))
def test_a_member_gets_no_more_than_a_burst_and_the_rate(gaps: list[float], repeats: int) -> None:
    pace, now_s, taken = BeatPace(), START_S, 0
    for gap_s in gaps * repeats:
        now_s += gap_s
        taken += 1
        assert taken <= BURST_BEATS + BEATS_PER_S * (now_s - START_S) + 1
        now_s += pace.wait_s(B, now_s=now_s)


@given(st.lists(st.floats(1 / BEATS_PER_S, 10.0), max_size=200))
def test_a_member_within_the_rate_never_waits(gaps: list[float]) -> None:
    pace, now_s = BeatPace(), START_S
    for gap_s in gaps:
        now_s += gap_s
        assert pace.wait_s(B, now_s=now_s) == 0.0


def test_members_do_not_share_the_bound() -> None:
    pace = BeatPace()
    waits = [pace.wait_s(B, now_s=START_S) for _ in range(BURST_BEATS + 1)]
    assert waits[-2] == pytest.approx(0.0, abs=1e-6)
    assert 1e-6 < waits[-1] < 1.1 / BEATS_PER_S
    assert pace.wait_s(C, now_s=START_S) == 0.0
