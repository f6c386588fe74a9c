"""Tell everybody who waits that something changed; who is slow hears of many changes once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class Changes:
    """A broadcast without contents: listeners look for themselves what is new."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Event] = set()

    def notify(self) -> None:
        """Something changed."""
        for listener in self._listeners:
            listener.set()

    async def watch(self) -> AsyncIterator[None]:
        """Yields once at the start and then after every change."""
        changed = asyncio.Event()
        self._listeners.add(changed)
        try:
            while True:
                yield
                await changed.wait()
                changed.clear()
        finally:
            self._listeners.discard(changed)
