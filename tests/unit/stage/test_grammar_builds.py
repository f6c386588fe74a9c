"""A stage compiles the grammars of several users in turns, and one of a user at a time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from edgepipe.children.forked_job import JobCost
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
