"""Where the rows of a step are sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from edgepipe.backend.drafting import Drafts, DraftSource
from edgepipe.backend.types import StepOutput
from edgepipe.ids import SequenceId
from edgepipe.sampling import SampleRow, SamplingParams, SequenceSampler, sample
from edgepipe.sampling.grammar import choice_grammar
from edgepipe.stage.drafting import DraftWish, SequenceDrafter
from edgepipe.stage.sampler import SamplerPool, StepResult
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


class Listener:
    """A drafter that notes what it hears, and drafts one token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        self.tokens += tokens
        return Drafts((7,), (DraftSource.MODEL,))


def test_where_no_row_can_use_drafts_drafters_only_hear_of_the_tokens() -> None:
    own = [Listener(), Listener()]
    samplers = [SequenceSampler(PLAIN) for _ in own]
    drafters = [SequenceDrafter(lambda one=one: one, at) for one, at in zip(own, samplers, strict=True)]
    results: list[StepResult] = []
    with pool(num_threads=1) as samplers_pool:
        for place, counts in enumerate([(0, 0), (0, 0), (0, 2)]):
            logits = np.eye(2, 9, k=place, dtype=np.float32)  # the first row takes token ``place``, the second the next
            sampled = tuple([SampleRow(at, place) for at in samplers])
            wishes = tuple(
                [DraftWish(each, count, SequenceId(1)) for each, count in zip(drafters, counts, strict=True)]
            )
            results.append(samplers_pool.sample_here(StepOutput(logits=logits), sampled, wishes, ()))
    assert [[row.ids for row in result.drafts] for result in results] == [[], [], [(), (7,)]]
    assert [each.tokens for each in own] == [[], [1, 2, 3]], "it learns all at once, when drafts are wanted"
