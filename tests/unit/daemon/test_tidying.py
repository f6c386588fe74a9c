"""Cycles that nobody holds go, though too few objects are made for Python to look by itself."""

from __future__ import annotations

import asyncio
import gc
import weakref

from edgepipe.daemon.machine.tidying import keep_tidy


class Ring:
    def __init__(self) -> None:
        self.itself = self


async def test_what_nobody_holds_goes_without_being_asked_for() -> None:
    gc.disable()
    tidying = asyncio.ensure_future(keep_tidy(every_s=0.01))
    try:
        gone = asyncio.Event()
        weakref.finalize(Ring(), gone.set)
        async with asyncio.timeout(10):
            await gone.wait()
        assert not tidying.done()
    finally:
        gc.enable()
        tidying.cancel()
