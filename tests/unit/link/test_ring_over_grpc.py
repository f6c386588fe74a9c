"""The gRPC link when things go wrong: cuts, stalls, strays, a peer that does not keep the rules."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from edgepipe.errors import ConnectTimeout, EdgepipeError, LocalProtocolError, RemoteProtocolError, SendTimeout
from edgepipe.ids import EngineId, Epoch
from edgepipe.link.channels import make_channel
from edgepipe.link.sender import RingSender, redial_pause_s
from edgepipe.security.mutual_tls import Credentials, Plaintext
from edgepipe.system import SystemClock
from edgepipe.wire.common import Hello, epoch_to_wire
from edgepipe.wire.v1 import stage_pb2
from edgepipe.wire.v1.stage_pb2_grpc import StageStub
from tests.support.network.ports import free_port
from tests.support.network.ring_ends import (
    EPOCH,
    Hop,
    activations,
    grpc_sender,
    grpc_service,
    open_hop,
    running,
    send_and_fail,
    target,
)
from tests.support.network.tcp_proxy import tcp_proxy

STEPS = 40


@pytest.mark.parametrize("cut_after", [0, 700, 5_000, 20_000])
async def test_a_broken_stream_is_dialled_again_and_nothing_is_lost(cut_after: int) -> None:
    hop = Hop(window=3)
    async with grpc_service(hop) as address, tcp_proxy(address) as proxy:
        async with running(hop, grpc_sender(hop, proxy.address, most_piece_bytes=100)):
            proxy.cut_after(cut_after)
            for step in range(1, STEPS + 1):
                hop.expect(step, tokens=60)
                hop.send(step, tokens=60)
            assert [await hop.take() for _ in range(STEPS)] == list(range(1, STEPS + 1))
            assert hop.sender.stats.redials >= 1  # the first attempt may still meet the dying connection
            assert proxy.connections >= 2


async def test_many_cuts_lose_nothing_and_double_nothing() -> None:
    hop = Hop(window=4)
    async with grpc_service(hop) as address, tcp_proxy(address) as proxy:
        async with running(hop, grpc_sender(hop, proxy.address)):
            taken: list[int] = []
            for step in range(1, STEPS + 1):
                hop.expect(step)
                hop.send(step)
                if step % 10 == 0:
                    proxy.cut()
                if step % 2 == 0:
                    taken += [await hop.take(), await hop.take()]
            assert taken == list(range(1, STEPS + 1))
            assert hop.arrived.empty()


async def test_a_stalled_network_never_blocks_the_sender() -> None:
    hop = Hop(window=4)
    async with grpc_service(hop) as address, tcp_proxy(address) as proxy:
        async with running(hop, grpc_sender(hop, proxy.address, most_piece_bytes=8000)):
            proxy.flowing.clear()
            for step in range(1, 31):
                hop.expect(step, tokens=2000)
                hop.send(step, tokens=2000)
            proxy.flowing.set()
            assert [await hop.take() for _ in range(30)] == list(range(1, 31))


async def test_a_receiver_that_takes_nothing_is_a_send_timeout() -> None:
    hop = Hop(window=1)
    async with grpc_service(hop) as address:
        with pytest.raises(ExceptionGroup) as caught:
            await send_and_fail(hop, grpc_sender(hop, address, deadline_s=0.3))
        assert caught.group_contains(SendTimeout, match="did not take a step's activations in time")


async def test_a_receiver_that_takes_nothing_holds_up_nobody_else_and_little_memory() -> None:
    stuck, other = Hop(window=2), Hop(window=2)
    step_bytes = activations(1, 2000).nbytes
    async with grpc_service(stuck) as address, tcp_proxy(address) as proxy, grpc_service(other) as elsewhere:
        async with running(stuck, grpc_sender(stuck, proxy.address, most_piece_bytes=8000)):
            async with running(other, grpc_sender(other, elsewhere)):
                for step in range(1, STEPS + 1):
                    stuck.expect(step, tokens=2000)
                    stuck.send(step, tokens=2000)
                    other.expect(step)
                    other.send(step)
                assert [await other.take() for _ in range(STEPS)] == list(range(1, STEPS + 1))
                await stuck.until(lambda: stuck.arrived.qsize() == 2)
                assert proxy.passed_bytes < 3 * step_bytes, "credits keep the rest with the sender"


async def test_nobody_at_the_address_is_a_connect_timeout() -> None:
    nobody = f"127.0.0.1:{free_port('127.0.0.1')}"
    impatient = RingSender(
        replace(target(nobody), reach_s=0.3),
        hello=Hello(role="stage"),
        security=Plaintext(),
        clock=SystemClock(),
        on_sample=lambda _: None,
    )
    with pytest.raises(ConnectTimeout, match=nobody):
        await impatient.run()


async def test_a_machine_that_swallows_what_comes_is_noticed_though_it_had_longer_to_open() -> None:
    hop = Hop(window=1)
    async with grpc_service(hop) as address, tcp_proxy(address) as proxy:
        proxy.flowing.clear()
        sender = RingSender(
            replace(target(proxy.address), reach_s=0.3),
            hello=Hello(role="stage"),
            security=Plaintext(),
            clock=SystemClock(),
            on_sample=hop.sample,
        )
        with pytest.raises(ConnectTimeout, match="cannot be reached"):
            await sender.run()


async def test_a_machine_that_is_reached_may_take_longer_to_open() -> None:
    hop, opens = Hop(window=1), asyncio.Event()
    serve = hop.serve

    async def late(messages: Any, context: Any) -> None:
        await opens.wait()
        await serve(messages, context)

    hop.serve = late  # pyright: ignore[reportAttributeAccessIssue]
    async with grpc_service(hop) as address:
        sender = RingSender(
            replace(target(address), reach_s=0.3),
            hello=Hello(role="stage"),
            security=Plaintext(),
            clock=SystemClock(),
            on_sample=hop.sample,
        )
        running = asyncio.create_task(sender.run())
        done, _ = await asyncio.wait((running,), timeout=0.5)
        assert not done, "the connection stands"
        opens.set()
        await sender.connected()
        running.cancel()


async def test_more_steps_than_agreed_are_a_bug_of_the_caller() -> None:
    hop = Hop(window=1)
    async with grpc_service(hop) as address, running(hop, grpc_sender(hop, address, max_queued=2)):
        hop.send(1)
        hop.send(2)
        with pytest.raises(LocalProtocolError, match="at most 2"):
            hop.send(3)


async def test_a_sender_that_breaks_the_rules_loses_its_stream_and_the_receiver_lives_on() -> None:
    hop = Hop(window=4)
    async with grpc_service(hop) as address:
        hop.expect(1, tokens=1)
        with suppress(ExceptionGroup):  # the sender may have been told why, or see a stream that broke under its write
            async with running(hop, grpc_sender(hop, address)):
                hop.send(1, tokens=4)
                await hop.until(lambda: bool(hop.stream_errors))
        assert "more activations than were planned" in str(hop.stream_errors[0])
        assert await hop.take() == 1
        hop.expect(2)
        async with running(hop, grpc_sender(hop, address)):
            hop.send(2)
            assert await hop.take() == 2


@pytest.mark.parametrize(
    "message",
    [stage_pb2.RingMessage(), stage_pb2.RingMessage(open=stage_pb2.OpenRing(slice=1))],
    ids=["empty", "opened twice"],
)
async def test_something_that_is_no_frame_ends_the_stream(message: stage_pb2.RingMessage) -> None:
    hop = Hop(window=4)
    async with grpc_service(hop) as address, make_channel(address, Credentials()) as channel:
        call: Any = StageStub(channel).Ring()
        await call.write(stage_pb2.RingMessage(open=stage_pb2.OpenRing(slice=1)))
        await call.write(message)
        assert (await call.read()).credits == 4
        assert "without a frame" in await call.details()
    assert isinstance(hop.stream_errors[0], RemoteProtocolError)


async def test_frames_of_other_epochs_are_dropped_and_counted() -> None:
    hop = Hop(window=4)
    async with grpc_service(hop) as address, make_channel(address, Credentials()) as channel:
        call: Any = StageStub(channel).Ring()
        await call.write(stage_pb2.RingMessage(open=stage_pb2.OpenRing(slice=1)))
        hop.expect(1)
        for epoch in (Epoch(2, EngineId("engine")), Epoch(3, EngineId("other")), EPOCH):
            data = activations(1).tobytes()
            frame = stage_pb2.Frame(epoch=epoch_to_wire(epoch), step=1, chunk=0, data=data)
            await call.write(stage_pb2.RingMessage(frame=frame))
        assert await hop.take() == 1
        assert hop.streams[0].strays == 2
        call.cancel()


async def test_a_newer_stream_replaces_the_older() -> None:
    hop = Hop(window=4)
    async with grpc_service(hop) as address, make_channel(address, Credentials()) as channel:
        older: Any = StageStub(channel).Ring()
        await older.write(stage_pb2.RingMessage(open=stage_pb2.OpenRing(slice=1)))
        assert (await older.read()).credits == 4
        async with running(hop, grpc_sender(hop, address)):
            assert not await older.read(), "the older stream ends"
            hop.expect(1)
            hop.send(1)
            assert await hop.take() == 1


async def test_cancelling_the_sender_leaves_no_task() -> None:
    before = asyncio.all_tasks()
    async with open_hop("grpc") as hop:
        hop.send(1)
        assert len(asyncio.all_tasks()) > len(before)
    left = {task.get_name() for task in asyncio.all_tasks() - before if not task.done()}
    assert not {name for name in left if name.startswith(("ring-write", "ring-deadline", "sender"))}


async def test_the_error_of_the_other_side_arrives_as_itself() -> None:
    hop = Hop(window=4)

    async def refuse(messages: Any, context: Any) -> None:
        raise EdgepipeError("not today")

    hop.serve = refuse  # pyright: ignore[reportAttributeAccessIssue]
    async with grpc_service(hop) as address:
        with pytest.raises(EdgepipeError, match="not today"):
            await grpc_sender(hop, address).run()


def test_pauses_between_attempts_grow_to_a_second_however_long_they_fail() -> None:
    assert [redial_pause_s(in_vain) for in_vain in (2, 3, 4, 5, 6, 5000)] == [0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
