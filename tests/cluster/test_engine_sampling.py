"""Sampling through the whole ring: penalties after preemption, grammars, log-probabilities of output and prompt."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from edgepipe_emulated import oracle

from edgepipe.errors import StepFailed
from edgepipe.sampling import GrammarSpec, SampleRow, SamplingParams, SequenceSampler, sample
from edgepipe.sampling.grammar import json_grammar
from edgepipe.weights.emulated_folder import EOS_TOKEN_ID
from tests.support.engine.lab import CONFIG, engine_lab, submission

FULL = SamplingParams(
    temperature=0.9,
    seed=5,
    top_p=0.9,
    frequency_penalty=0.5,
    presence_penalty=0.4,
    repetition_penalty=1.2,
    logit_bias=((11, 3.0),),
)
WORDS = {"type": "array", "items": {"enum": ["yes", "no", "maybe"]}, "minItems": 2, "maxItems": 4}


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def wanted(prompt: list[int], count: int, params: SamplingParams) -> list[int]:
    """What one sequence alone gives, computed without stages."""
    sampler = SequenceSampler(params, prompt=prompt)

    def choose(logits: np.ndarray, position: int) -> int:
        return sample(logits[None].copy(), [SampleRow(sampler, position)])[0].token

    return oracle.generate(prompt, count, CONFIG, ignore_eos=True, choose=choose)


async def test_penalised_answers_survive_preemption() -> None:
    """Fewer blocks than all need together: some are computed again, and go on as if nothing had been."""
    prompts = {f"r{i}": prompt_of(i, 20) for i in range(4)}
    async with engine_lab(max_blocks=10) as lab:
        gateway = await lab.gateway()
        gateway.send(*(submission(name, prompt, 40, sampling=FULL) for name, prompt in prompts.items()))
        for name, prompt in prompts.items():
            assert (await gateway.ended(name)).ids == wanted(prompt, 40, FULL)
        assert lab.engine.state().preemptions > 0


async def test_an_attempt_that_goes_on_gives_the_same() -> None:
    prompt = prompt_of(3, 12)
    tokens = wanted(prompt, 16, FULL)
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", prompt, 16, attempt=2, sampling=FULL, generated=(tuple(tokens[:7]),)))
        answer = gateway.answer("a", attempt=2)
        answer.ids = tokens[:7]
        assert (await gateway.ended("a", attempt=2)).ids == tokens


async def test_a_grammar_binds_the_output_and_ends_it() -> None:
    bound = SamplingParams(temperature=1.0, seed=9, grammar=json_grammar(WORDS))
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        for index in range(6):
            params = replace(bound, seed=index)
            gateway.send(submission(f"g{index}", prompt_of(index, 9), 80, ignore_eos=False, sampling=params))
        gateway.send(submission("free", prompt_of(1, 9), 30))
        for index in range(6):
            answer = await gateway.ended(f"g{index}")
            assert answer.ids[-1] == EOS_TOKEN_ID
            assert set(json.loads(bytes(answer.ids[:-1]))) <= {"yes", "no", "maybe"}
        assert (await gateway.ended("free")).ids == oracle.generate(prompt_of(1, 9), 30, CONFIG, ignore_eos=True)


async def test_a_grammar_that_cannot_be_followed_ends_its_request_alone() -> None:
    bad = SamplingParams(temperature=0.0, grammar=GrammarSpec("start: nothing"))
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        gateway.send(submission("bad", prompt_of(1, 9), 30, sampling=bad), submission("good", prompt_of(2, 9), 30))
        assert isinstance((await gateway.ended("bad")).error, StepFailed)
        assert (await gateway.ended("good")).ids == oracle.generate(prompt_of(2, 9), 30, CONFIG, ignore_eos=True)


async def test_logprobs_of_output_and_prompt() -> None:
    params = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=3, prompt_logprobs=True)
    prompt = prompt_of(4, 50)
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        for name in ("first", "again"):  # the second would find its prompt in the prefix cache
            gateway.send(submission(name, prompt, 5, num_choices=2, sampling=params))
            answer, other = [await gateway.ended(name, choice=choice) for choice in range(2)]
            assert answer.ids == other.ids
            tokens = prompt + answer.ids
            scored = [*answer.prompt_logprobs, *answer.logprobs]
            assert len(scored) == len(tokens) - 1
            assert not other.prompt_logprobs, "choices share their prompt"
            for position, score in enumerate(scored, start=1):
                exact = oracle.logits(tokens[:position], CONFIG).astype(np.float64)
                exact -= np.log(np.exp(exact - exact.max()).sum()) + exact.max()
                assert score.logprob == pytest.approx(exact[tokens[position]], abs=1e-4)
                assert list(score.top_ids) == np.argsort(-exact, kind="stable")[:3].tolist()


async def test_min_tokens_keeps_the_end_away() -> None:
    ends = SamplingParams(temperature=0.0, logit_bias=((EOS_TOKEN_ID, 100.0),))
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        gateway.send(submission("soon", prompt_of(1, 9), 30, ignore_eos=False, sampling=ends))
        gateway.send(submission("late", prompt_of(1, 9), 30, ignore_eos=False, sampling=replace(ends, min_tokens=6)))
        assert (await gateway.ended("soon")).ids == [EOS_TOKEN_ID]
        late = (await gateway.ended("late")).ids
        assert (len(late), late[-1]) == (7, EOS_TOKEN_ID)


async def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((CONFIG.vocab_size, 1.0),))
    async with engine_lab() as lab:
        gateway = await lab.gateway()
        gateway.send(submission("a", [1], 3, sampling=params))
        error = (await gateway.ended("a")).error
        assert error is not None
        assert "logit_bias" in error.what
