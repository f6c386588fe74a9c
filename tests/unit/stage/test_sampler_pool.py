"""Where the rows of a step are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edgepipe.sampling import SampleRow, SamplingParams, SequenceSampler, sample
from edgepipe.sampling.grammar import choice_grammar
from edgepipe.stage.sampler import SamplerPool
from edgepipe.testing.clock import FakeClock

PLAIN = SamplingParams(temperature=0.0)


@contextmanager
def pool(*, num_threads: int) -> Iterator[SamplerPool]:
    made = SamplerPool(sample, num_threads=num_threads, clock=FakeClock())
    try:
        yield made
    finally:
        made.close()


def rows(count: int, params: SamplingParams = PLAIN) -> list[SampleRow]:
    """Rows of as many sequences."""
    return [SampleRow(SequenceSampler(params), 0) for _ in range(count)]


@pytest.mark.parametrize(("num_threads", "most"), [(1, 8), (2, 4), (4, 4)])
def test_few_rows_wake_no_thread(num_threads: int, most: int) -> None:
    """Several threads share the others."""
    with pool(num_threads=num_threads) as samplers:
        found = [count for count in range(20) if samplers.is_sooner_here(rows(count))]
    assert found == list(range(1, most + 1))


def test_rows_with_a_grammar_go_to_the_threads_that_compute_its_next_mask() -> None:
    forced = SamplingParams(temperature=0.0, grammar=choice_grammar(["yes", "no"]))
    with pool(num_threads=1) as samplers:
        assert not samplers.is_sooner_here([*rows(2), *rows(1, forced)])
