"""The pairing port on real sockets: bounded tries, one machine, one at a time, and nobody holds it up."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from edgepipe.cluster.pairing import Greeting, JoinerPairing
from edgepipe.cluster.pairing_exchange import Attempt, PairingWindow, join
from edgepipe.cluster.tries import ADDRESS_TRIES, FREE_FAILURES, MAX_TRIES, Tries
from edgepipe.cluster.trust import TrustStore
from edgepipe.errors import (
    ConnectTimeout,
    EdgepipeError,
    LinkError,
    PairingRejected,
    PeerClosed,
    QueueFull,
    SendTimeout,
)
from edgepipe.testing.clock import START_S
from tests.support.cluster.pairing import PairingLab


class Host:
    """A window, what it noted, and the answer of its person."""

    def __init__(self, lab: PairingLab, *, message_s: float = 10.0, guessable: bool = True) -> None:
        self.attempts: asyncio.Queue[Attempt] = asyncio.Queue()
        self.accepts: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.let_in = 0
        self.window = PairingWindow(
            make_pairing=lab.host,
            ask=self._ask,
            let_in=self._let_in,
            on_attempt=self.attempts.put_nowait,
            tries=Tries(guessable=guessable),
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
async def hosting(lab: PairingLab, *, message_s: float = 10.0, guessable: bool = True) -> AsyncIterator[Host]:
    host = Host(lab, message_s=message_s, guessable=guessable)
    host.port = await host.window.open(host="127.0.0.1", port=0)
    yield host
    await host.window.close()


async def try_join(host: Host, joiner: JoinerPairing, on_waiting: Callable[[], None] = lambda: None) -> JoinerPairing:
    await join(joiner, host="127.0.0.1", port=host.port, keep=lambda _: None, on_waiting=on_waiting)
    return joiner


async def test_a_machine_with_the_code_is_asked_about_and_joins(lab: PairingLab) -> None:
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


async def test_a_no_at_the_host_lets_nobody_in_and_ends_the_window(lab: PairingLab) -> None:
    async with hosting(lab) as host:
        host.accepts.set_result(False)
        with pytest.raises(PairingRejected, match="did not let"):
            await try_join(host, lab.joiner())
        assert host.let_in == 0
        await host.window.until_over(valid_s=5.0)


async def give_wrong_code(host: Host, lab: PairingLab, *, source: str) -> EdgepipeError:
    """An exchange with a wrong code from an address of this machine; how it was refused."""
    joiner = lab.joiner(code=b"00000000")
    reader, writer = await asyncio.open_connection("127.0.0.1", host.port, local_addr=(source, 0))
    said: bytes | None = joiner.hello
    try:
        while True:
            if said is not None:
                writer.write(len(said).to_bytes(4, "big") + said)
            said = joiner.receive(await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big")))
    except EdgepipeError as error:
        return error
    finally:
        writer.transport.abort()


several_addresses = pytest.mark.skipif(sys.platform != "linux", reason="loopback has one address elsewhere")


@several_addresses
async def test_three_wrong_codes_close_the_window_and_one_address_alone_does_not(lab: PairingLab) -> None:
    async with hosting(lab) as host:
        sources = ["127.0.0.2", "127.0.0.2", "127.0.0.2", "127.0.0.3"]
        errors = [await give_wrong_code(host, lab, source=source) for source in sources]
        assert [error.what for error in errors] == [errors[0].what] * 2 + [errors[2].what, errors[0].what]
        assert (
            "2 tries left, 1 of them for 127.0.0.2; if you are sure that it was right, someone may be tampering"
            in errors[0].fact
        )
        assert "1 try left, 0 of them for 127.0.0.2" in errors[1].fact
        assert "kept for another machine" in errors[2].fact
        assert "0 tries left, 0 of them for 127.0.0.3" in errors[3].fact
        attempts = [host.attempts.get_nowait() for _ in range(3)]  # the refused one is none
        assert [(attempt.address, attempt.tries_left) for attempt in attempts] == list(
            zip(sources[1:], (2, 1, 0), strict=True)
        )
        await host.window.until_over(valid_s=5.0)
        assert host.window.tries.wrong_from() == ["127.0.0.2", "127.0.0.3"]
        host.accepts.set_result(True)
        with pytest.raises(LinkError):  # the right code comes too late
            await try_join(host, lab.joiner())
        assert host.let_in == 0


@several_addresses
async def test_strangers_do_not_close_the_window_of_a_long_string(lab: PairingLab) -> None:
    async with hosting(lab, guessable=False) as host:
        errors = [await give_wrong_code(host, lab, source="127.0.0.2") for _ in range(FREE_FAILURES)]
        assert all(isinstance(error, PairingRejected) for error in errors)
        waits = await give_wrong_code(host, lab, source="127.0.0.2")
        assert isinstance(waits, QueueFull)
        assert "may try again in" in waits.fact
        host.accepts.set_result(True)
        assert (await try_join(host, lab.joiner())).store is not None


@several_addresses
async def test_one_address_does_not_fill_the_port(lab: PairingLab) -> None:
    async with hosting(lab) as host:
        silent = [await asyncio.open_connection("127.0.0.1", host.port, local_addr=("127.0.0.2", 0)) for _ in range(20)]
        with pytest.raises(QueueFull, match="another machine"):  # and not a connection that ends without a word
            await try_join(host, lab.joiner())
        for _, writer in silent:
            writer.transport.abort()


async def test_a_second_machine_is_told_to_wait(lab: PairingLab) -> None:
    async with hosting(lab) as host:
        waiting = asyncio.Event()
        first = asyncio.create_task(try_join(host, lab.joiner(), waiting.set))
        await waiting.wait()
        with pytest.raises(QueueFull, match="another machine"):
            await try_join(host, lab.joiner())
        host.accepts.set_result(True)
        assert (await first).store is not None


async def test_who_stops_in_the_middle_frees_the_port_for_the_next(lab: PairingLab) -> None:
    async with hosting(lab, message_s=1.0) as host:
        _, writer = await asyncio.open_connection("127.0.0.1", host.port)
        hello = lab.joiner().hello
        writer.write(len(hello).to_bytes(4, "big") + hello)
        assert isinstance((await host.attempts.get()).error, SendTimeout)
        writer.close()
        host.accepts.set_result(True)
        assert (await try_join(host, lab.joiner())).store is not None
        assert host.window.tries.left == MAX_TRIES


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x00\x00\x00\x04\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n"]
)
async def test_what_is_no_pairing_ends_at_once_and_costs_no_try(lab: PairingLab, data: bytes) -> None:
    async with hosting(lab) as host:
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
        writer.write(data)
        assert (await host.attempts.get()).error is not None
        async with asyncio.timeout(5.0):
            while await reader.read(4096):
                pass
        writer.close()
        assert host.window.tries.left == MAX_TRIES


async def test_a_machine_that_leaves_while_the_person_thinks_is_not_let_in(lab: PairingLab) -> None:
    async with hosting(lab) as host:
        waiting = asyncio.Event()
        joining = asyncio.create_task(try_join(host, lab.joiner(), waiting.set))
        await waiting.wait()
        joining.cancel()
        await asyncio.wait([joining])
        host.accepts.set_result(True)
        assert isinstance((await host.attempts.get()).error, PeerClosed)
        assert host.let_in == 0


async def test_nobody_listening_is_told_with_the_command_for_the_other_side() -> None:
    with pytest.raises(ConnectTimeout) as caught:
        await join(
            PairingLab.make(stubbed=True).joiner(),
            host="127.0.0.1",
            port=1,
            keep=lambda _: None,
            on_waiting=lambda: None,
        )
    assert "edgepipe node invite" in caught.value.next_step


def test_a_code_has_three_tries_whoever_uses_them_and_one_address_has_two() -> None:
    tries = Tries(guessable=True)
    for number in range(ADDRESS_TRIES):
        assert tries.refusal("a", now_s=START_S) is None
        assert f"{MAX_TRIES - 1 - number} tr" in tries.failed("a", wrong_code=True, now_s=START_S)
    assert isinstance(tries.refusal("a", now_s=2 * START_S), PairingRejected)
    assert tries.refusal("b", now_s=START_S) is None
    assert not tries.used_up
    tries.failed("b", wrong_code=True, now_s=START_S)
    assert tries.used_up


def test_an_address_that_fails_again_and_again_waits_longer_and_longer() -> None:
    tries, now_s, pauses = Tries(guessable=False), START_S, list[float]()
    for _ in range(FREE_FAILURES + 6):
        tries.failed("a", wrong_code=True, now_s=now_s)
        began = now_s
        while tries.refusal("a", now_s=now_s) is not None:
            now_s += 1.0
        pauses.append(now_s - began)
    assert pauses == [0.0, 0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]
    assert tries.refusal("b", now_s=START_S) is None
    assert not tries.used_up


def test_what_is_remembered_of_addresses_is_bounded() -> None:
    tries = Tries(guessable=False)
    for number in range(10_000):
        tries.failed(f"10.0.{number >> 8}.{number & 255}", wrong_code=True, now_s=START_S)
    assert len(tries.wrong_from()) < 1000
