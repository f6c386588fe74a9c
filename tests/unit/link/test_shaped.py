"""An emulated network: exact on paper, and the same contract as any link in use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.link.alarm import ThreadAlarm
from edgepipe.link.shaped import Network, ShapedLine, Wire, arriving, delayed_replies
from edgepipe.system import SystemClock
from edgepipe.testing.clock import FakeClock
from edgepipe.units import LinkShape, parse_link
from edgepipe.wire.v1 import stage_pb2
from tests.support.network.ring_ends import Hop, grpc_sender, grpc_service, running

GIGABIT = parse_link("1gbit,1ms")


class FakeAlarm:
    """Time passes by waiting for it."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    async def until(self, moment_s: float) -> None:
        self._clock.advance(max(0.0, moment_s - self._clock.monotonic_s()))


class Far:
    """The other end: what came, and when."""

    def __init__(self, clock: FakeClock) -> None:
        self.came: list[tuple[str, float]] = []
        self._clock = clock

    async def write(self, message: str) -> None:
        self.came.append((message, self._clock.monotonic_s()))


def test_the_rate_is_a_server_and_the_delay_is_none() -> None:
    wire = Wire(GIGABIT)
    first, second = wire.carry(10.0, 125_000), wire.carry(10.0, 125_000)
    assert first == pytest.approx((10.0, 10.001, 10.002))
    assert second == pytest.approx((10.001, 10.002, 10.003))  # it left while the first was under way
    assert wire.carry(11.0, 0) == pytest.approx((11.0, 11.0, 11.001))


@given(
    st.lists(st.tuples(st.floats(0, 0.01), st.integers(0, 1_000_000)), min_size=1, max_size=50),
    st.floats(1e5, 1e9),
    st.floats(0, 0.02),
    st.floats(0, 0.02),
)
def test_nothing_is_faster_than_the_rate_or_overtakes(
    messages: list[tuple[float, int]], rate: float, delay_s: float, jitter_s: float
) -> None:
    wire = Wire(LinkShape(bytes_per_s=rate, one_way_s=delay_s, jitter_s=jitter_s))
    now_s = last_arrival_s = 0.0
    total = 0
    for gap_s, num_bytes in messages:
        now_s += gap_s
        total += num_bytes
        passage = wire.carry(now_s, num_bytes)
        assert passage.departs_s >= total / rate * (1 - 1e-9)
        assert passage.begins_s >= now_s
        assert passage.arrives_s >= max(last_arrival_s, passage.departs_s + delay_s)
        last_arrival_s = passage.arrives_s


async def test_chunks_of_a_step_pipeline_through_a_line() -> None:
    clock = FakeClock(monotonic_s=0.0)
    far = Far(clock)
    line = ShapedLine(far.write, wire=Wire(GIGABIT), alarm=FakeAlarm(clock), clock=clock)
    departures = [await line.write(name, 125_000) for name in "abc"]
    line.finish()
    await line.run()
    assert departures == pytest.approx([0.001, 0.002, 0.003])
    assert [name for name, _ in far.came] == ["a", "b", "c"]
    assert [moment for _, moment in far.came] == pytest.approx([0.002, 0.003, 0.004])


async def test_activations_go_to_the_transport_at_once_and_are_held_until_they_are_there() -> None:
    clock = FakeClock(monotonic_s=0.0)
    far = Far(clock)
    line = ShapedLine(far.write, wire=Wire(GIGABIT), alarm=FakeAlarm(clock), clock=clock, receiver_holds=True)
    frames = [stage_pb2.RingMessage(frame=stage_pb2.Frame(step=step)) for step in (1, 2)]
    departures = [await line.write(frame, 125_000) for frame in frames]
    line.finish()
    await line.run()
    assert departures == pytest.approx([0.001, 0.002])
    assert [moment for _, moment in far.came] == pytest.approx([0.0, 0.001])  # as their first bytes leave
    assert [frame.frame.passage_us for frame in frames] == [2000, 2000]


