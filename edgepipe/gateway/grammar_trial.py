"""Compile grammars on trial, in a child process that may be killed."""

from __future__ import annotations

from edgepipe.gateway.problems import busy
from edgepipe.model.warm_child import ChildEnded, WarmChild
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import unusable_schema

_START_S = 20.0  # an interpreter starting on a starved machine
_TRIAL_S = 60.0  # the child's CPU limit, on a machine that has other work
_MOST_BYTES = 4096  # of an answer: a sentence


class GrammarTooHard(Exception):
    """The grammar takes more work to compile than a request may ask for."""


class GrammarTrial:
    """Tries one grammar at a time. The first one starts the child."""

    def __init__(self) -> None:
        self.child = WarmChild("edgepipe.gateway.grammar_child", start_s=_START_S)

    async def check(self, grammar: GrammarSpec) -> None:
        """Raises RequestInvalid if the grammar cannot be compiled, GrammarTooHard, and HttpProblem 503."""
        try:
            fact = await self.child.ask(grammar.text.encode(), within_s=_TRIAL_S, most_bytes=_MOST_BYTES)
        except (TimeoutError, ChildEnded) as exc:
            if isinstance(exc, ChildEnded) and exc.started:
                raise GrammarTooHard from exc
            raise busy("the schema could not be compiled: this machine has too little time or memory now") from exc
        if fact:
            raise unusable_schema(fact.decode())
