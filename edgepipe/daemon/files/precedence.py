"""Transfers that a stage waits for go before copies; work on the disk ends before its file closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar


class Closable(Protocol):
    """An open file or the like."""

    def close(self) -> None:
        """Close it."""
        ...


P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=Closable)


class Precedence:
    """Counts the transfers that stages wait for, and interrupts copies meanwhile."""

    def __init__(self) -> None:
        self._waiting = 0
        self._calm = asyncio.Event()
        self._calm.set()
        self._disturbed = asyncio.Event()

    @contextmanager
    def first(self) -> Generator[None]:
        """Let no copy continue while the block runs."""
        self._waiting += 1
        self._calm.clear()
        self._disturbed.set()
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._calm.set()
                self._disturbed.clear()

    async def calm(self) -> None:
        """Wait until no stage waits."""
        await self._calm.wait()

    async def while_calm(self, items: AsyncGenerator[R]) -> AsyncGenerator[R]:
        """Yield a copy's items. As soon as a stage waits, cancel the copy wherever it is, and end."""
        disturbed = asyncio.ensure_future(self._disturbed.wait())
        item: asyncio.Task[R | None] | None = None
        try:
            while not disturbed.done():
                item = asyncio.ensure_future(anext(items, None))
                await asyncio.wait((item, disturbed), return_when=asyncio.FIRST_COMPLETED)
                if not item.done() or (found := item.result()) is None:
                    return
                yield found
        finally:
            disturbed.cancel()
            if item is not None and not item.done():
                item.cancel()
                await asyncio.wait([item])


async def in_thread(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run blocking work in a thread. A cancellation is raised only after the work has ended.

    ``asyncio.to_thread`` leaves its thread behind: it could still write to a file that was closed, or that another
    transfer has opened and measured meanwhile.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    await _until_done(running)
    return running.result()


@asynccontextmanager
async def opened_in_thread(work: Callable[P, C], *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[C]:
    """Open something like ``in_thread``; close it at the end of the block, and after a cancellation."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        await _until_done(running)
        yield running.result()
    finally:
        if running.exception() is None:
            running.result().close()


async def _until_done(running: asyncio.Future[Any]) -> None:
    """Wait for a thread's work, then raise the cancellation that came meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        running.exception()  # seen: the cancellation goes before it
        raise cancelled
