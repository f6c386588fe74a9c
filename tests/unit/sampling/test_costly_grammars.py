"""Random grammars of costly parts: the trial decides within its budget, and an accepted one costs no token much."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Iterable

import numpy as np
import pytest

from edgepipe.children.warm_child import WarmChild
from edgepipe.errors import GrammarNotReady, RequestInvalid, StepFailed
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import BuiltGrammar, GrammarState, GrammarTokenizer
from edgepipe.sampling.grammar_trial import (
    CHILD_MODULE,
    CHILD_START_S,
    TRIAL_CPU_S,
    VERDICT_BYTES,
    GrammarTooHard,
    pack_question,
    read_verdict,
)
from tests.support.gateways.costly_schemas import costly_grammar, wide_vocabulary

NUM_TOKENS = 12


@pytest.fixture
async def child() -> AsyncGenerator[WarmChild]:
    child = WarmChild(CHILD_MODULE, start_s=CHILD_START_S)
    yield child
    await child.end()


async def test_each_is_accepted_or_refused_and_what_is_accepted_can_be_followed(child: WarmChild) -> None:
    vocabulary = wide_vocabulary(2000)
    outcomes = [await judge(child, vocabulary, seed, cpu_s=0.2) for seed in range(40)]
    assert {"followed", "refused", "too hard"} == {outcome for outcome, _, _ in outcomes}


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
async def test_no_build_and_no_token_of_many_takes_long(child: WarmChild, part: int) -> None:
    """Processor time, not time: a build within twice the trial's, every token within the bar for a bystander."""
    vocabulary = wide_vocabulary()
    for seed in range(1000 + 100 * part, 1100 + 100 * part):
        _, build_s, token_s = await judge(child, vocabulary, seed, cpu_s=TRIAL_CPU_S)
        assert build_s < 2 * TRIAL_CPU_S, seed
        assert token_s < 0.25, seed


async def judge(child: WarmChild, vocabulary: GrammarTokenizer, seed: int, *, cpu_s: float) -> tuple[str, float, float]:
    """Return the outcome, and the thread's processor time of the build and of the costliest token."""
    try:
        spec = costly_grammar(seed)
        verdict = await child.ask(*pack_question(spec, cpu_s=cpu_s), within_s=60.0, most_bytes=VERDICT_BYTES)
        cost = read_verdict(verdict, cpu_s=cpu_s)
    except RequestInvalid:
        return "refused", 0.0, 0.0
    except GrammarTooHard:
        return "too hard", 0.0, 0.0
    assert cost.cpu_s < 1.5 * cpu_s, "the kernel's clock ticks every few ms"
    return follow(vocabulary, spec, seed)


def follow(vocabulary: GrammarTokenizer, spec: GrammarSpec, seed: int) -> tuple[str, float, float]:
    started_s = time.thread_time()
    built = BuiltGrammar(vocabulary, spec)
    build_s = time.thread_time() - started_s
    times = list(token_times(built.state(), random.Random(seed)))
    return "followed", build_s, max(times, default=0.0)


def token_times(state: GrammarState, rng: random.Random) -> Iterable[float]:
    """Follow a random path. A grammar too complex to follow ends it, with the only errors that a step may have."""
    for _ in range(NUM_TOKENS):
        started_s = time.thread_time()
        try:
            allowed = np.flatnonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little"))
            if len(allowed):
                state.take(int(allowed[rng.randrange(len(allowed))]))
        except (StepFailed, GrammarNotReady):
            return
        finally:
            yield time.thread_time() - started_s
        if not len(allowed):
            return
