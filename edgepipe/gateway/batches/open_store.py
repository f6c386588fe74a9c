"""The store of files and batches for tasks of an event loop: one thread does its work."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from edgepipe.errors import CapacityError, EdgepipeError
from edgepipe.gateway.batches.store import FilesSettings, Store
from edgepipe.plain_words import plain

logger = logging.getLogger(__name__)
T = TypeVar("T")
_AGAIN_S = 1.0  # pause between two attempts to open the folder
_READY_S = 10.0  # a request's longest wait for the folder


class OpenStore:
    """Opens the store and does its work in order. ``run`` owns it; ``do`` waits until it is open."""

    def __init__(self, settings: FilesSettings) -> None:
        self.settings = settings
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._store: Store | None = None
        self._opened = asyncio.Event()
        self._error: EdgepipeError | None = None  # why the last attempt failed

    async def open(self) -> Store:
        """Open the folder; try again until that succeeds. An earlier gateway of this node may still hold it."""
        while True:
            try:
                self._store = await self._in_thread(lambda: Store(self.settings))
            except EdgepipeError as exc:
                if exc != self._error:
                    logger.warning("files of batches cannot be opened: %s", exc)
                self._error = exc
                await asyncio.sleep(_AGAIN_S)
            else:
                self._opened.set()
                return self._store

    async def do(self, work: Callable[[Store], T]) -> T:
        """Return what ``work`` returns; it runs in the store's thread. Raises EdgepipeError, and its own errors."""
        try:
            async with asyncio.timeout(_READY_S):
                await self._opened.wait()
        except TimeoutError:
            raise self._error or CapacityError("files of batches are not open yet") from None
        store = self._store
        assert store is not None, "set before the event"
        return await self._in_thread(lambda: work(store))

    def close(self) -> None:
        """Close the folder, after work that is under way."""
        store, self._store = self._store, None
        if store is not None:
            self._thread.submit(store.close)
        self._thread.shutdown(wait=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (OSError, sqlite3.Error) as exc:
            reason = plain(exc) if isinstance(exc, OSError) else "its database cannot be used"
            raise CapacityError(
                "files of batches cannot be read or written",
                fact=f"{self.settings.folder}: {reason}",
                next_step="see 'edgepipe logs'",
            ) from exc
