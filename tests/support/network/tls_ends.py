"""A listening process that echoes on every method, and callers that may be anybody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from edgepipe.ids import NodeId
from edgepipe.link.channels import bind, make_channel, make_server, translated
from edgepipe.security.access import ProcessKind
from edgepipe.security.certificates import KeyPair, make_key_pair
from edgepipe.security.mutual_tls import Credentials, Denial, MutualTls, Peer

PREFIX = "/edgepipe.wire.v1."


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """A process with a key."""

    pair: KeyPair = field(default_factory=make_key_pair)
    kind: ProcessKind = ProcessKind.NODE
    node: str = ""  # node that answers for it; empty: itself

    @property
    def peer(self) -> Peer:
        """As others know it."""
        node_id = NodeId(self.node or self.pair.fingerprint)
        return Peer(node_id=node_id, kind=self.kind, certificate=self.pair.certificate)


class Echo(grpc.GenericRpcHandler):
    """Any method: bytes back for bytes."""

    def __init__(self) -> None:
        self.calls: list[str] = []  # let through
        self.running = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """See ``grpc.GenericRpcHandler``."""
        method: str = handler_call_details.method

        async def echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            self.calls.append(method.removeprefix(PREFIX))
            self.running += 1
            try:
                async for message in messages:
                    yield message
            finally:
                self.running -= 1

        async def echo_in_group(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            """As stages do, whose streams have tasks beside them."""
            async with asyncio.TaskGroup():
                async for message in echo(messages, context):
                    await context.write(message)
            for nothing in ():
                yield nothing

        return grpc.stream_stream_rpc_method_handler(echo_in_group if method.endswith("Stage/Control") else echo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The process, its address, and what it noted."""

    party: Party
    security: MutualTls
    address: str
    echo: Echo
    denials: list[Denial]

    def credentials(self, party: Party, *, expected: KeyPair | None = None) -> Credentials:
        """What ``party`` connects with; it takes the process for the owner of ``expected`` (by default it is right)."""
        return MutualTls(party.pair, callers=()).to_process((expected or self.party.pair).certificate.pem)

    async def say(self, party: Party, method: str, *, data: bytes = b"x", **options: Any) -> bytes:
        """Call a method as ``party``, send one message and take the answer. Raises what the call ends with.

        Without ``data`` nothing is sent: gRPC hides why a call was refused if it is still being written to.
        """
        async with self.stream(party, method, **options) as call:
            if data:
                await call.write(data)
            return await call.read()

    @asynccontextmanager
    async def stream(self, party: Party, method: str, **options: Any) -> AsyncIterator[Any]:
        """An open call; its errors are translated."""
        credentials = self.credentials(party, expected=options.pop("expected", None))
        async with make_channel(self.address, credentials) as channel, asyncio.timeout(20):
            with translated("the process"):
                call: Any = channel.stream_stream(PREFIX + method)(**options)
                yield call
                call.cancel()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare TCP connection."""
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))


@asynccontextmanager
async def listening(*known: Party, callers: Sequence[ProcessKind] = tuple(ProcessKind)) -> AsyncIterator[Listening]:
    """A process that was introduced to ``known``."""
    party, denials, echo = Party(), list[Denial](), Echo()
    security = MutualTls(party.pair, callers=callers, on_denied=denials.append)
    security.introduce([end.peer for end in known], nodes=())
    server = make_server(security)
    server.add_generic_rpc_handlers((echo,))
    port = bind(server, security, host="127.0.0.1", port=0)
    await server.start()
    try:
        yield Listening(party=party, security=security, address=f"127.0.0.1:{port}", echo=echo, denials=denials)
    finally:
        await server.stop(None)


async def until_closed(reader: asyncio.StreamReader, *, timeout_s: float) -> bytes:
    """What a connection still gave before the other side closed it. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        data = b""
        with contextlib.suppress(ConnectionError):
            while more := await reader.read(4096):
                data += more
        return data
