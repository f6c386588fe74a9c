"""What every link keeps: the gRPC one and the one in memory."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.network.ring_ends import open_hop

OVER = pytest.mark.parametrize("over", ["grpc", "shaped", "memory"])


@OVER
async def test_steps_arrive_whole_and_in_order(over: str) -> None:
    async with open_hop(over) as hop:
        for step in range(1, 21):
            hop.expect(step, tokens=step)
            hop.send(step, tokens=step)
        assert [await hop.take() for _ in range(20)] == list(range(1, 21))
        assert hop.receiver.repeats == 0


@OVER
async def test_bytes_may_come_before_their_plan(over: str) -> None:
    async with open_hop(over) as hop:
        hop.send(1)
        hop.send(2)
        await hop.until(lambda: hop.held >= 8)  # four chunks of 16 bytes each
        assert hop.arrived.empty()
        assert hop.receiver.waiting_for_plan(bulk=False) == 1
        hop.expect(1)
        hop.expect(2)
        assert [await hop.take(), await hop.take()] == [1, 2]


@OVER
async def test_credits_bound_what_the_receiver_holds(over: str) -> None:
    async with open_hop(over, window=2) as hop:
        for step in range(1, 7):
            hop.expect(step)
            hop.send(step)
        await hop.until(lambda: hop.arrived.qsize() == 2)
        await settle()
        assert hop.arrived.qsize() == 2, "the third waits for a credit"
        assert [await hop.take() for _ in range(6)] == [1, 2, 3, 4, 5, 6]


@OVER
async def test_sending_returns_while_the_receiver_takes_nothing(over: str) -> None:
    async with open_hop(over, window=1) as hop:
        for step in range(1, 33):
            hop.send(step)  # the call is not async: it cannot wait
        assert hop.sender.stats.steps < 32


@OVER
async def test_the_array_may_be_large(over: str) -> None:
    async with open_hop(over) as hop:
        hop.expect(1, tokens=3000)
        hop.send(1, tokens=3000)
        assert await hop.take() == 1


@OVER
async def test_each_measured_step_tells_its_way(over: str) -> None:
    async with open_hop(over) as hop:
        for step in (1, 2):
            hop.expect(step)
            hop.send(step)
            await hop.take()
            await hop.until(lambda step=step: len(hop.samples) == step)
        sample = hop.samples[0]
        assert (sample.step, sample.num_bytes) == (1, 64)
        assert sample.first_sent_us <= sample.first_received_us <= sample.last_received_us


@OVER
async def test_a_closed_receiver_ends_the_stream_and_later_steps_stay_with_the_sender(over: str) -> None:
    async with open_hop(over) as hop:
        hop.receiver.close()
        hop.send(1)
        await settle()
        assert hop.arrived.empty()


async def settle() -> None:
    """Give whatever could still arrive every chance to."""
    await asyncio.sleep(0.05)
