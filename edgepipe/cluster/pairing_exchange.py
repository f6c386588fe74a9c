"""Pairing over TCP: framed messages with deadlines, the joiner's call, and the host's port, open for minutes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from edgepipe.cluster.pairing import (
    MAX_MESSAGE_BYTES,
    MAX_WELCOME_BYTES,
    Greeting,
    HostPairing,
    JoinerPairing,
    refusal,
    waiting,
    wrong_code,
)
from edgepipe.cluster.tries import MAX_TRIES, Tries
from edgepipe.cluster.trust import TrustStore
from edgepipe.errors import (
    ConnectTimeout,
    EdgepipeError,
    PairingRejected,
    PeerClosed,
    PortInUse,
    QueueFull,
    RemoteProtocolError,
    SendTimeout,
)
from edgepipe.plain_words import plain

logger = logging.getLogger(__name__)

_LENGTH_BYTES = 4
_MESSAGE_S = 10.0  # deadline of a message, and of all until the code is proven; both sides compute for 0.1 s
_CONNECT_S = 5.0
_LEAST_ANSWER_S = 0.3  # SPAKE2 here does not take constant time: this least time hides its duration
_GOODBYE_S = 1.0
_AGAIN = "join again; if the code no longer holds: edgepipe node invite on the other machine"
_MAX_CONNECTIONS = 8  # one is served, the others must wait
_ADDRESS_CONNECTIONS = 2  # limit per address: one machine alone does not fill the port
ACCEPT_S = 60

OnJoined = Callable[[Greeting], Awaitable[tuple[TrustStore, Mapping[str, str]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One exchange as the host's person sees it."""

    address: str  # the other side's address
    name: str = ""
    node_id: str = ""
    error: EdgepipeError | None = None  # None: it joined
    tries_left: int = MAX_TRIES
    silent: bool = False  # it was admitted and never confirmed that it joined


