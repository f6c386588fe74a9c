"""PURE: the memory that a container, or another control group of Linux, leaves its processes.

The system's own figures are those of the whole machine. A process beyond the limit of its group is killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
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
    prefix: str  # prefix of names in ``memory.stat`` that count groups below, too


# Above ``memory.high``, the kernel slows a group down.
_SECOND = _Version(("memory.max", "memory.high"), "memory.current", "")
_FIRST = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")


def group_memory(read: Read, *, machine_bytes: int) -> GroupMemory | None:
    """Return what the limits of this process's groups leave, those of groups above included.

    machine_bytes  all memory of the machine

    None if no group has a limit below that.
    """
    folders = _folders(read)
    found = [memory for each in folders if (memory := _memory(read, *each, machine_bytes)) is not None]
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


def _folders(read: Read) -> Iterator[tuple[_Version, str]]:
    """Yield the folders of the process's groups that may limit memory: its own, and those above as far as they show.

    This runs four times a second on the stage's loop, so paths are strings: ``pathlib`` takes ten times as long.
    """
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
            folder = _plain(fields[4]).rstrip("/")
            yield version, folder
            for part in _below(paths.pop(version), _plain(fields[3])):
                folder = f"{folder}/{part}"
                yield version, folder


def _version(kind: str, options: str) -> _Version | None:
    if kind == "cgroup2":
        return _SECOND
    return _FIRST if kind == "cgroup" and "memory" in options.split(",") else None


def _below(path: str, root: str) -> list[str]:
    """Return the folders from a mount of the group ``root`` to a group; none if the mount does not show the path."""
    parts, above = ([part for part in each.split("/") if part] for each in (path, root))
    return parts[len(above) :] if ".." not in parts and parts[: len(above)] == above else []


def _plain(field: str) -> str:
    """Undo the escapes of a path in ``mountinfo``."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
