"""The clock protocol. ``edgepipe.system`` has the system clock, ``edgepipe.testing`` a fake."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Two kinds of time. For ``monotonic_s`` only differences are meaningful."""

    def monotonic_s(self) -> float:
        """Return seconds since an arbitrary start; never decreases."""
        ...

    def wall_s(self) -> float:
        """Return seconds since 1970 by the machine's clock; may jump."""
        ...
