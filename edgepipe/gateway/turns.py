"""Turns of large work on the event loop."""

from __future__ import annotations

import asyncio


class Turns:
    """Lets one task at a time do its next piece of work, in order of arrival.

    The loop runs everything else between two pieces. So many large answers at once delay a small one by one piece.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def take(self) -> None:
        """Wait for this task's next turn; at least once round the loop."""
        async with self._turn:
            await asyncio.sleep(0)
