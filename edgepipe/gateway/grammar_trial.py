"""Compiles grammars on trial, in a child process that the kernel may kill."""

from __future__ import annotations

from edgepipe.children.warm_child import ChildEnded, WarmChild
from edgepipe.gateway.problems import busy
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar_trial import (
    CHILD_MODULE,
    CHILD_START_S,
    TRIAL_CPU_S,
    VERDICT_BYTES,
    pack_question,
    read_verdict,
)

_TRIAL_S = 30.0  # time for the trial's CPU limit on a busy machine


class GrammarTrial:
    """Tries one grammar at a time. The first grammar starts the child process."""

    def __init__(self) -> None:
        self.child = WarmChild(CHILD_MODULE, start_s=CHILD_START_S)

    async def check(self, grammar: GrammarSpec, owner: str = "") -> None:
        """Compile a grammar in its owner's turn.

        Raises RequestInvalid for an invalid grammar, GrammarTooHard, QueueFull, HttpProblem 503.
        """
        question = pack_question(grammar, cpu_s=TRIAL_CPU_S)
        try:
            verdict = await self.child.ask(*question, owner=owner, within_s=_TRIAL_S, most_bytes=VERDICT_BYTES)
        except (TimeoutError, ChildEnded) as exc:
            raise busy("the schema could not be compiled: this machine has too little CPU time or memory now") from exc
        read_verdict(verdict, cpu_s=TRIAL_CPU_S)
