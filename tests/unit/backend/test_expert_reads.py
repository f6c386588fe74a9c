"""The share of experts that a step reads: the upper bound, what a model shows, and how it is measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.expert_reads import CountedSteps, ExpertMeter, ExpertShare, cleaned, distinct_share, skewed_shares

TOKEN_SHARE = 8 / 128

shares_of = st.lists(
    st.tuples(st.integers(2, 600), st.floats(0.001, 1.0)), min_size=1, max_size=6, unique_by=lambda pair: pair[0]
).map(lambda pairs: cleaned(ExpertShare(tokens, share) for tokens, share in pairs))


def test_without_measurements_tokens_choose_independently() -> None:
    assert distinct_share(1, TOKEN_SHARE) == pytest.approx(TOKEN_SHARE)
    assert distinct_share(16, TOKEN_SHARE) == pytest.approx(1 - (120 / 128) ** 16)
    assert distinct_share(0, TOKEN_SHARE) == 0.0
    assert distinct_share(7, 1.0) == 1.0


@given(shares_of, st.integers(1, 2000))
def test_any_measurement_gives_a_share_between_one_tokens_and_the_bound(
    measured: tuple[ExpertShare, ...], tokens: int
) -> None:
    found = distinct_share(tokens, TOKEN_SHARE, measured)
    assert TOKEN_SHARE - 1e-12 <= found <= distinct_share(tokens, TOKEN_SHARE) + 1e-12


def test_measured_sizes_have_the_measured_share_and_one_token_reads_what_it_always_does() -> None:
    measured = (ExpertShare(4, 0.2), ExpertShare(16, 0.4), ExpertShare(60, 0.7))
    for each in measured:
        assert distinct_share(each.tokens, TOKEN_SHARE, measured) == pytest.approx(each.share)
    assert distinct_share(1, TOKEN_SHARE, measured) == pytest.approx(TOKEN_SHARE)


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 1.5])
def test_three_measured_sizes_tell_the_others_of_skewed_choices(skew: float) -> None:
    every = skewed_shares(128, 8, skew)  # of 2, 4, 8, ... tokens
    known = tuple(each for each in every if each.tokens in (4, 16, 64))
    for each in every:
        assert distinct_share(each.tokens, TOKEN_SHARE, known) == pytest.approx(each.share, rel=0.05)


def test_skewed_choices_read_fewer_experts_and_each_token_still_its_own() -> None:
    even, skewed = (skewed_shares(128, 8, skew)[3] for skew in (0.0, 1.5))
    assert even.tokens == skewed.tokens == 16
    assert even.share == pytest.approx(distinct_share(16, TOKEN_SHARE))
    assert TOKEN_SHARE < skewed.share < 0.5 * even.share
    assert skewed_shares(8, 8, 3.0)[0].share == 1.0


@given(st.integers(1, 40).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count))), st.floats(0, 1e308))
def test_any_skew_gives_shares_from_one_tokens_to_the_bound(sizes: tuple[int, int], skew: float) -> None:
    count, used = sizes
    for each in skewed_shares(count, used, skew):
        assert used / count - 1e-9 <= each.share <= distinct_share(each.tokens, used / count) + 1e-9


def test_with_a_steep_skew_all_tokens_read_the_same_experts() -> None:
    for skew in (150.0, 1e4, 1e308):
        assert all(each.share == pytest.approx(TOKEN_SHARE, rel=1e-4) for each in skewed_shares(128, 8, skew))


def test_a_meter_gives_means_of_sizes_that_came_often_enough() -> None:
    meter = ExpertMeter()
    meter.note(1, TOKEN_SHARE)
    meter.note(16, 0.9)
    for index in range(200):
        meter.note(6 + index % 2, 0.3 if index % 2 else 0.2)
    (only,) = meter.shares()
    assert only.tokens == pytest.approx(6.5, abs=0.1)
    assert only.share == pytest.approx(0.25, abs=0.01)


def test_a_meter_follows_a_conversation_that_changes() -> None:
    meter = ExpertMeter()
    for _ in range(300):
        meter.note(8, 0.2)
    for _ in range(100):
        meter.note(8, 0.5)
    assert meter.shares()[0].share == pytest.approx(0.5, abs=0.01)


def test_shares_of_another_machine_are_checked() -> None:
    wrong = (ExpertShare(8, 0.5), ExpertShare(1, 0.1), ExpertShare(4, 2.0), ExpertShare(4, 0.0), ExpertShare(2, 0.1))
    assert cleaned(wrong) == (ExpertShare(2, 0.1), ExpertShare(8, 0.5))


def test_the_first_step_of_each_size_is_counted_and_every_eighth_behind_it() -> None:
    steps = CountedSteps()
    counted = {tokens: [steps.takes(tokens) for _ in range(20)] for tokens in (1, 2, 3, 512, 513)}
    expected = [number in (0, 8, 16) for number in range(20)]
    assert counted == {1: [False] * 20, 2: expected, 3: expected, 512: expected, 513: [False] * 20}
