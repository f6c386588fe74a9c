"""Limits background transfers to their share of a link."""

from __future__ import annotations

import asyncio

_SMALLEST_BYTES = 16 << 10
_CHUNK_S = 0.05  # duration of one chunk at the transfer's rate: short bursts delay activations little


def chunk_bytes(bytes_per_s: float) -> int:
    """Return how many bytes to send at once."""
    return max(_SMALLEST_BYTES, int(bytes_per_s * _CHUNK_S))


class Pace:
    """One queue for all background senders of this node: each chunk takes its time in the queue."""

    def __init__(self) -> None:
        self._free_at_s = 0.0

    async def take(self, num_bytes: int, *, bytes_per_s: float) -> None:
        """Wait until the chunks before have had their time."""
        now_s = asyncio.get_running_loop().time()
        start_s = max(self._free_at_s, now_s)
        self._free_at_s = start_s + num_bytes / bytes_per_s
        await asyncio.sleep(start_s - now_s)
