"""Grants wait for one another while the sender has room, and never when it has little."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from edgepipe.ids import StepId
from edgepipe.link.receiver import RingReceiver
from edgepipe.link.serving import RingStream
from edgepipe.system import SystemClock
from edgepipe.wire.common import epoch_to_wire
from edgepipe.wire.v1 import stage_pb2
from tests.support.network.ring_ends import EPOCH

_BYTES = 8


class _Hop:
    """The receiving end: what it writes back, and frames that come when they are given."""

    def __init__(self, *, window: int) -> None:
        self.receiver = RingReceiver(
            epoch=EPOCH, window=window, clock=SystemClock(), on_step=lambda *_: None, on_held=lambda: None
        )
        self.frames: asyncio.Queue[stage_pb2.RingMessage | None] = asyncio.Queue()
        self.credits: asyncio.Queue[stage_pb2.Credit] = asyncio.Queue()

    async def write(self, message: Any, /) -> None:
        self.credits.put_nowait(message)

    async def messages(self) -> AsyncGenerator[stage_pb2.RingMessage]:
        while (message := await self.frames.get()) is not None:
            yield message

    def come_and_go(self, *steps: int) -> None:
        """Steps arrive and are taken at once."""
        for step in steps:
            self.receiver.expect(StepId(step), _BYTES, bulk=False)
            self.receiver.frame(StepId(step), 0, bytes(_BYTES), sent_us=0, bulk=False)
            self.receiver.taken(bulk=False)


@asynccontextmanager
async def _hop(*, window: int) -> AsyncGenerator[_Hop]:
    hop = _Hop(window=window)
    serving = asyncio.ensure_future(RingStream(hop.receiver, hop).serve(hop.messages()))
    opened = await hop.credits.get()
    assert (opened.step, opened.credits) == (0, window)
    yield hop
    hop.frames.put_nowait(None)
    await serving


async def test_few_steps_are_told_of_together() -> None:
    async with _hop(window=8) as hop:
        hop.come_and_go(1, 2, 3)
        credit = await hop.credits.get()
        assert (credit.step, credit.credits) == (3, 8)
        assert credit.epoch == epoch_to_wire(EPOCH)
        assert credit.sample.step == 3
        hop.come_and_go(4)  # the next one is told, too, without more
        assert (await hop.credits.get()).step == 4
        assert hop.credits.empty()


async def test_half_a_window_is_told_at_once() -> None:
    async with _hop(window=4) as hop:
        hop.come_and_go(1, 2)
        for _ in range(3):  # turns of the loop: no timer was needed
            await asyncio.sleep(0)
        assert hop.credits.get_nowait().step == 2
