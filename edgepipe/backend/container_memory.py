"""PURE: the memory that a container, or another control group of Linux, leaves its processes.

The system's own figures are those of the whole machine. A process beyond the limit of its group is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

_NO_LIMIT = "max"
# Files' pages and caches that the kernel frees before it kills, as it counts them itself where there is no group.
_FREED_FIRST = ("active_file", "inactive_file", "slab_reclaimable")

Read = Callable[[str], str]
"""Returns the text of a file. Raises OSError."""


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


# Above ``memory.high``, the kernel slows a group down.
_SECOND = _Version(("memory.max", "memory.high"), "memory.current", "")
_FIRST = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")


def group_memory(read: Read) -> GroupMemory | None:
    """Return what the limits of this process's groups leave, those of groups above included; None without a limit."""
    found = [memory for version, folder in _folders(read) if (memory := _memory(read, version, folder)) is not None]
    if not found:
        return None
    return GroupMemory(min(each.available_bytes for each in found), min(each.total_bytes for each in found))


def _memory(read: Read, version: _Version, folder: PurePosixPath) -> GroupMemory | None:
    limits: list[int] = []
    for name in version.limits:
        with suppress(OSError, ValueError):
            if (text := read(str(folder / name)).strip()) != _NO_LIMIT:
                limits.append(int(text))
    if not limits:
        return None
    try:
        used = int(read(str(folder / version.used)))
        freed = sum(_counts(read(str(folder / "memory.stat"))).get(version.prefix + name, 0) for name in _FREED_FIRST)
    except (OSError, ValueError):
        return None
    return GroupMemory(max(0, min(limits) - max(0, used - freed)), min(limits))


def _counts(stat: str) -> dict[str, int]:
    """Return the counters of a ``memory.stat``."""
    pairs = (line.split() for line in stat.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _folders(read: Read) -> Iterator[tuple[_Version, PurePosixPath]]:
    """Yield the folders of the process's groups that may limit memory: its own, and those above as far as they show."""
    try:
        groups, mounts = read("/proc/self/cgroup"), read("/proc/self/mountinfo")
    except OSError:
        return
    paths: dict[_Version, str] = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[_SECOND] = path
        elif "memory" in controllers.split(","):
            paths[_FIRST] = path
    for line in mounts.splitlines():
        place, _, kind = line.partition(" - ")
        fields, types = place.split(), kind.split()
        if len(fields) < 5 or len(types) < 3:
            continue
        version = _version(types[0], types[2])
        if version is not None and version in paths:
            top = PurePosixPath(_plain(fields[4]))
            own = top / _below(paths[version], _plain(fields[3]))
            yield from ((version, folder) for folder in (own, *own.parents) if folder.is_relative_to(top))
            del paths[version]


def _version(kind: str, options: str) -> _Version | None:
    if kind == "cgroup2":
        return _SECOND
    return _FIRST if kind == "cgroup" and "memory" in options.split(",") else None


def _below(path: str, root: str) -> PurePosixPath:
    """Return a group's place below a mount of the group ``root``; the mount itself if it shows no more of the path."""
    group = PurePosixPath(path)
    return group.relative_to(root) if ".." not in group.parts and group.is_relative_to(root) else PurePosixPath()


def _plain(field: str) -> str:
    """Undo the escapes of a path in ``mountinfo``."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
