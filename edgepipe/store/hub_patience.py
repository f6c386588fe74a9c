"""When a request that failed is sent to the hub again: pauses that double, and ten minutes of patience.

``Patience`` is PURE. ``persist`` acts on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from edgepipe.errors import EdgepipeError
from edgepipe.store.hub import may_pass

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 30.0
LONGEST_ASKED_S = 300.0  # the hub's limits of requests last five minutes
PATIENCE_S = 600.0  # longest time without a byte: a router starts anew, a cable is out

_T = TypeVar("_T")
OnWait = Callable[[EdgepipeError, float], None]  # the failure, and the pause in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PullClock:
    """The clock of a pull."""

    now_s: Callable[[], float] = monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Patience:
    """Decides how long to wait before the next attempt, and when to give up."""

    def __init__(self, *, now_s: float) -> None:
        self._heard_s = now_s
        self._pause_s = FIRST_PAUSE_S

    def heard(self, *, now_s: float) -> None:
        """Note that bytes have arrived."""
        self._heard_s, self._pause_s = now_s, FIRST_PAUSE_S

    def pause_s(self, *, now_s: float, asked_s: float = 0.0) -> float | None:
        """Return the pause before the next attempt, or None to give up. ``asked_s``: the pause of the hub's answer."""
        if now_s - self._heard_s >= PATIENCE_S:
            return None
        pause_s = max(self._pause_s, min(asked_s, LONGEST_ASKED_S))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return pause_s


async def persist(
    attempt: Callable[[], Awaitable[_T]],
    *,
    pauses: PullClock,
    on_wait: OnWait,
    num_arrived: Callable[[], int] = lambda: 0,
) -> _T:
    """Repeat an attempt while its failures may pass. Raises the last failure.

    ``num_arrived`` counts the bytes that all attempts have brought; bytes renew the patience.
    """
    patience = Patience(now_s=pauses.now_s())
    while True:
        before = num_arrived()
        try:
            return await attempt()
        except EdgepipeError as error:
            if num_arrived() > before:
                patience.heard(now_s=pauses.now_s())
            pause_s = patience.pause_s(now_s=pauses.now_s(), asked_s=error.retry_after_s) if may_pass(error) else None
            if pause_s is None:
                raise
            on_wait(error, pause_s)
        await pauses.sleep(pause_s)
