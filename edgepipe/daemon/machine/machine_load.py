"""The share of this machine's processors that other programs use during a measurement."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

BUSY_SHARE = 0.2  # share of all cores; beside more load, measurements say little of quieter times


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorTimes:
    """Seconds of processor time since some moment, of all cores together."""

    total_s: float
    idle_s: float
    own_s: float  # time of the process that measures


def processor_times(pid: int) -> ProcessorTimes:
    """Read the processor times; ``pid`` is the process that measures. A process that has ended used nothing."""
    machine = psutil.cpu_times()
    try:
        own = psutil.Process(pid).cpu_times()
        own_s = own.user + own.system
    except psutil.Error:
        own_s = 0.0
    return ProcessorTimes(total_s=sum(machine), idle_s=machine.idle + getattr(machine, "iowait", 0.0), own_s=own_s)


def others_share(before: ProcessorTimes, after: ProcessorTimes) -> float:
    """Return the share 0..1 of all cores that other processes used between two readings. PURE."""
    total_s = after.total_s - before.total_s
    if total_s <= 0:
        return 0.0
    others_s = total_s - (after.idle_s - before.idle_s) - max(0.0, after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / total_s))
