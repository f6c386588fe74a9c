"""Choices that wait for their grammar: a growing pause, and an end."""

from __future__ import annotations

import asyncio

from edgepipe.engine.grammar_waits import FIRST_WAIT_S, MAX_WAITS, MOST_WAIT_S, GrammarWaits
from edgepipe.engine.requests import Choice, Request
from edgepipe.ids import NodeId, RequestId, RequestKey, SequenceId
from edgepipe.sampling import SamplingParams
from edgepipe.stage.grammar_builds import DEADLINE_S
from edgepipe.wire.requests import Submission


def a_choice() -> Choice:
    submission = Submission(request_id=RequestId("r"), attempt=1, prompt=(1,), sampling=SamplingParams())
    return Choice(Request(RequestKey(NodeId("n"), RequestId("r")), submission), 0, SequenceId(1), [], sent=0)


async def test_a_choice_waits_longer_each_time_and_not_for_ever() -> None:
    begun: list[Choice] = []
    waits, choice, loop = GrammarWaits(begun.append), a_choice(), asyncio.get_running_loop()
    pauses: list[float] = []
    while waits.hold(choice):
        timer = waits._timers[choice.sequence]  # pyright: ignore[reportPrivateUsage]
        pauses.append(timer.when() - loop.time())
        waits.drop(choice)
    assert not begun
    assert len(pauses) == MAX_WAITS
    assert pauses[0] <= FIRST_WAIT_S
    assert max(pauses) <= MOST_WAIT_S
    assert sum(pauses) > DEADLINE_S, "the stage's own deadline comes first, with its reason"


async def test_a_choice_begins_again_once() -> None:
    begun: asyncio.Queue[Choice] = asyncio.Queue()
    waits, choice = GrammarWaits(begun.put_nowait), a_choice()
    assert waits.hold(choice)
    assert choice in waits
    assert await begun.get() is choice
    assert choice not in waits
