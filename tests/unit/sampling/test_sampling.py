"""Draws, greedy and temperature sampling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import RequestInvalid, StepFailed
from edgepipe.sampling import SampleRow, SamplingParams, SequenceSampler, draw, sample
from edgepipe.sampling.rows import choose_from_row

SEEDS = st.integers(0, 2**64 - 1)


def rows(count: int, *, temperature: float, seed: int = 0) -> list[SampleRow]:
    params = SamplingParams(temperature=temperature, seed=seed)
    return [SampleRow(SequenceSampler(params), i) for i in range(count)]


def tokens_of(logits: np.ndarray, wanted: list[SampleRow]) -> list[int]:
    """Sampled from a copy: the sampler writes into what it is given."""
    sampled = sample(logits.copy(), wanted)
    assert all(each.error is None for each in sampled)
    return [each.token for each in sampled]


def pick(logits: np.ndarray, temperature: float, uniform: float) -> int:
    return choose_from_row(logits, SamplingParams(temperature=temperature), uniform, np.empty_like(logits))


def random_logits(count: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, vocab_size)) * 3).astype(np.float32)


@pytest.mark.parametrize(
    ("seed", "choice", "position", "expected"),
    [
        (0, 0, 0, 0.6344404865186533),
        (0, 0, 1, 0.3138744218659404),
        (0, 1, 0, 0.8566744655692291),
        (1, 0, 0, 0.15213179991213777),
        (2**64 - 1, 7, 12345, 0.3918811556912556),
    ],
)
def test_draws_never_change(seed: int, choice: int, position: int, expected: float) -> None:
    assert draw(seed, choice, position) == expected


@given(seed=SEEDS, choice=st.integers(0, 127), position=st.integers(0, 10**6))
def test_draws_are_in_the_unit_interval(seed: int, choice: int, position: int) -> None:
    assert 0 <= draw(seed, choice, position) < 1


@pytest.mark.parametrize("vary", ["seed", "choice", "position"])
def test_draws_are_even_along_every_argument(vary: str) -> None:
    base = {"seed": 5, "choice": 0, "position": 3}
    values = np.array([draw(**{**base, vary: i}) for i in range(20_000)])
    counts, _edges = np.histogram(values, bins=50, range=(0, 1))
    chi_square = float(((counts - 400) ** 2 / 400).sum())
    assert chi_square < 95  # 49 degrees of freedom: 1 in 10,000 for a fair source; these draws never change
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03
    assert len(np.unique(values)) == len(values)


def test_seeds_and_choices_do_not_share_streams() -> None:
    values = {draw(seed, choice, position) for seed in range(20) for choice in range(20) for position in range(20)}
    assert len(values) == 8000


def test_greedy_takes_the_smallest_id_among_the_highest() -> None:
    logits = np.array([[0, 3, 3, 1], [2, 2, 2, 2], [-5, -np.inf, -1, -1]], dtype=np.float32)
    assert tokens_of(logits, rows(3, temperature=0)) == [1, 0, 2]


@given(uniform=st.floats(0, 1, exclude_max=True), vocab_size=st.integers(1, 3000), temperature=st.floats(0.05, 5))
def test_temperature_inverts_the_distribution_from_the_most_likely_on(
    uniform: float, vocab_size: int, temperature: float
) -> None:
    logits = random_logits(1, vocab_size, seed=vocab_size)[0]
    exact = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    order = np.argsort(-logits, kind="stable")
    cumulative = np.cumsum(exact[order]) / exact.sum()
    place = int(np.flatnonzero(order == pick(logits, temperature, uniform))[0])
    low = cumulative[place - 1] if place else 0.0
    assert low - 1e-5 <= uniform <= cumulative[place] + 1e-5


@given(
    uniform=st.one_of(st.just(0.0), st.just(1 - 2.0**-53), st.floats(0, 1, exclude_max=True)),
    allowed=st.sets(st.integers(0, 1499), min_size=1, max_size=3),
    temperature=st.sampled_from([2e-5, 0.3, 1.0, 100.0]),
)
def test_barred_tokens_are_never_drawn(uniform: float, allowed: set[int], temperature: float) -> None:
    logits = np.full(1500, -np.inf, dtype=np.float32)
    logits[list(allowed)] = [float(-i) for i in range(len(allowed))]
    assert pick(logits, temperature, uniform) in allowed


def test_frequencies_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    tokens = tokens_of(np.tile(logits, (8000, 1)), rows(8000, temperature=1.0))
    assert np.bincount(tokens) / 8000 == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=0.02)


def test_low_temperatures_sharpen_and_tiny_ones_are_greedy() -> None:
    logits = np.tile(np.array([0, 1, 2], dtype=np.float32), (500, 1))
    assert set(tokens_of(logits, rows(500, temperature=0.05))) == {2}
    assert set(tokens_of(logits, rows(500, temperature=1e-12))) == {2}
    assert set(tokens_of(logits, rows(500, temperature=5.0))) == {0, 1, 2}


def test_extreme_logits_neither_warn_nor_overflow() -> None:
    logits = np.array([[3e38, -3e38, 0], [-3e38, -3e38, -3e38]], dtype=np.float32)
    assert tokens_of(logits, rows(2, temperature=0.5))[0] == 0


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = random_logits(9, 5003)
    batch = [*rows(5, temperature=0.9, seed=4), *rows(4, temperature=0)]
    together = tokens_of(logits, batch)
    alone = [tokens_of(logits[i : i + 1], [row])[0] for i, row in enumerate(batch)]
    order = np.random.default_rng(1).permutation(9)
    assert together == alone
    assert tokens_of(logits[order], [batch[i] for i in order]) == [together[i] for i in order]


def test_the_same_request_draws_the_same_tokens() -> None:
    logits = random_logits(50, 300)
    first = tokens_of(logits, rows(50, temperature=1.0, seed=7))
    assert first == tokens_of(logits, rows(50, temperature=1.0, seed=7))
    assert first != tokens_of(logits, rows(50, temperature=1.0, seed=8))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("bad", "fact"),
    [
        ([np.nan] * 3, "3 of 3 logits are NaN"),
        ([1, np.nan, 2], "1 of 3"),
        ([1, np.inf, 2], "infinite"),
        ([-np.inf] * 3, "-inf"),
    ],
)
def test_logits_that_are_no_numbers_fail_their_row_alone(temperature: float, bad: list[float], fact: str) -> None:
    logits = np.array([[1, 2, 3], bad], dtype=np.float32)
    good, failed = sample(logits, rows(2, temperature=temperature))
    assert good.error is None
    assert isinstance(failed.error, StepFailed)
    assert fact in f"{failed.error.what} {failed.error.fact}"


def test_all_nan_names_the_weights() -> None:
    error = sample(np.full((1, 4), np.nan, dtype=np.float32), rows(1, temperature=0))[0].error
    assert error is not None
    assert "weights" in error.next_step


def test_no_rows_give_no_tokens() -> None:
    assert sample(np.zeros((0, 5), dtype=np.float32), []) == []


@pytest.mark.parametrize("temperature", [-0.1, 101.0, float("nan"), float("inf")])
def test_temperatures_that_cannot_be_used(temperature: float) -> None:
    with pytest.raises(RequestInvalid):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_that_cannot_be_used(seed: int) -> None:
    with pytest.raises(RequestInvalid):
        SamplingParams(seed=seed)
