"""Holds bulk that nobody waits for to its share of a link."""

from __future__ import annotations

import asyncio

_SMALLEST_BYTES = 16 << 10
_CHUNK_S = 0.05  # what a chunk takes of its share: short bursts delay activations little


def chunk_bytes(bytes_per_s: float) -> int:
    """How much to send at once."""
    return max(_SMALLEST_BYTES, int(bytes_per_s * _CHUNK_S))


class Pace:
    """One line that all senders of this node share: each piece takes its time of it, whoever sends it."""

    def __init__(self) -> None:
        self._free_at_s = 0.0

    async def take(self, num_bytes: int, *, bytes_per_s: float) -> None:
        """Returns when the pieces before have had their time."""
        now_s = asyncio.get_running_loop().time()
        start_s = max(self._free_at_s, now_s)
        self._free_at_s = start_s + num_bytes / bytes_per_s
        await asyncio.sleep(start_s - now_s)
