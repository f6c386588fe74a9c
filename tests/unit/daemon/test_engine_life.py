"""Single steps of an engine's life that random histories do not reach."""

from __future__ import annotations

from edgepipe.daemon.serving.engine_life import EngineLives
from edgepipe.daemon.serving.engine_life_types import (
    Kill,
    Launch,
    Launched,
    ProcessEnded,
    StartWanted,
    Stop,
    StopWanted,
    Surroundings,
)
from edgepipe.errors import StageLost

AROUND = Surroundings(own_id="a", usable=frozenset("a"), owned=frozenset("p"), ends=False)
NOW_S = 1_000_000.0


def wanted(run: int) -> StartWanted:
    return StartWanted(run=run, pipeline_id="p", model="m", ring=("a",), resuming=True)


def test_a_start_ends_the_engine_that_the_pipeline_has_here() -> None:
    lives = EngineLives()
    assert lives.handle(wanted(1), AROUND, NOW_S) == [Launch(run=1, attempt=1, resuming=True)]
    assert lives.handle(wanted(2), AROUND, NOW_S) == [Kill(run=1), Launch(run=2, attempt=2, resuming=True)]
    assert lives.handle(Launched(run=1, attempt=1), AROUND, NOW_S) == []
    assert lives.expects(2, 2)


def test_what_comes_of_an_engine_that_stops_starts_nothing() -> None:
    lives = EngineLives()
    lives.handle(wanted(1), AROUND, NOW_S)
    assert lives.handle(StopWanted("p"), AROUND, NOW_S) == [Stop(run=1)]
    assert lives.handle(StopWanted("p"), AROUND, NOW_S) == []
    ended = ProcessEnded(run=1, attempt=1, error=StageLost("it ended"), told=False)
    assert lives.handle(ended, AROUND, NOW_S) == []
    assert lives.wake_at_s is None
