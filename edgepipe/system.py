"""The system's clock and source of identities. All other modules receive them as protocols."""

from __future__ import annotations

import resource
import secrets
import shutil
import sys
import time
from pathlib import Path

# The clock that runs while the machine sleeps: CLOCK_MONOTONIC on macOS, where time.monotonic() stops; CLOCK_BOOTTIME
# on Linux, where CLOCK_MONOTONIC stops. On other systems time.monotonic() itself runs, and no sleep is detected.
_CLOCK_WITH_SLEEP = getattr(time, "CLOCK_MONOTONIC" if sys.platform == "darwin" else "CLOCK_BOOTTIME", None)


_DESCRIPTORS = 65_536


def raise_descriptor_limit() -> None:
    """Raise the limit of open files to the system's maximum, at most 65,536, for this process and its children.

    Each connection of a stranger takes one until its handshake times out.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def find_uv() -> str:
    """Return uv, which installs Python programs: from PATH, or where its installer puts it; empty without it."""
    home = Path.home()
    places = (home / ".local/bin/uv", home / ".cargo/bin/uv")
    return shutil.which("uv") or next((str(path) for path in places if path.exists()), "")


def num_memory_kills() -> int | None:
    """Return the number of processes that the system has killed for lack of memory; None if it keeps no count."""
    try:
        with open("/proc/vmstat", encoding="ascii") as counters:
            return next((int(line.split()[1]) for line in counters if line.startswith("oom_kill ")), None)
    except OSError:
        return None


class SystemClock:
    """The machine's ``edgepipe.clock.Clock``."""

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary start."""
        return time.monotonic()

    def boot_s(self) -> float:
        """Return seconds since an arbitrary start, including the machine's sleep."""
        return time.monotonic() if _CLOCK_WITH_SLEEP is None else time.clock_gettime(_CLOCK_WITH_SLEEP)

    def wall_s(self) -> float:
        """Return seconds since 1970."""
        return time.time()


class RandomIds:
    """An ``edgepipe.ids.IdSource`` of random numbers from the system."""

    def new(self, prefix: str) -> str:
        """Return an identity such as ``pipeline-3f9a0c21``: 64 random bits are unique in a cluster."""
        return f"{prefix}-{secrets.token_hex(8)}"
