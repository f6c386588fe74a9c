"""A ``PublishedState`` whose changes a test makes and hears."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass


async def once() -> AsyncIterator[None]:
    """One look at the start; nothing ever changes."""
    yield
    await asyncio.Event().wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeState:
    """``on_change`` gets every refresh; ``changes`` are those that others see."""

    on_change: Callable[[bool], None] = lambda _: None
    changes: Callable[[], AsyncIterator[None]] = once

    def refresh(self, *, urgent: bool = True) -> None:
        self.on_change(urgent)

    def watch(self) -> AsyncIterator[None]:
        return self.changes()
