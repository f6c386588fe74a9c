"""Compiles grammars on trial, in a child process that the kernel may kill."""

from __future__ import annotations

from edgepipe.gateway.problems import busy
from edgepipe.model.warm_child import ChildEnded, WarmChild
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import unusable_schema

_START_S = 20.0  # start of an interpreter on an overloaded machine
_TRIAL_S = 60.0  # time for the child's CPU limit on a busy machine
_MOST_BYTES = 4096  # an answer is a sentence


class GrammarTooHard(Exception):
    """Compiling the grammar takes more work than a request may cause."""


class GrammarTrial:
    """Tries one grammar at a time. The first grammar starts the child process."""

    def __init__(self) -> None:
        self.child = WarmChild("edgepipe.gateway.grammar_child", start_s=_START_S)

    async def check(self, grammar: GrammarSpec, owner: str = "") -> None:
        """Compile a grammar in its owner's turn.

        Raises RequestInvalid for an invalid grammar, GrammarTooHard, QueueFull, HttpProblem 503.
        """
        try:
            fact = await self.child.ask(grammar.text.encode(), owner=owner, within_s=_TRIAL_S, most_bytes=_MOST_BYTES)
        except (TimeoutError, ChildEnded) as exc:
            if isinstance(exc, ChildEnded) and exc.started:
                raise GrammarTooHard from exc
            raise busy("the schema could not be compiled: this machine has too little CPU time or memory now") from exc
        if fact:
            raise unusable_schema(fact.decode())
