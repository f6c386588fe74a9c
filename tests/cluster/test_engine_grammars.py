"""Grammars that take long to compile: their sequences wait alone, and everybody else's answers go on."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from edgepipe_emulated import oracle
from llguidance import LLParserLimits

from edgepipe.children.forked_job import JobCost
from edgepipe.errors import StepFailed
from edgepipe.sampling import GrammarSpec, SamplingParams, grammar
from edgepipe.sampling.grammar import GrammarState, check_grammar, json_grammar, regex_grammar
from edgepipe.sampling.grammar_trial import GrammarTooHard
from edgepipe.stage import grammar_builds
from edgepipe.stage.grammar_trial import StageTrial
from edgepipe.weights.emulated_folder import EOS_TOKEN_ID
from tests.support.engine.lab import CONFIG, FakeGateway, break_stage, engine_lab, submission
from tests.support.gateways.costly_schemas import multiples_in_a_range

WORDS = json_grammar({"type": "array", "items": {"enum": ["yes", "no", "maybe"]}, "minItems": 2, "maxItems": 4})
BOUND = SamplingParams(temperature=1.0, seed=9, grammar=WORDS)


class HeldTrial:
    """Takes as long as the test wants."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.asked = asyncio.Event()
        self.texts: list[str] = []
        self.too_hard = False

    async def check(self, grammar: GrammarSpec) -> JobCost:
        self.texts.append(grammar.text)
        self.asked.set()
        await self.goes_on.wait()
        cost = JobCost(cpu_s=3.0, peak_bytes=130 << 20)
        if self.too_hard:
            raise GrammarTooHard(cost)
        check_grammar(grammar)
        return cost

    async def close(self) -> None:
        self.goes_on.set()


def prompt_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, 9).tolist()


async def others_answer(gateway: FakeGateway, name: str) -> None:
    """A request without a grammar gets all its tokens now."""
    gateway.send(submission(name, prompt_of(2), 60))
    assert (await gateway.ended(name)).ids == oracle.generate(prompt_of(2), 60, CONFIG, ignore_eos=True)


async def test_a_grammar_that_is_refused_late_ends_its_request_alone() -> None:
    trial = HeldTrial()
    trial.too_hard = True
    async with engine_lab(grammar_trial=trial) as lab:
        gateway = await lab.gateway()
        epoch = lab.engine.state().epoch
        gateway.send(submission("costly", prompt_of(1), 30, num_choices=4, sampling=BOUND))
        await trial.asked.wait()
        await others_answer(gateway, "before")
        trial.goes_on.set()
        for choice in range(4):
            error = (await gateway.ended("costly", choice=choice)).error
            assert isinstance(error, StepFailed)
            assert "3.00 s of processor time and 130 MiB" in error.fact
        await others_answer(gateway, "after")
        assert trial.texts == [WORDS.text], "one trial for all choices"
        assert lab.engine.state().epoch == epoch
        await lab.settle()
        lab.assert_idle()


async def test_an_answer_that_waited_for_its_grammar_is_the_same() -> None:
    async def answers(trial: HeldTrial) -> list[list[int]]:
        async with engine_lab(grammar_trial=trial) as lab:
            gateway = await lab.gateway()
            for index in range(3):
                params = replace(BOUND, seed=index)
                gateway.send(
                    submission(f"g{index}", prompt_of(index), 80, num_choices=2, ignore_eos=False, sampling=params)
                )
            await trial.asked.wait()
            await others_answer(gateway, "free")
            trial.goes_on.set()
            found = [(await gateway.ended(f"g{index}", choice=choice)).ids for index in range(3) for choice in (0, 1)]
        assert trial.texts == [WORDS.text], "compiled once for all"
        return found

    soon, late = HeldTrial(), HeldTrial()
    soon.goes_on.set()
    wanted = await answers(soon)
    assert await answers(late) == wanted
    assert all(ids[-1] == EOS_TOKEN_ID for ids in wanted)