async def test_a_frame_is_held_no_longer_than_its_passage_whatever_the_sender_s_clock_says() -> None:
    clock = SystemClock()
    network = Network(GIGABIT, clock)
    try:
        for ahead_s, least_s in ((3600.0, 0.01), (0.0, 0.005), (-3600.0, 0.0)):
            sent_us = int((clock.wall_s() + ahead_s) * 1e6) - 5_000
            begun_s = clock.monotonic_s()
            await network.held(stage_pb2.Frame(sent_us=sent_us, passage_us=10_000))
            assert clock.monotonic_s() - begun_s >= least_s - 0.001
            assert clock.monotonic_s() - begun_s < 10
    finally:
        network.close()


async def test_what_breaks_a_stream_reaches_its_reader_over_an_emulated_network() -> None:
    async def broken() -> AsyncIterator[stage_pb2.RingMessage]:
        yield stage_pb2.RingMessage()
        raise ConnectionResetError("gone")

    network = Network(GIGABIT, SystemClock())
    try:
        async with arriving(network, broken()) as messages:
            await anext(messages)
            with pytest.raises(ConnectionResetError):
                await anext(messages)
    finally:
        network.close()


async def test_small_messages_take_the_delay_and_no_turn_of_the_rate() -> None:
    network = Network(parse_link("8bit,1ms"), SystemClock())
    came: list[object] = []

    class Replies:
        async def write(self, message: object, /) -> None:
            came.append(message)

    try:
        begun_s = SystemClock().monotonic_s()
        async with delayed_replies(network, Replies()) as replies:
            for number in range(100):
                await replies.write(number)
            assert came == []
        assert came == list(range(100))
        assert SystemClock().monotonic_s() - begun_s >= 0.001
    finally:
        network.close()


async def test_an_alarm_never_rings_early_and_rings_in_order() -> None:
    clock = SystemClock()
    alarm = ThreadAlarm(clock)
    rung: list[int] = []

    async def wait(number: int, moment_s: float) -> None:
        await alarm.until(moment_s)
        assert clock.monotonic_s() >= moment_s
        rung.append(number)

    begun_s = clock.monotonic_s()
    async with asyncio.TaskGroup() as tasks:
        for number in (3, 1, 4, 2, 0):
            tasks.create_task(wait(number, begun_s + number * 0.002))
    assert rung == [0, 1, 2, 3, 4]
    alarm.close()


async def test_a_cancelled_wait_does_not_disturb_the_others() -> None:
    clock = SystemClock()
    alarm = ThreadAlarm(clock)
    gone = asyncio.ensure_future(alarm.until(clock.monotonic_s() + 10.0))
    await asyncio.sleep(0)
    gone.cancel()
    await alarm.until(clock.monotonic_s() + 0.005)
    assert gone.cancelled()
    alarm.close()


async def test_a_shaped_link_is_measured_like_a_real_one() -> None:
    """A step of 80 bytes at 80 kB/s occupies the wire for 1 ms, in five chunks, and is 2 ms under way."""
    clock = SystemClock()
    alarm = ThreadAlarm(clock, smoothing=0.0)  # it never aims early, so nothing arrives early
    network = Network(LinkShape(bytes_per_s=80_000, one_way_s=0.002), clock, alarm=alarm)
    hop = Hop(window=4, network=network)
    try:
        async with grpc_service(hop) as address, running(hop, grpc_sender(hop, address, network=network)):
            for step in (1, 2, 3):
                hop.expect(step, tokens=5)
                hop.send(step, tokens=5)
            assert [await hop.take() for _ in range(3)] == [1, 2, 3]
            await hop.until(lambda: len(hop.samples) >= 1)
            assert hop.sender.stats.upload_us == pytest.approx(1000, abs=2)
            sample = hop.samples[0]
            rounding_us = 5
            first_us = 2200 - rounding_us  # its first chunk of 16 bytes and the delay
            assert sample.first_received_us - sample.first_sent_us >= first_us
            assert sample.last_received_us - sample.first_sent_us >= 3000 - rounding_us
    finally:
        network.close()
