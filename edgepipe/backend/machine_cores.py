"""The processors that this process may compute on, and how much of them other programs leave."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from math import inf

import psutil

from edgepipe.backend.control_groups import SECOND, Read, group_folders
from edgepipe.backend.free_cores import CoreTimes
from edgepipe.backend.machine_memory import read_file

_NO_LIMIT = "max"


def usable_cores() -> float:
    """Return the number of logical processors that this process may use: the least of the machine's and its limits."""
    count = float(os.cpu_count() or 1)
    if sys.platform == "linux":
        count = min(count, len(os.sched_getaffinity(0)), group_cores(read_file))
    return count


def compute_threads() -> int:
    """Return how many threads compute fastest on a quiet machine: one for each core, within the process's limits."""
    return max(1, min(psutil.cpu_count(logical=False) or 1, int(usable_cores())))


def core_times() -> CoreTimes:
    """Read the processor time of all programs and of this process. Programs with a lowered priority do not count."""
    machine = psutil.cpu_times()
    names = ("user", "system", "irq", "softirq", "steal")
    return CoreTimes(time.monotonic(), sum(getattr(machine, name, 0.0) for name in names), time.process_time())


def group_cores(read: Read) -> float:
    """Return the processors that the limits of this process's groups allow; infinite without a limit. PURE."""
    least = inf
    for version, folder in group_folders(read, "cpu"):
        with suppress(OSError, ValueError):
            if version == SECOND:
                quota, period = read(f"{folder}/cpu.max").split()
            else:
                quota, period = (read(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
            if quota != _NO_LIMIT and int(quota) > 0 and int(period) > 0:
                least = min(least, int(quota) / int(period))
    return least
