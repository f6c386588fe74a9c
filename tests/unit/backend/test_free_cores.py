"""Threads beside other programs, and the processors that a container may use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.free_cores import CoreTimes, ThreadChoice
from edgepipe.backend.machine_cores import compute_threads, core_times, group_cores, usable_cores

START_S = 1_000_000.0


class Machine:
    """Processors whose programs use what ``others`` says, beside a stage that uses ``own``."""

    def __init__(self, most: int, cores: float) -> None:
        self.choice = ThreadChoice(most, cores=cores)
        self._now = CoreTimes(START_S, 5000.0, 700.0)
        self.choice.note(self._now)

    def run(self, *, others: float, own: float, seconds: float = 0.5, pause: float = 0.0) -> int:
        at_s, busy_s, own_s = self._now
        self._now = CoreTimes(at_s + seconds, busy_s + (others + own) * seconds, own_s + own * seconds)
        self.choice.ended(self._now.at_s - pause)
        assert self.choice.due(self._now.at_s)
        self.choice.note(self._now)
        return self.choice.threads


@given(st.integers(2, 64), st.integers(1, 4), st.floats(0, 80), st.floats(0, 64))
def test_a_steady_load_leaves_the_threads_that_have_a_core_each(
    most: int, per_core: int, others: float, own: float
) -> None:
    machine = Machine(most, float(most * per_core))
    for _ in range(2):
        machine.run(others=others, own=own)
    threads = machine.run(others=others, own=own)
    free = most * per_core - others
    assert 1 <= threads <= most
    assert threads == 1 or threads - 0.5 <= free + 1e-6
    assert threads == most or threads + 0.5 >= free - 1e-6


def test_threads_go_at_once_and_come_back_after_a_second_quiet_reading() -> None:
    machine = Machine(8, 8.0)
    assert machine.run(others=0.2, own=8.0) == 8
    assert machine.run(others=3.1, own=4.9) == 5
    assert machine.run(others=0.1, own=5.0) == 5
    assert machine.run(others=3.0, own=5.0) == 5, "one quiet moment is no quiet machine"
    assert machine.run(others=0.1, own=5.0) == 5
    assert machine.run(others=0.1, own=5.0) == 8


def test_a_container_with_four_of_many_processors_is_not_crowded_by_the_programs_of_others() -> None:
    machine = Machine(4, 64.0)
    assert machine.run(others=30.0, own=4.0) == 4
    assert machine.run(others=62.0, own=2.0) == 2


def test_a_stage_s_own_time_is_nobody_else_s() -> None:
    machine = Machine(4, 4.0)
    for own in (4.0, 0.1, 2.0):
        assert machine.run(others=0.0, own=own) == 4


def test_what_others_use_while_the_stage_rests_says_nothing() -> None:
    machine = Machine(4, 4.0)
    assert machine.run(others=4.0, own=0.1, seconds=60.0, pause=59.0) == 4
    assert machine.run(others=3.0, own=1.0) == 1
    assert machine.run(others=0.0, own=0.1, seconds=60.0, pause=59.0) == 1
    assert machine.run(others=0.0, own=1.0) == 1
    assert machine.run(others=0.0, own=1.0) == 4


def test_readings_are_due_twice_a_second_and_never_for_one_thread() -> None:
    choice = ThreadChoice(4, cores=4.0)
    assert choice.due(START_S)
    choice.note(CoreTimes(START_S, 0.0, 0.0))
    choice.ended(START_S + 0.3)
    assert not choice.due(START_S + 0.4)
    assert choice.due(START_S + 0.5)
    assert not ThreadChoice(1, cores=8.0).due(START_S)


def test_a_clock_that_stands_still_changes_nothing() -> None:
    choice = ThreadChoice(4, cores=4.0)
    for _ in range(2):
        choice.note(CoreTimes(START_S, 10.0, 0.0))
    assert choice.threads == 4


MOUNT_2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNT_1 = "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        (
            {"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": MOUNT_2, "/sys/fs/cgroup/cpu.max": "150000 100000"},
            1.5,
        ),
        (
            {"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": MOUNT_2, "/sys/fs/cgroup/cpu.max": "max 100000"},
            None,
        ),
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                "/proc/self/mountinfo": MOUNT_2,
                "/sys/fs/cgroup/a/b/cpu.max": "max 100000",
                "/sys/fs/cgroup/a/cpu.max": "200000 50000",
            },
            4.0,
        ),
        (
            {
                "/proc/self/cgroup": "4:cpu,cpuacct:/\n3:memory:/x\n",
                "/proc/self/mountinfo": MOUNT_1,
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "/proc/self/cgroup": "4:cpu,cpuacct:/\n",
                "/proc/self/mountinfo": MOUNT_1,
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"/proc/self/cgroup": "0::/\n", "/proc/self/mountinfo": MOUNT_2, "/sys/fs/cgroup/cpu.max": "a b c"}, None),
        ({}, None),
    ],
)
def test_a_container_s_processors_are_those_of_its_limits(files: dict[str, str], cores: float | None) -> None:
    def read(path: str) -> str:
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    assert group_cores(read) == (float("inf") if cores is None else cores)


def test_this_process_may_use_a_processor_and_its_time_passes() -> None:
    assert 1 <= compute_threads() <= max(1, usable_cores())
    before, total = core_times(), 0
    while core_times().own_s - before.own_s < 0.03:
        total += sum(range(1000))
    after = core_times()
    assert after.at_s > before.at_s
    assert after.busy_s >= before.busy_s
