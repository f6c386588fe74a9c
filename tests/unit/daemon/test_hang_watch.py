"""When a child hangs, and when it only works or waits."""

from __future__ import annotations

import pytest

from edgepipe.daemon.processes.hang_watch import HangWatch
from edgepipe.testing.clock import START_S
from edgepipe.wire.children import ChildProgress

EVERY_S = 0.25


def watched(*reports: tuple[float, ChildProgress], until: float) -> str:
    """What a daemon that looks four times a second says in the end."""
    watch = HangWatch(hang_s=5.0, now=START_S)
    due = list(reports)
    for look in range(1, int(until / EVERY_S) + 1):
        passed_s = look * EVERY_S
        while due and due[0][0] <= passed_s:
            watch.report(due.pop(0)[1], now=START_S + passed_s)
        if why := watch.why_hung(now=START_S + passed_s, every_s=EVERY_S):
            return f"{passed_s:g} s: {why}"
    return ""


def idle(now: float) -> tuple[float, ChildProgress]:
    return now, ChildProgress(started=3, finished=3)


def busy(now: float, *, finished: int, limit_s: float = 5.0) -> tuple[float, ChildProgress]:
    return now, ChildProgress(started=finished + 1, finished=finished, limit_ms=int(limit_s * 1e3))


@pytest.mark.parametrize(
    ("reports", "until", "hung"),
    [
        ([idle(second) for second in range(30)], 30.0, ""),
        ([idle(1.0)], 30.0, "6 s: it has reported nothing"),
        ([busy(second, finished=second) for second in range(30)], 30.0, ""),
        ([busy(second, finished=7) for second in range(30)], 30.0, "5.25 s: step 8 of 8 started ones runs"),
        ([busy(second, finished=7, limit_s=60.0) for second in range(40)], 40.0, ""),
        ([busy(second, finished=7, limit_s=20.0) for second in range(40)], 40.0, "20.25 s: step 8"),
    ],
)
def test_only_silence_and_a_step_without_end_are_hangs(
    reports: list[tuple[float, ChildProgress]], until: float, hung: str
) -> None:
    said = watched(*reports, until=until)
    assert said.startswith(hung) if hung else not said


def test_a_daemon_that_was_stopped_itself_blames_nobody() -> None:
    watch = HangWatch(hang_s=5.0, now=START_S)
    watch.report(ChildProgress(started=1), now=START_S)
    assert not watch.why_hung(now=START_S + 0.25, every_s=EVERY_S)
    assert not watch.why_hung(now=START_S + 60.0, every_s=EVERY_S)
    assert watch.why_hung(now=START_S + 60.25, every_s=EVERY_S) == ""
