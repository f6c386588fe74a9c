"""A stage compiles the grammars of several users in turns, and one of a user at a time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from edgepipe.children.forked_job import JobCost
from edgepipe.errors import GrammarNotReady, StepFailed
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import GrammarTokenizer, json_grammar
from edgepipe.stage.grammar_builds import GrammarBuilds, PendingGrammar


class SlowForOne:
    """A trial that does not end for user "flood" until it may."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.go_on = asyncio.Event()

    async def check(self, grammar: GrammarSpec) -> JobCost:
        self.tried.append(grammar.user)
        if grammar.user == "flood":
            await self.go_on.wait()
        return JobCost(cpu_s=0.0, peak_bytes=0)

    async def close(self) -> None:
        """Nothing to end."""


class Immediate:
    """A trial that allows everything."""

    async def check(self, grammar: GrammarSpec) -> JobCost:
        return JobCost(cpu_s=0.0, peak_bytes=0)

    async def close(self) -> None:
        """Nothing to end."""


def vocabulary() -> GrammarTokenizer:
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    return GrammarTokenizer(tokens, encode=lambda text: list(text.encode()), end_ids=[256], special_ids=[256])


def spec(user: str, number: int) -> GrammarSpec:
    return replace(json_grammar({"const": number}), user=user)


async def test_beside_one_user_s_flood_of_grammars_another_s_is_compiled_at_once() -> None:
    trial = SlowForOne()
    known = vocabulary()
    builds = GrammarBuilds(lambda: known, trial)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(builds.prepare(spec("flood", number), (), PendingGrammar()))
        pending = PendingGrammar()
        await tasks.create_task(builds.prepare(spec("other", 99), (), pending))
        assert pending.state(()).mask().any()
        assert trial.tried.count("flood") <= 1
        trial.go_on.set()
    assert trial.tried.count("flood") == 10
    await builds.close()


async def test_a_sequence_that_always_comes_too_early_finds_what_was_prepared_for_it() -> None:
    """On a fast ring a sequence that begins again is sampled at once, while replaying its output takes some time."""
    known, output = vocabulary(), tuple(b"[1,2,3")
    grammar = json_grammar({"type": "array", "items": {"type": "integer"}})
    builds = GrammarBuilds(lambda: known, Immediate())
    early = PendingGrammar()
    with pytest.raises(GrammarNotReady):
        early.state(output)
    assert builds.settled(grammar, output) is None
    await builds.prepare(grammar, output, early)
    again = builds.settled(grammar, output)
    assert again is not None
    state = again.state(output)
    state.take(ord("]"))
    assert again.state(output).mask().any(), "another sequence with the same output has a state of its own"
    assert builds.settled(grammar, output[:-1]) is None
    assert builds.settled(replace(grammar, user="another"), output) is None
    await builds.close()


async def test_a_refusal_that_comes_too_late_is_kept_for_the_next_attempt() -> None:
    known, grammar = vocabulary(), GrammarSpec(text='%llguidance {}\nstart: "')
    builds = GrammarBuilds(lambda: known, Immediate())
    early = PendingGrammar()
    with pytest.raises(GrammarNotReady):
        early.state(())
    await builds.prepare(grammar, (), early)
    again = builds.settled(grammar, ())
    assert again is not None
    with pytest.raises(StepFailed, match="grammar"):
        again.state(())
    await builds.close()


async def test_a_grammar_that_is_ready_in_time_is_not_kept() -> None:
    known, grammar = vocabulary(), json_grammar({"const": 1})
    builds = GrammarBuilds(lambda: known, Immediate())
    pending = PendingGrammar()
    await builds.prepare(grammar, (), pending)
    assert pending.state(()).mask().any()
    assert builds.settled(grammar, ()) is None
    await builds.close()
