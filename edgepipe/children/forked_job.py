"""Run one piece of work in a forked process that the kernel ends at a limit, and measure what it took.

Only for a process with one thread, such as a warm child: the fork keeps what the child has loaded.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

from edgepipe.children.child_memory import limit_memory

_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of ``ru_maxrss``


@dataclass(frozen=True, slots=True)
class JobCost:
    """What a job took."""

    cpu_s: float  # processor time
    peak_bytes: int  # resident memory beyond what the process had when it began


@dataclass(frozen=True, slots=True)
class JobResult:
    """Outcome of a job."""

    answer: bytes | None  # None: it reached a limit or crashed
    cost: JobCost


def run_forked(job: Callable[[], bytes], *, cpu_s: float, memory_bytes: int) -> JobResult:
    """Run ``job`` in a fork of this process and return its answer.

    cpu_s         processor time after which the kernel kills it
    memory_bytes  limit of its additional address space; if the platform refuses it, ``cpu_s`` bounds the memory
    """
    source, target = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(source)
        _work(job, target, cpu_s, memory_bytes)
    os.close(target)
    with open(source, "rb") as pipe:
        start = pipe.read(8)
        answer = pipe.read()
    _, status, usage = os.wait4(pid, 0)
    peak = usage.ru_maxrss * _PEAK_UNIT - int.from_bytes(start, "big")
    used_s = usage.ru_utime + usage.ru_stime
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        used_s = max(used_s, cpu_s)  # the timer counts whole ticks, so it may run ahead
    cost = JobCost(cpu_s=used_s, peak_bytes=max(0, peak))
    return JobResult(answer if status == 0 else None, cost)


def _work(job: Callable[[], bytes], target: int, cpu_s: float, memory_bytes: int) -> None:
    """Do the job in the forked process, which ends here."""
    code = 1
    try:
        for inherited in (0, 1):  # the parent's pipes, which would seem open while this process lives
            os.close(inherited)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT
        os.write(target, peak.to_bytes(8, "big"))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_memory(memory_bytes)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        with open(target, "wb") as pipe:
            pipe.write(job())
        code = 0
    finally:
        os._exit(code)
