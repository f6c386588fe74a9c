"""The stage's trial of grammars: the gateway's, with more time, because a stage's processor may be slower.

A stage cannot rely on the gateway's trial: the gateway of a machine that has turned may skip it. A thread that
compiles cannot be stopped, so the child process, which can, compiles each unknown text first. That doubles the work
of a text that is used for the first time: 1 to 20 ms for ordinary schemas.
"""

from __future__ import annotations

from edgepipe.children.forked_job import JobCost
from edgepipe.children.warm_child import ChildEnded, WarmChild
from edgepipe.errors import StepFailed
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar_trial import (
    CHILD_MODULE,
    CHILD_START_S,
    TRIAL_CPU_S,
    VERDICT_BYTES,
    pack_question,
    read_verdict,
)

STAGE_CPU_S = 3 * TRIAL_CPU_S
_WITHIN_S = 20.0  # time in which a busy machine spends the CPU limit


class StageTrial:
    """Tries one grammar at a time. The first grammar starts the child process."""

    def __init__(self, *, cpu_s: float = STAGE_CPU_S) -> None:
        """``cpu_s``: processor time for one grammar."""
        self._cpu_s = cpu_s
        self._child = WarmChild(CHILD_MODULE, start_s=CHILD_START_S)

    async def check(self, grammar: GrammarSpec) -> JobCost:
        """Return what compiling takes. Raises RequestInvalid, GrammarTooHard; StepFailed if no child can run."""
        question = pack_question(grammar, cpu_s=self._cpu_s)
        try:
            verdict = await self._child.ask(*question, owner=grammar.user, within_s=_WITHIN_S, most_bytes=VERDICT_BYTES)
        except (TimeoutError, ChildEnded) as exc:
            raise StepFailed(
                "the answer's grammar could not be compiled",
                fact="this node has too little processor time or memory now",
                next_step="send the request again in some seconds",
            ) from exc
        return read_verdict(verdict, cpu_s=self._cpu_s)

    async def close(self) -> None:
        """End the child process."""
        await self._child.close()
