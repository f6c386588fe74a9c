"""All gRPC channels and servers of edgepipe, so that transport security is in one place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio

from edgepipe.addresses import with_port
from edgepipe.errors import (
    AccessDenied,
    CapacityError,
    ClusterError,
    ConnectTimeout,
    EdgepipeError,
    LinkError,
    PeerClosed,
    PortInUse,
    SendTimeout,
    UserError,
)
from edgepipe.plain_words import plain_call
from edgepipe.safe_text import one_line
from edgepipe.wire.errors import error_from_wire, error_to_wire
from edgepipe.wire.v1 import common_pb2

if TYPE_CHECKING:  # the command line calls a Unix socket, and loads no certificates
    from edgepipe.security.mutual_tls import Context, Credentials, Cut, Security

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 << 20  # frames are at most 512 KB, a prompt of 128 k ids about 400 KB
_MAX_CALLS = 512  # calls under way in one server: a home has a few streams per pair of processes
MAX_STREAMS = 32  # streams of one connection, which carries a few at a time; further calls wait
_MAX_METADATA_BYTES = 16 << 10
_MAX_RECEIVED = "grpc.max_receive_message_length"
_ERROR_KEY = "edgepipe-error-bin"
ATTEMPT_S = 3.0
"""Limit of one attempt to connect: a lost SYN is sent again after 1 s, a handshake is a few round trips."""

# Keepalive on both sides, or servers answer GOAWAY too_many_pings. The ping time-out bounds how long a stopped process
# goes unnoticed; at 1 s lossy Wi-Fi breaks streams many times a minute, at 3 s it does not.
_KEEPALIVE_OPTIONS = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
]
_COMMON_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
]
_CHANNEL_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # one connection per channel: bulk and activations never share one
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", int(ATTEMPT_S * 1e3)),  # length of one attempt; callers decide when to try again
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]
_SERVER_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server_handshake_timeout_ms", 3000),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.so_reuseport", 0),
]


def make_channel(
    address: str, credentials: Credentials, *, max_received_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """Make a separate channel to ``HOST:PORT``; it connects when first used, and only to the pinned certificate.

    A message of more than ``max_received_bytes`` ends its call.
    """
    options = [*_CHANNEL_OPTIONS, *_keepalive(credentials.keepalive), (_MAX_RECEIVED, max_received_bytes)]
    if credentials.tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    named = [
        ("grpc.ssl_target_name_override", credentials.server_name),
        ("grpc.default_authority", credentials.server_name),
    ]
    return grpc.aio.secure_channel(address, credentials.tls, options=[*options, *named])


def make_unix_channel(path: str, *, keepalive: bool = True) -> grpc.aio.Channel:
    """Make a channel to a Unix socket of this machine."""
    options = [*_CHANNEL_OPTIONS, *_keepalive(keepalive), (_MAX_RECEIVED, MAX_MESSAGE_BYTES)]
    return grpc.aio.insecure_channel(f"unix:{path}", options=options)


def make_server(
    security: Security, *, max_received_bytes: int = MAX_MESSAGE_BYTES, keepalive: bool = True
) -> grpc.aio.Server:
    """Make a server that admits the callers that ``security`` admits; ``bind`` it with the same ``security``.

    A message of more than ``max_received_bytes`` ends its call. Handlers may raise EdgepipeError: callers get the same
    class back through ``translated``.
    """
    return grpc.aio.server(
        options=[*_SERVER_OPTIONS, *_keepalive(keepalive), (_MAX_RECEIVED, max_received_bytes)],
        interceptors=[_Interceptor(security)],
        maximum_concurrent_rpcs=_MAX_CALLS,
    )


def bind(server: grpc.aio.Server, security: Security, *, host: str, port: int) -> int:
    """Listen on a TCP port (0: any free one) and return it. Raises PortInUse."""
    credentials = security.server_credentials()
    address = with_port(host, port)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as exc:
        raise _port_in_use(host, port) from exc
    if bound == 0:
        raise _port_in_use(host, port)
    return bound


def make_unix_server(path: str, *, keepalive: bool = True) -> grpc.aio.Server:
    """Make a server on a Unix socket. Any process that can open the socket may call: keep its folder private (0700)."""
    from edgepipe.security.mutual_tls import Plaintext

    options = [*_SERVER_OPTIONS, *_keepalive(keepalive), (_MAX_RECEIVED, MAX_MESSAGE_BYTES)]
    server = grpc.aio.server(options=options, interceptors=[_Interceptor(Plaintext())])
    server.add_insecure_port(f"unix:{path}")
    return server


def _keepalive(wanted: bool) -> list[tuple[str, int]]:
    return _KEEPALIVE_OPTIONS if wanted else []


@contextmanager
def translated(peer: str) -> Generator[None]:
    """Turn gRPC's errors into ours inside the block: the far side's own error, or a LinkError that names ``peer``."""
    try:
        yield
    except grpc.aio.AioRpcError as exc:
        raise from_rpc_error(exc, peer=peer) from exc


def sent_error(exc: grpc.aio.AioRpcError) -> EdgepipeError | None:
    """Return the error that the far side sent; None without one, as when the far side was never reached."""
    for key, value in exc.trailing_metadata() or ():
        if key == _ERROR_KEY and isinstance(value, bytes):
            return error_from_wire(common_pb2.Error.FromString(value))
    return None


def from_rpc_error(exc: grpc.aio.AioRpcError, *, peer: str) -> EdgepipeError:
    """Return our error for a failed call to ``peer``."""
    if (sent := sent_error(exc)) is not None:
        return sent
    details = one_line(exc.details() or "")
    fact = plain_call(exc.code().name, details)
    logger.debug("a call failed peer=%s status=%s: %s", peer, exc.code().name, details)
    if exc.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return SendTimeout(f"{peer} did not answer in time", fact=fact)
    if exc.code() == grpc.StatusCode.UNAVAILABLE:
        if "failed to connect" in details:
            error = ConnectTimeout(f"{peer} cannot be reached", fact=fact)
            error.__cause__ = exc  # ``is_refused`` reads the cause, also before anybody raises the error
            return error
        return PeerClosed(f"{peer} closed the connection", fact=fact)
    return LinkError(f"the call to {peer} failed", fact=fact)


def is_refused(exc: BaseException | None) -> bool:
    """Return whether a call, or the cause of our error for it, failed because no process listens there."""
    if isinstance(exc, EdgepipeError):
        exc = exc.__cause__
    refused_call = isinstance(exc, grpc.aio.AioRpcError) and "refused" in (exc.details() or "")
    return refused_call or isinstance(exc, ConnectionRefusedError)


def _port_in_use(host: str, port: int) -> PortInUse:
    return PortInUse(
        f"port {port} on {host} cannot be used",
        fact="another program listens there, or the address is not this machine's",
        next_step="choose another with --port (0: any free one), or stop the other program",
    )


def _status_of(error: EdgepipeError) -> grpc.StatusCode:
    if isinstance(error, AccessDenied):
        return grpc.StatusCode.PERMISSION_DENIED
    if isinstance(error, UserError):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(error, CapacityError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if isinstance(error, ClusterError):
        return grpc.StatusCode.FAILED_PRECONDITION
    if isinstance(error, LinkError):
        return grpc.StatusCode.UNAVAILABLE
    return grpc.StatusCode.INTERNAL


async def _abort(context: Context, error: EdgepipeError) -> None:
    detail = error_to_wire(error).SerializeToString()
    await context.abort(_status_of(error), str(error), trailing_metadata=((_ERROR_KEY, detail),))


async def _abort_once_started(context: Context, started: asyncio.Event | None, error: EdgepipeError) -> None:
    if started is not None:
        await started.wait()
    await _abort(context, error)


def _cutter(context: Context, tasks: set[asyncio.Task[None]], tell: Callable[[AccessDenied], Any]) -> Cut:
    """Return a function that ends the present task's handler: it sends the caller the reason and cancels the task."""
    handler = asyncio.current_task()

    async def cut(error: AccessDenied) -> None:
        try:
            async with asyncio.timeout(1.0):
                await tell(error)
        except (grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError, TimeoutError):
            pass  # sent, or the caller is gone already
        finally:
            if handler is not None:
                handler.cancel()

    def start(error: AccessDenied) -> None:
        task = asyncio.create_task(cut(error), name="cut a removed caller")
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return start


