"""The pairing port on real sockets: three tries, one machine, one at a time, and nobody holds it up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from edgepipe.cluster.pairing import Greeting, JoinerPairing
from edgepipe.cluster.pairing_exchange import Attempt, PairingWindow, join
from edgepipe.cluster.trust import TrustStore
from edgepipe.errors import (
    ConnectTimeout,
    LinkError,
    PairingRejected,
    PeerClosed,
    QueueFull,
    SendTimeout,
)
from edgepipe.testing.pairing import PairingLab


class Host:
    """A window, what it noted, and the answer of its person."""

    def __init__(self, lab: PairingLab, *, message_s: float = 10.0) -> None:
        self.attempts: asyncio.Queue[Attempt] = asyncio.Queue()
        self.accepts: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.let_in = 0
        self.window = PairingWindow(
            make_pairing=lab.host,
            ask=self._ask,
            let_in=self._let_in,
            on_attempt=self.attempts.put_nowait,
            message_s=message_s,
        )
        self.port = 0
        self._lab = lab

    async def _ask(self, greeting: Greeting, address: str) -> bool:
        assert greeting.name == "studio"
        return await self.accepts

    async def _let_in(self, greeting: Greeting) -> tuple[TrustStore, Mapping[str, str]]:
        self.let_in += 1
        return self._lab.with_joiner(), {}


MakeHost = Callable[..., AbstractAsyncContextManager[Host]]


@pytest.fixture
def lab() -> PairingLab:
    return PairingLab.make(stubbed=True)


@asynccontextmanager
async def hosting(lab: PairingLab, *, message_s: float = 10.0) -> AsyncIterator[Host]:
    host = Host(lab, message_s=message_s)
    host.port = await host.window.open(host="127.0.0.1", port=0)
    yield host
    await host.window.close()


async def try_join(host: Host, joiner: JoinerPairing, on_waiting: Callable[[], None] = lambda: None) -> JoinerPairing:
    await join(joiner, host="127.0.0.1", port=host.port, keep=lambda _: None, on_waiting=on_waiting)
    return joiner


async def test_a_machine_with_the_code_is_asked_about_and_joins(lab: PairingLab):
    async with hosting(lab) as host:
        waiting = asyncio.Event()
        joining = asyncio.create_task(try_join(host, lab.joiner(), waiting.set))
        await waiting.wait()
        assert not joining.done()
        host.accepts.set_result(True)
        assert (await joining).store is not None
        assert (await host.attempts.get()).error is None
        await host.window.until_over(valid_s=5.0)
        with pytest.raises((PeerClosed, ConnectTimeout)):  # one machine per code
            await try_join(host, lab.joiner())


async def test_a_no_at_the_host_lets_nobody_in_and_ends_the_window(lab: PairingLab):
    async with hosting(lab) as host:
        host.accepts.set_result(False)
        with pytest.raises(PairingRejected, match="did not let"):
            await try_join(host, lab.joiner())
        assert host.let_in == 0
        await host.window.until_over(valid_s=5.0)


async def test_three_wrong_codes_close_the_window(lab: PairingLab):
    async with hosting(lab) as host:
        for left in (2, 1, 0):
            with pytest.raises(PairingRejected, match="not right") as told:
                await try_join(host, lab.joiner(code=b"00000000"))
            assert f"tries left: {left}" in told.value.fact
            assert (await host.attempts.get()).tries_left == left
        await host.window.until_over(valid_s=5.0)
        host.accepts.set_result(True)
        with pytest.raises(LinkError):  # the right code comes too late
            await try_join(host, lab.joiner())
        assert host.let_in == 0


async def test_a_second_machine_is_told_to_wait(lab: PairingLab):
    async with hosting(lab) as host:
        waiting = asyncio.Event()
        first = asyncio.create_task(try_join(host, lab.joiner(), waiting.set))
        await waiting.wait()
        with pytest.raises(QueueFull, match="another machine"):
            await try_join(host, lab.joiner())
        host.accepts.set_result(True)
        assert (await first).store is not None


async def test_who_stops_in_the_middle_frees_the_port_for_the_next(lab: PairingLab):
    async with hosting(lab, message_s=1.0) as host:
        _, writer = await asyncio.open_connection("127.0.0.1", host.port)
        hello = lab.joiner().hello
        writer.write(len(hello).to_bytes(4, "big") + hello)
        assert isinstance((await host.attempts.get()).error, SendTimeout)
        writer.close()
        host.accepts.set_result(True)
        assert (await try_join(host, lab.joiner())).store is not None
        assert host.window.tries_left == 3


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x00\x00\x00\x04\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n"]
)
async def test_what_is_no_pairing_ends_at_once_and_costs_no_try(lab: PairingLab, data: bytes):
    async with hosting(lab) as host:
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
        writer.write(data)
        assert (await host.attempts.get()).error is not None
        async with asyncio.timeout(5.0):
            while await reader.read(4096):
                pass
        writer.close()
        assert host.window.tries_left == 3


async def test_a_machine_that_leaves_while_the_person_thinks_is_not_let_in(lab: PairingLab):
    async with hosting(lab) as host:
        waiting = asyncio.Event()
        joining = asyncio.create_task(try_join(host, lab.joiner(), waiting.set))
        await waiting.wait()
        joining.cancel()
        await asyncio.wait([joining])
        host.accepts.set_result(True)
        assert isinstance((await host.attempts.get()).error, PeerClosed)
        assert host.let_in == 0


async def test_nobody_listening_is_told_with_the_command_for_the_other_side():
    with pytest.raises(ConnectTimeout) as told:
        await join(
            PairingLab.make(stubbed=True).joiner(),
            host="127.0.0.1",
            port=1,
            keep=lambda _: None,
            on_waiting=lambda: None,
        )
    assert "edgepipe node invite" in told.value.next_step
