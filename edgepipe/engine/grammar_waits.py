"""Choices whose grammar the last stage still compiles: they wait outside the pipeline, and begin again a little later.

A choice keeps its tokens and its place in its request. Beginning again costs little, since the prefix cache has its
prompt; and a prompt that takes longer than the grammar never waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgepipe.engine.requests import Choice
from edgepipe.ids import SequenceId

FIRST_WAIT_S = 0.02  # ordinary grammars take 1 to 20 ms
MOST_WAIT_S = 0.5
MAX_WAITS = 90  # about 43 s: more than a stage's deadline for a grammar (``stage/grammar_builds.py``)


class GrammarWaits:
    """Timers of the waiting choices. Runs on one event loop."""

    def __init__(self, again: Callable[[Choice], None]) -> None:
        """``again`` begins a choice that has waited."""
        self._again = again
        self._timers: dict[SequenceId, asyncio.TimerHandle] = {}

    def __contains__(self, choice: Choice) -> bool:
        return choice.sequence in self._timers

    def hold(self, choice: Choice) -> bool:
        """Let a choice wait, each time twice as long as before. Return False if it has waited too often."""
        if choice.grammar_waits >= MAX_WAITS:
            return False
        wait_s = min(MOST_WAIT_S, FIRST_WAIT_S * 2 ** min(choice.grammar_waits, 10))
        choice.grammar_waits += 1
        loop = asyncio.get_running_loop()
        self._timers[choice.sequence] = loop.call_later(wait_s, self._due, choice)
        return True

    def drop(self, choice: Choice) -> None:
        """Forget a choice, if it waits."""
        if (timer := self._timers.pop(choice.sequence, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Forget all choices."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _due(self, choice: Choice) -> None:
        del self._timers[choice.sequence]
        self._again(choice)
