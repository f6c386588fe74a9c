"""Waiting for what has no event: a file, a log line, another process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.01


async def until(reached: Callable[[], object], *, timeout_s: float = 10.0) -> None:
    """Return once ``reached`` gives something true. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not reached():  # noqa: ASYNC110 - the one place that polls
            await asyncio.sleep(LOOK_S)
