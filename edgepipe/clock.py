"""Time as a value that is handed in. The system clock lives in ``edgepipe.daemon``, a fake in ``edgepipe.testing``."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Two kinds of time; only differences of ``monotonic_s`` mean anything."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def wall_s(self) -> float:
        """Seconds since 1970 as the machine believes; may jump."""
        ...