@dataclass(kw_only=True, eq=False)
class PairingWindow:
    """The host's port: one exchange at a time, as many as ``tries`` allows, until one machine joins."""

    make_pairing: Callable[[], HostPairing]
    ask: Callable[[Greeting, str], Awaitable[bool]]  # takes the greeting and the address
    let_in: OnJoined
    on_attempt: Callable[[Attempt], None]
    tries: Tries
    message_s: float = _MESSAGE_S  # deadline until the code is proven

    def __post_init__(self) -> None:
        self._busy = asyncio.Lock()
        self._tasks: dict[asyncio.Task[None], str] = {}  # connections, with the address of the other side
        self._closing = False
        self._over = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def open(self, *, host: str, port: int) -> int:
        """Listen (port 0: any free one); return the port. Raises PortInUse."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=2 * MAX_MESSAGE_BYTES)
        except OSError as exc:
            raise PortInUse(
                f"the pairing port {port} on {host} cannot be used",
                fact=plain(exc),
                next_step="stop the other program, or start the node with another --port",
            ) from exc
        return int(self._server.sockets[0].getsockname()[1])

    async def until_over(self, *, valid_s: float) -> None:
        """Return when a machine joined, no try is left or the time is over. An exchange under way may end first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(valid_s):
                await self._over.wait()
        self._over.set()
        async with self._busy:
            pass

    async def close(self) -> None:
        """Stop listening and end all connections."""
        self._over.set()
        self._closing = True
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "called in a task of its own"
        address = str(writer.get_extra_info("peername")[0])
        self._tasks[task] = address
        try:
            beside = sum(peer == address for peer in self._tasks.values())
            if self._over.is_set() or len(self._tasks) > _MAX_CONNECTIONS or beside > _ADDRESS_CONNECTIONS:
                writer.transport.abort()
                return
            error = self.tries.refusal(address, now_s=_now_s()) or (_busy() if self._busy.locked() else None)
            if error is not None:
                await _send(writer, refusal(error))
                return
            async with self._busy:
                if not self._over.is_set():
                    await self._exchange(reader, writer, address)
        except (OSError, TimeoutError) as exc:
            logger.debug("pairing connection ended: %s", exc)
        except asyncio.CancelledError:
            if not self._closing:  # asyncio's server would log an error for a connection that its own close cancelled
                raise
        finally:
            self._tasks.pop(task)
            await _end(writer)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        pairing = self.make_pairing()
        try:
            await self._prove(pairing, reader, writer)
            silent = await self._welcome(pairing, reader, writer, address)
        except (EdgepipeError, OSError) as exc:
            error = exc if isinstance(exc, EdgepipeError) else PeerClosed("the connection broke off", fact=plain(exc))
            error = self._failed(pairing, address, error)
            with suppress(OSError):
                await _send(writer, refusal(error))
            return
        self._over.set()
        self.on_attempt(self._attempt(pairing, address, silent=silent))

    async def _prove(self, pairing: HostPairing, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self.message_s):
                while not pairing.confirmed:
                    data = await _read(reader, most_bytes=MAX_MESSAGE_BYTES)
                    began = _now_s()
                    reply = await asyncio.to_thread(pairing.receive, data)
                    if pairing.guessed:
                        await asyncio.sleep(began + _LEAST_ANSWER_S - _now_s())
                    if reply is not None:
                        await _send(writer, reply)
        except TimeoutError as exc:
            raise SendTimeout("the other machine stopped in the middle", fact=f"waited {self.message_s:.0f} s") from exc

    async def _welcome(
        self, pairing: HostPairing, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> bool:
        """Ask the person, admit the machine, send the store; return whether the joiner then stayed silent."""
        assert pairing.other is not None, "proven means greeted"
        await _send(writer, waiting(ACCEPT_S))
        try:
            async with asyncio.timeout(ACCEPT_S):
                accepted = await self.ask(pairing.other, address)
        except TimeoutError:
            accepted = None
        if reader.at_eof():
            raise PeerClosed("the other machine left before the person here answered")
        if not accepted:
            self._over.set()
            raise _not_let_in(answered=accepted is not None)
        store, addresses = await self.let_in(pairing.other)
        await _send(writer, await asyncio.to_thread(pairing.welcome, store, addresses))
        try:
            async with asyncio.timeout(_MESSAGE_S):
                pairing.receive(await _read(reader, most_bytes=MAX_MESSAGE_BYTES))
        except (TimeoutError, OSError, EdgepipeError) as exc:
            logger.warning("%s was admitted and did not confirm that it has joined: %s", pairing.other.name, exc)
        return not pairing.done

    def _failed(self, pairing: HostPairing, address: str, error: EdgepipeError) -> EdgepipeError:
        """Count a failed attempt. Return the error with what that means for further attempts."""
        wrong_code = pairing.guessed and isinstance(error, PairingRejected)
        note = self.tries.failed(address, wrong_code=wrong_code, now_s=_now_s())
        error = error.changed(fact="; ".join(filter(None, (note, error.fact))))
        self.on_attempt(self._attempt(pairing, address, error=error))
        if self.tries.used_up:
            self._over.set()
        return error

    def _attempt(
        self, pairing: HostPairing, address: str, *, error: EdgepipeError | None = None, silent: bool = False
    ) -> Attempt:
        other = pairing.other
        return Attempt(
            address=address,
            name=other.name if other else "",
            node_id=other.node_id if other else "",
            error=error,
            tries_left=self.tries.left,
            silent=silent,
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def join(
    pairing: JoinerPairing,
    *,
    host: str,
    port: int,
    keep: Callable[[JoinerPairing], None],
    on_waiting: Callable[[], None],
) -> None:
    """Run the joiner's side: call the host, prove the code, wait for its person, ``keep`` its store (in a thread).

    Raises ConnectTimeout, PeerClosed, SendTimeout, and the errors of ``JoinerPairing.receive`` and ``keep``.
    """
    reader, writer = await _connect(host, port)
    try:
        await _send(writer, pairing.hello)
        async with asyncio.timeout(_MESSAGE_S):
            while not pairing.proven:
                await _step(pairing, reader, writer)
        async with asyncio.timeout(_MESSAGE_S):
            while not pairing.waiting_s and pairing.store is None:
                await _step(pairing, reader, writer)
        on_waiting()
        async with asyncio.timeout(pairing.waiting_s + _MESSAGE_S):
            while pairing.store is None:
                await _step(pairing, reader, writer)
        await asyncio.to_thread(keep, pairing)
        await _send(writer, pairing.done())
    except TimeoutError as exc:
        raise SendTimeout(f"{host}:{port} stopped answering in the middle of the pairing", next_step=_AGAIN) from exc
    except OSError as exc:
        raise PeerClosed(
            f"{host}:{port} closed the connection in the middle of the pairing", fact=plain(exc), next_step=_AGAIN
        ) from exc
    finally:
        await _end(writer)


async def _step(pairing: JoinerPairing, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    data = await _read(reader, most_bytes=MAX_WELCOME_BYTES if pairing.proven else MAX_MESSAGE_BYTES)
    try:
        reply = await asyncio.to_thread(pairing.receive, data)
    except PairingRejected as error:
        if error.what == wrong_code().what:
            with suppress(OSError, TimeoutError):
                await _send(writer, refusal(error))
        raise
    if reply is not None:
        await _send(writer, reply)


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        async with asyncio.timeout(_CONNECT_S):
            return await asyncio.open_connection(host, port, limit=2 * MAX_MESSAGE_BYTES)
    except TimeoutError as exc:
        raise ConnectTimeout(
            f"{host}:{port} does not answer",
            fact=f"waited {_CONNECT_S:.0f} s; a firewall there may drop connections",
            next_step="edgepipe doctor",
        ) from exc
    except OSError as exc:
        raise ConnectTimeout(
            f"no machine invites at {host}:{port}",
            fact=plain(exc),
            next_step="on that machine: edgepipe node invite",
        ) from exc


async def _read(reader: asyncio.StreamReader, *, most_bytes: int) -> bytes:
    """Read one message. Raises PeerClosed, RemoteProtocolError, OSError."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if not 0 < length <= most_bytes:
            raise RemoteProtocolError("a message of the pairing has an impossible length", fact=f"{length} bytes")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as exc:
        raise PeerClosed("the other machine ended the pairing", next_step=_AGAIN) from exc


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    async with asyncio.timeout(_MESSAGE_S):
        await writer.drain()


async def _end(writer: asyncio.StreamWriter) -> None:
    """Close the connection; wait at most a second until written data is sent."""
    writer.close()
    try:
        async with asyncio.timeout(_GOODBYE_S):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()


def _not_let_in(*, answered: bool) -> PairingRejected:
    return PairingRejected(
        "the person at the host did not let this machine in",
        fact="the answer there was no" if answered else f"no answer came there within {ACCEPT_S} s",
        next_step="agree with them, then: edgepipe node invite there, edgepipe node join here",
    )


def _busy() -> QueueFull:
    return QueueFull("another machine is joining at this moment", next_step="try again in a minute")
