"""PURE: the control groups of Linux that limit this process, such as a container's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

Read = Callable[[str], str]
"""Returns the text of a file. Raises OSError."""

FIRST, SECOND = 1, 2
"""Versions of control groups: their files have other names."""


def group_folders(read: Read, controller: str) -> Iterator[tuple[int, str]]:
    """Yield version and folder of each group that may limit the process: its own, and those above as far as they show.

    controller  such as ``memory``

    This runs four times a second on the stage's loop, so paths are strings: ``pathlib`` takes ten times as long.
    """
    try:
        groups, mounts = read("/proc/self/cgroup"), read("/proc/self/mountinfo")
    except OSError:
        return
    paths: dict[int, str] = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[SECOND] = path
        elif controller in controllers.split(","):
            paths[FIRST] = path
    for line in mounts.splitlines():
        place, _, kind = line.partition(" - ")
        fields, types = place.split(), kind.split()
        if len(fields) < 5 or len(types) < 3:
            continue
        version = _version(types[0], types[2], controller)
        if version is not None and version in paths:
            folder = _plain(fields[4]).rstrip("/")
            yield version, folder
            for part in _below(paths.pop(version), _plain(fields[3])):
                folder = f"{folder}/{part}"
                yield version, folder


def _version(kind: str, options: str, controller: str) -> int | None:
    if kind == "cgroup2":
        return SECOND
    return FIRST if kind == "cgroup" and controller in options.split(",") else None


def _below(path: str, root: str) -> list[str]:
    """Return the folders from a mount of the group ``root`` to a group; none if the mount does not show the path."""
    parts, above = ([part for part in each.split("/") if part] for each in (path, root))
    return parts[len(above) :] if ".." not in parts and parts[: len(above)] == above else []


def _plain(field: str) -> str:
    """Undo the escapes of a path in ``mountinfo``."""
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