async def test_an_answer_that_waited_tells_what_was_cached_when_it_was_asked() -> None:
    trial, head = HeldTrial(), [*range(96)]
    async with engine_lab(grammar_trial=trial) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("first", head, 4))
        first = (await gateway.ended("first")).ended
        assert first is not None
        assert first.cached_prompt_tokens == 0
        gateway.send(submission("second", [*head, *range(100, 196)], 80, ignore_eos=False, sampling=BOUND))
        await trial.asked.wait()
        await others_answer(gateway, "free")  # meanwhile the second one begins again and finds its own prompt
        trial.goes_on.set()
        second = (await gateway.ended("second")).ended
        assert second is not None
        assert 64 <= second.cached_prompt_tokens <= 96


async def test_a_ring_that_is_always_faster_than_the_grammar_s_state_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached prompt takes a millisecond, replaying a long output takes more: each attempt comes too early."""
    replay = grammar_builds._replay  # pyright: ignore[reportPrivateUsage]

    def slow(*args: Any) -> GrammarState:
        time.sleep(0.1)
        return replay(*args)

    monkeypatch.setattr(grammar_builds, "_replay", slow)
    trial = HeldTrial()
    trial.goes_on.set()
    async with engine_lab(grammar_trial=trial) as lab:
        gateway = await lab.gateway()
        for index in range(2):
            gateway.send(submission(f"{index}", prompt_of(1), 80, ignore_eos=False, sampling=BOUND))
            assert (await gateway.ended(f"{index}")).ids[-1] == EOS_TOKEN_ID


async def test_a_cancelled_answer_does_not_wait_for_its_grammar() -> None:
    trial = HeldTrial()
    async with engine_lab(grammar_trial=trial) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("bound", prompt_of(1), 30, sampling=BOUND))
        await trial.asked.wait()
        await others_answer(gateway, "free")
        gateway.cancel("bound")
        assert (await gateway.ended("bound")).ids == []
        await lab.settle()
        lab.assert_idle()


async def test_a_new_epoch_compiles_the_grammar_again() -> None:
    trial = HeldTrial()
    async with engine_lab(grammar_trial=trial) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("bound", prompt_of(1), 80, ignore_eos=False, sampling=BOUND))
        await trial.asked.wait()
        epoch = lab.engine.state().epoch
        break_stage(lab, 1)
        await lab.until(lambda: lab.engine.state().epoch != epoch)
        trial.goes_on.set()
        assert (await gateway.ended("bound")).ids[-1] == EOS_TOKEN_ID
        assert set(trial.texts) == {WORDS.text}


async def test_answers_that_use_up_a_shared_grammar_go_on_with_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All states of one text share a lexer, whose states are limited: together they need more than one of them."""

    def few_states() -> LLParserLimits:
        return LLParserLimits(max_lexer_states=300)

    monkeypatch.setattr(grammar, "parser_limits", few_states)
    either = regex_grammar("a{200}x|c{200}y")
    trial = HeldTrial()
    trial.goes_on.set()
    async with engine_lab(grammar_trial=trial) as lab:
        gateway = await lab.gateway()
        for letter in "ac":
            bias = ((ord(letter), 100.0),)
            params = SamplingParams(temperature=0.0, grammar=either, logit_bias=bias)
            gateway.send(submission(letter, prompt_of(1), 300, ignore_eos=False, sampling=params))
        assert bytes((await gateway.ended("a")).ids[:-1]) == b"a" * 200 + b"x"
        assert bytes((await gateway.ended("c")).ids[:-1]) == b"c" * 200 + b"y"
    assert len(trial.texts) > 1


async def test_a_gateway_that_skips_its_trial_stops_nobody() -> None:
    """The schema takes seconds and a hundred MiB to compile; the stage's own trial ends that."""
    hostile = replace(BOUND, grammar=json_grammar(multiples_in_a_range(20, 900_000)))
    async with engine_lab(grammar_trial=StageTrial(cpu_s=0.3)) as lab:
        gateway = await lab.gateway()
        gateway.send(submission("hostile", prompt_of(1), 30, num_choices=2, sampling=hostile))
        await others_answer(gateway, "free")
        for choice in (0, 1):
            error = (await gateway.ended("hostile", choice=choice)).error
            assert isinstance(error, StepFailed)
            assert "at most 0.3 s" in error.fact
