"""A machine that sleeps and wakes, by two clocks; cases T1, T2 and T4 of the fault catalogue."""

from __future__ import annotations

from edgepipe.cluster.sleep import SleepWatch
from edgepipe.daemon.machine.sleep_guard import SleepGuard
from edgepipe.system import SystemClock
from edgepipe.testing.clock import FakeClock


def test_what_was_slept_is_told_once() -> None:
    clock = FakeClock()
    watch = SleepWatch(clock)
    clock.advance(60.0)
    assert watch.slept_s() == 0.0
    clock.sleep(60.0)
    clock.advance(0.25)
    assert watch.slept_s() == 60.0
    assert watch.slept_s() == 0.0


def test_a_set_date_is_no_sleep() -> None:
    clock = FakeClock()
    watch = SleepWatch(clock)
    for jump_s in (86_400.0, -86_400.0, -40 * 365 * 86_400.0):
        clock.wall_jump(jump_s)
        clock.advance(0.25)
        assert watch.slept_s() == 0.0


def test_the_systems_clocks_agree_while_awake() -> None:
    watch = SleepWatch(SystemClock())
    assert watch.slept_s() == 0.0


async def test_announced_sleep_is_told_and_waking_too() -> None:
    clock, announced, woken = FakeClock(), list[bool](), list[float]()

    async def on_wake(slept_s: float) -> None:
        woken.append(slept_s)

    guard = SleepGuard(clock, tell=announced.append, on_wake=on_wake)
    await guard.look()
    assert (announced, woken) == ([], [])
    guard.announce()
    await guard.look()
    assert announced == [True]
    clock.sleep(3600.0)
    await guard.look()
    assert (announced, woken) == ([True, False], [3600.0])


async def test_sleep_that_does_not_come_is_taken_back() -> None:
    clock, announced = FakeClock(), list[bool]()

    async def on_wake(slept_s: float) -> None:
        raise AssertionError("it did not sleep")

    guard = SleepGuard(clock, tell=announced.append, on_wake=on_wake)
    guard.announce()
    clock.advance(31.0)
    await guard.look()
    assert announced == [True, False]
