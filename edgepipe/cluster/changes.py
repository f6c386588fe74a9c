"""Wakes all listeners after a change; a slow listener wakes once for many changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class Changes:
    """A broadcast without contents: listeners read the new state themselves."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Event] = set()

    def notify(self) -> None:
        """Wake all listeners."""
        for listener in self._listeners:
            listener.set()

    async def watch(self) -> AsyncIterator[None]:
        """Yield once at the start and then after every change."""
        changed = asyncio.Event()
        self._listeners.add(changed)
        try:
            while True:
                yield
                await changed.wait()
                changed.clear()
        finally:
            self._listeners.discard(changed)