def _innermost(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error of a group, at any depth."""
    first: Exception | ExceptionGroup[Exception] = group.exceptions[0]
    return _innermost(cast("ExceptionGroup[Exception]", first)) if isinstance(first, ExceptionGroup) else first


class _Interceptor(grpc.aio.ServerInterceptor):
    """Checks the caller before every handler, and sends our errors whole: gRPC turns an unmapped exception into a bare
    UNKNOWN. Handlers are coroutines or async generators."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._cuts: set[asyncio.Task[None]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        codecs = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary, method), **codecs)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._stream(handler.unary_stream, method), **codecs)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(self._unary(handler.stream_unary, method), **codecs)
        return grpc.stream_stream_rpc_method_handler(self._stream(handler.stream_stream, method), **codecs)

    def _unary(self, behaviour: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: Context) -> Any:
            try:
                with self._entering(method, context, None):
                    return await behaviour(request, context)
            except EdgepipeError as exc:
                await _abort(context, exc)

        return call

    def _stream(self, behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
        async def call(request: Any, context: Context) -> Any:
            started = asyncio.Event()
            try:
                with self._entering(method, context, started):
                    await context.send_initial_metadata(())
                    started.set()
                    async for reply in behaviour(request, context):
                        yield reply
            except EdgepipeError as exc:
                await _abort(context, exc)
            except ExceptionGroup as group:
                cut, others = group.split(grpc.aio.AbortError)
                if cut is None or others is not None:
                    raise
                raise _innermost(cut) from None  # gRPC recognises its own error and logs nothing

        return call

    def _entering(self, method: str, context: Context, started: asyncio.Event | None) -> AbstractContextManager[None]:
        """Admit a call. Raises SendTimeout if its deadline has passed.

        ``started``: set once the metadata of a stream is sent. gRPC sends it with the first reply unless asked before,
        and a status sent while that reply is under way carries it a second time, which gRPC refuses: the caller would
        never hear that the stream has ended.
        """
        remaining_s: Any = context.time_remaining()  # None without a deadline; the stubs do not know
        if remaining_s is not None and remaining_s <= 0:
            raise SendTimeout("the call came after its deadline", fact=method)
        return self._security.entering(
            method, context, _cutter(context, self._cuts, partial(_abort_once_started, context, started))
        )
