"""The machine's memory that this process may use, in a container that of the container."""

from __future__ import annotations

import sys

import psutil

from edgepipe.backend.container_memory import GroupMemory, group_memory


def machine_memory() -> GroupMemory:
    """Measure what is left for all programs, and all memory: the least of the machine's and its groups' limits."""
    machine = psutil.virtual_memory()
    group = group_memory(read_file, machine_bytes=machine.total) if sys.platform == "linux" else None
    if group is None:
        return GroupMemory(machine.available, machine.total)
    return GroupMemory(min(machine.available, group.available_bytes), min(machine.total, group.total_bytes))


def read_file(path: str) -> str:
    """Return the text of a system's file. Raises OSError."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
