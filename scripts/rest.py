"""Whether the processes that a benchmark has started rest, also on a machine that is slow or crowded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

_EACH_S = 1.0  # time between two looks
_QUIET_SHARE = 0.1  # part of a core: all processes together rest at once if they take no more
_BUSY_SHARE = 0.5  # part of a core: a process that could use more does not rest
_CALM_LOOKS = 3  # looks without such a process


class Used(NamedTuple):
    """What one process has used since it began."""

    name: str
    processor_s: float
    waited_s: float = 0.0  # time in which its threads waited for a core; 0 where the system does not tell


class Rest:
    """Follows processes from look to look.

    Idle nodes need little of a fast machine, and more than a tenth of a core of a slow one. But no idle process could
    use half a core, and a process that starts always could: it runs, or waits for a core, all the time.
    """

    def __init__(self, used: Mapping[int, Used]) -> None:
        """``used``: by process id, at the first look."""
        self._used = used
        self._calm = 0
        self.busiest = ("", 0.0)  # name of the process that could use most of a core since the last look, and the share

    def look(self, used: Mapping[int, Used], *, passed_s: float) -> bool:
        """Return whether the processes rest. ``passed_s``: seconds since the look before."""
        nothing = Used("", 0.0)
        before, self._used = self._used, used
        found = [(each, before.get(process, nothing)) for process, each in used.items()]
        took_s = sum(each.processor_s - earlier.processor_s for each, earlier in found)
        could_s = [each.processor_s + each.waited_s - earlier.processor_s - earlier.waited_s for each, earlier in found]
        most_s = max(could_s, default=0.0)
        self.busiest = (found[could_s.index(most_s)][0].name if found else "", most_s / passed_s)
        self._calm = self._calm + 1 if most_s < _BUSY_SHARE * passed_s else 0
        return took_s < _QUIET_SHARE * passed_s or self._calm >= _CALM_LOOKS


def await_rest(*, within_s: float, look: Callable[[], Mapping[int, Used]] | None = None) -> None:
    """Wait until all processes that this one has started rest. Raises RuntimeError with the busiest one's name."""
    look = look or _children
    began_s = looked_s = time.monotonic()
    rest = Rest(look())
    while looked_s - began_s < within_s:
        time.sleep(_EACH_S)
        before_s, looked_s = looked_s, time.monotonic()
        if rest.look(look(), passed_s=looked_s - before_s):
            return
    name, share = rest.busiest
    raise RuntimeError(f"the nodes' processes do not rest: {name} could use {share:.0%} of a core")


def _children() -> dict[int, Used]:
    """Return what the processes have used that this one has started and that run."""
    found: dict[int, Used] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            name = f"{' '.join(process.cmdline()[-2:])} ({process.pid})"
            found[process.pid] = Used(name, times.user + times.system, _waited_s(process.pid))
    return found


def _waited_s(process: int) -> float:
    """Return how long the threads of a process waited for a core. Linux alone tells."""
    total_ns = 0
    for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with suppress(OSError, IndexError, ValueError):  # the thread has ended
            total_ns += int(path.read_text().split()[1])
    return total_ns / 1e9
