"""Keeps a Mac from falling asleep while it hosts a stage or an engine; other systems do not sleep under load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
from collections.abc import AsyncIterator, Callable, Sequence

logger = logging.getLogger(__name__)


def awake_command() -> tuple[str, ...]:
    """Return the program that keeps this machine awake while it runs; empty where no program is needed.

    ``-i`` prevents idle sleep, ``-s`` sleep on mains power; ``-w`` ends the program if this process is killed.
    """
    return ("/usr/bin/caffeinate", "-i", "-s", "-w", str(os.getpid())) if platform.system() == "Darwin" else ()


async def keep_awake(
    hosting: Callable[[], bool], changes: Callable[[], AsyncIterator[None]], command: Sequence[str]
) -> None:
    """Run ``command`` while the node hosts something, until cancelled. A command that cannot be run is logged once."""
    if not command:
        return
    process: asyncio.subprocess.Process | None = None
    try:
        async for _ in changes():
            if hosting() and process is None:
                process = await asyncio.create_subprocess_exec(*command)
            elif not hosting() and process is not None:
                await _end(process)
                process = None
    except OSError as exc:
        logger.warning("this machine may fall asleep while it computes: %s", exc)
    finally:
        if process is not None:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await process.wait()
