"""The system's clock and source of identities; everybody else is handed a protocol."""

from __future__ import annotations

import resource
import secrets
import sys
import time

# Which clock goes on while the machine sleeps. On macOS that is CLOCK_MONOTONIC, and time.monotonic() stands still; on
# Linux it is the other way round with CLOCK_BOOTTIME. Elsewhere time.monotonic() itself goes on, and no sleep is seen.
_CLOCK_WITH_SLEEP = getattr(time, "CLOCK_MONOTONIC" if sys.platform == "darwin" else "CLOCK_BOOTTIME", None)


_DESCRIPTORS = 65_536


def raise_descriptor_limit() -> None:
    """Let this process and its children have as many open files as the system allows, up to 65,536: strangers'
    connections take one each until their handshake times out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def num_memory_kills() -> int | None:
    """Processes that the system has ended so far for want of memory; None where it does not count them."""
    try:
        with open("/proc/vmstat", encoding="ascii") as counters:
            return next((int(line.split()[1]) for line in counters if line.startswith("oom_kill ")), None)
    except OSError:
        return None


class SystemClock:
    """``edgepipe.clock.Clock`` of this machine."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()

    def boot_s(self) -> float:
        """Seconds since an arbitrary start, those that the machine slept included."""
        return time.monotonic() if _CLOCK_WITH_SLEEP is None else time.clock_gettime(_CLOCK_WITH_SLEEP)

    def wall_s(self) -> float:
        """Seconds since 1970."""
        return time.time()


class RandomIds:
    """``edgepipe.ids.IdSource`` from the system's random numbers."""

    def new(self, prefix: str) -> str:
        """Such as ``pipeline-3f9a0c21``: 64 random bits never meet their like in one cluster."""
        return f"{prefix}-{secrets.token_hex(8)}"
