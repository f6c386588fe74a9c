"""PURE: the memory that a container, or another control group of Linux, leaves its processes.

The system's own figures are those of the whole machine. A process beyond the limit of its group is killed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from edgepipe.backend.control_groups import FIRST, SECOND, Read, group_folders

_NO_LIMIT = "max"
# Files' pages and caches that the kernel frees before it kills, as it counts them itself where there is no group.
_FREED_FIRST = ("active_file", "inactive_file", "slab_reclaimable")


class GroupMemory(NamedTuple):
    """What a group's limits leave."""

    available_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class _Version:
    """The files of a version of control groups."""

    limits: tuple[str, ...]
    used: str
    prefix: str  # of names in ``memory.stat`` that count groups below, too


_VERSIONS = {
    FIRST: _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
    SECOND: _Version(("memory.max", "memory.high"), "memory.current", ""),  # above ``high`` the kernel slows it down
}


def group_memory(read: Read, *, machine_bytes: int) -> GroupMemory | None:
    """Return what the limits of this process's groups leave, those of groups above included.

    machine_bytes  all memory of the machine

    None if no group has a limit below that.
    """
    folders = group_folders(read, "memory")
    found = [
        memory
        for version, folder in folders
        if (memory := _memory(read, _VERSIONS[version], folder, machine_bytes)) is not None
    ]
    if not found:
        return None
    return GroupMemory(min(each.available_bytes for each in found), min(each.total_bytes for each in found))


def _memory(read: Read, version: _Version, folder: str, machine_bytes: int) -> GroupMemory | None:
    limits: list[int] = []
    for name in version.limits:
        with suppress(OSError, ValueError):
            if (text := read(f"{folder}/{name}").strip()) != _NO_LIMIT:
                limits.append(int(text))
    if min(limits, default=machine_bytes) >= machine_bytes:
        return None  # the kernel takes a while to count what a group uses
    try:
        used = int(read(f"{folder}/{version.used}"))
        counts = _counts(read(f"{folder}/memory.stat"))
        freed = sum(counts.get(version.prefix + name, 0) for name in _FREED_FIRST)
    except (OSError, ValueError):
        return None
    return GroupMemory(max(0, min(limits) - max(0, used - freed)), min(limits))


def _counts(stat: str) -> dict[str, int]:
    """Return the counters of a ``memory.stat``."""
    pairs = (line.split() for line in stat.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
