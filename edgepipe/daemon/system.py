"""The system's clock and source of identities; everybody else is handed a protocol."""

from __future__ import annotations

import secrets
import time


class SystemClock:
    """``edgepipe.clock.Clock`` of this machine."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Seconds since 1970."""
        return time.time()


class RandomIds:
    """``edgepipe.ids.IdSource`` from the system's random numbers."""

    def new(self, prefix: str) -> str:
        """Such as ``pipeline-3f9a0c21``: 64 random bits never meet their like in one cluster."""
        return f"{prefix}-{secrets.token_hex(8)}"
