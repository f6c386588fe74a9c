"""Sessions of the page with the right to manage (PURE). ``edgepipe open`` begins one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

SESSION_S = 12 * 3600.0
_MOST_SESSIONS = 32  # the oldest ends


class Sessions:
    """Open sessions of this gateway. Only digests of their tokens are kept."""

    def __init__(self, *, now_s: Callable[[], float], new_token: Callable[[], str]) -> None:
        """``now_s``: monotonic. ``new_token``: returns an unguessable text."""
        self._now_s = now_s
        self._new_token = new_token
        self._ends_s: dict[bytes, float] = {}

    def open(self) -> str:
        """Begin a session. Return its token."""
        token = self._new_token()
        while len(self._ends_s) >= _MOST_SESSIONS:
            del self._ends_s[next(iter(self._ends_s))]
        self._ends_s[_digest(token.encode())] = self._now_s() + SESSION_S
        return token

    def holds(self, token: bytes) -> bool:
        """Return whether a token's session is open."""
        if not token:
            return False
        digest = _digest(token)
        ends_s = self._ends_s.get(digest)
        if ends_s is not None and self._now_s() >= ends_s:
            del self._ends_s[digest]
            return False
        return ends_s is not None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
