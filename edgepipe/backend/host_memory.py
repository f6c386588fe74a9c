"""PURE: the memory of a machine that all its programs use."""

from __future__ import annotations

_MOST_BYTES = 1 << 30  # memory for the rest of a person's desktop
_SHARE = 0.1


def headroom_bytes(total_bytes: int) -> int:
    """Return the bytes of a machine's memory that always stay free."""
    return min(_MOST_BYTES, int(total_bytes * _SHARE))
