"""A bound on a child process' memory that means the same on every machine."""

from __future__ import annotations

import os
import resource


def limit_memory(most_bytes: int) -> bool:
    """Bound how far the address space may grow from here on. Return False where the platform refuses (macOS).

    The limit counts address space, and a bare interpreter maps 20 to 300 MB of it depending on the platform without
    using it, so an absolute limit would mean something else on each machine.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            mapped = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + most_bytes, mapped + most_bytes))
    except (OSError, ValueError):
        return False
    return True
