"""What the page's event streams send: the view when it changes, and a sample of speeds each second."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from edgepipe.clock import Clock
from edgepipe.gateway.ui.history import History
from edgepipe.gateway.ui.view import page_view
from edgepipe.wire.nodes import ClusterView

_SAMPLE_S = 1.0
_VIEW_S = 0.5  # shortest time between two views of a stream


class PageFeed:
    """Keeps the newest view and the history, for any number of streams. ``run`` samples."""

    def __init__(self, *, node_name: str, edgepipe_version: str, clock: Clock) -> None:
        self._node_name = node_name
        self._version = edgepipe_version
        self._clock = clock
        self._view = ClusterView()
        self._view_event: bytes = b""  # of ``_view``; empty until a stream wants it
        self._history = History()
        self._sample_event: bytes = b""  # the newest that a stream wanted
        self._listeners: set[asyncio.Event] = set()

    def update(self, view: ClusterView) -> None:
        """Take the daemon's newest view."""
        self._view, self._view_event = view, b""
        self._notify()

    async def run(self) -> None:
        """Sample once a second. Ends by cancellation only."""
        while True:
            await asyncio.sleep(_SAMPLE_S)
            self.sample()

    def sample(self) -> None:
        """Take a sample of every served model."""
        self._history.sample(entry.engine for entry in self._view.served)
        if self._listeners:
            sample = {"at_s": round(self._clock.wall_s(), 1), "models": self._history.newest()}
            self._sample_event = event("sample", sample)
            self._notify()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the view and the history, then each change. A slow reader gets the newest view only."""
        news = asyncio.Event()
        self._listeners.add(news)
        now_s = asyncio.get_running_loop().time
        try:
            yield self._history_event()
            view, sample = b"", self._sample_event
            view_at_s = -_VIEW_S
            while True:
                left_s = view_at_s + _VIEW_S - now_s()
                if left_s <= 0 and self._newest_view() != view:
                    view, view_at_s, left_s = self._newest_view(), now_s(), _VIEW_S
                    yield view
                if self._sample_event != sample:
                    sample = self._sample_event
                    yield sample
                await _wait(news, left_s if self._newest_view() != view else None)
        finally:
            self._listeners.discard(news)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener.set()

    def _newest_view(self) -> bytes:
        if not self._view_event:
            view = page_view(self._view, node_name=self._node_name, edgepipe_version=self._version)
            self._view_event = event("view", view)
        return self._view_event

    def _history_event(self) -> bytes:
        return event("history", {"at_s": round(self._clock.wall_s(), 1), "models": self._history.all()})


def event(name: str, value: Any) -> bytes:
    """Write a server-sent event with JSON data."""
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


async def _wait(news: asyncio.Event, seconds: float | None) -> None:
    """Wait for news, at most so long."""
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
            news.clear()
    except TimeoutError:
        pass
