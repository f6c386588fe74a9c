"""Tickets of ``edgepipe open`` (PURE): each opens the page once, with the right to manage."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

TICKET_S = 60.0  # time between the command and the browser
_MOST_TICKETS = 16  # unused ones; the oldest is dropped


class PageTickets:
    """Tickets that were issued and not used. Only their digests are kept."""

    def __init__(self, *, now_s: Callable[[], float], new_token: Callable[[], str]) -> None:
        """``now_s``: monotonic. ``new_token``: returns an unguessable text."""
        self._now_s = now_s
        self._new_token = new_token
        self._ends_s: dict[bytes, float] = {}

    def issue(self) -> str:
        """Return a new ticket."""
        token = self._new_token()
        while len(self._ends_s) >= _MOST_TICKETS:
            del self._ends_s[next(iter(self._ends_s))]
        self._ends_s[_digest(token)] = self._now_s() + TICKET_S
        return token

    def redeem(self, token: str) -> bool:
        """Use a ticket up. Return whether it was valid."""
        ends_s = self._ends_s.pop(_digest(token), None)
        return ends_s is not None and self._now_s() < ends_s


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
