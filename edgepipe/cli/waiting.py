"""A line on stderr for a wait that takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import Timer

SLOW_S = 5.0
HUB_IS_SLOW = f"the hub has not answered for {SLOW_S:.0f} s; still waiting (^C stops)"


@contextmanager
def line_if_slow(text: str) -> Generator[Callable[[], None]]:
    """Print ``text`` if the context lasts longer than ``SLOW_S``. Calling the given function ends the wait earlier."""
    timer = Timer(SLOW_S, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()
