"""What other programs take of this machine's processors while something is measured."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

BUSY_SHARE = 0.2  # of all cores; what is measured beside more says little of quieter times


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Seconds of processor time since some moment, of all cores together."""

    total_s: float
    idle_s: float
    own_s: float  # of the process that measures


def look(pid: int) -> Look:
    """At this moment; ``pid`` measures. A process that has gone took nothing."""
    machine = psutil.cpu_times()
    try:
        own = psutil.Process(pid).cpu_times()
        own_s = own.user + own.system
    except psutil.Error:
        own_s = 0.0
    return Look(total_s=sum(machine), idle_s=machine.idle + getattr(machine, "iowait", 0.0), own_s=own_s)


def others_share(before: Look, after: Look) -> float:
    """0..1: what neither idled nor worked for the process, of all cores between two looks. PURE."""
    total_s = after.total_s - before.total_s
    if total_s <= 0:
        return 0.0
    others_s = total_s - (after.idle_s - before.idle_s) - max(0.0, after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / total_s))
