"""Events of the page's streams by name, built when a stream wants them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

SLOW_S = 0.5
"""Shortest time between two events of a name in one stream, where they are large."""


class Topic:
    """Events of one name. An event is built when the first stream wants it."""

    def __init__(self, name: str, build: Callable[[], Any], *, every_s: float = 0.0, newest: bool = True) -> None:
        """
        build    returns the event's data
        every_s  shortest time between two events in one stream
        newest   a new stream begins with the present event
        """
        self.name = name
        self.every_s = every_s
        self.newest = newest
        self.version = 0
        self._build = build
        self._built: tuple[int, bytes] = (-1, b"")

    def refresh(self) -> int:
        """Return the version of the present event. A new version is a new event."""
        return self.version

    def event(self) -> bytes:
        """Return the present event."""
        if self._built[0] != self.version:
            self._built = (self.version, event(self.name, self._build()))
        return self._built[1]


def event(name: str, value: Any) -> bytes:
    """Write a server-sent event with JSON data."""
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
