"""Connections before requests: limits their number and the time of headers; errors have the usual JSON shape."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from edgepipe.gateway.access import address_of
from edgepipe.gateway.lingering import LingeringTransport
from edgepipe.gateway.problems import HttpProblem

MAX_HEADER_BYTES = 16 << 10
SEND_BUFFER_BYTES = 128 << 10  # kernel buffer per connection: data that a slow client has not read yet
_MAX_LINGERING = 64  # connections refused beyond ``max_connections`` that linger; more are closed at once
_FIRST_PROBE_S, _LAST_PROBE_S = 0.05, 5.0  # seconds between probes for clients that have left
_EVERY_ANSWER = b"HTTP/1.1 "  # every answer begins so

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one gateway's connections."""

    max_connections: int = 512  # idle ones included; each costs some 50 KB
    # Longest time from the connection, or a later request's first byte, to the end of the header.
    header_s: float = 10.0
    idle_s: float = 30.0  # longest time between two requests
    body_s: float = 30.0  # longest time from a request's header to the end of its body
    # Time from the answer to the close if a client still sends; another connection may take its place.
    linger_s: float = 10.0
    linger_bytes: int = 32 << 20  # bytes that a lingering connection drops before it closes
    stop_s: float = 2.0  # time that a stopping gateway leaves running answers; then they end with an error


class Connections:
    """Open connections.

    At the limit, a new connection replaces an idle one: the longest idle one of the user with the most connections. It
    is refused if none is idle; ``RequestShare`` keeps the users' requests below that.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open: dict[LimitedProtocol, None] = {}  # connections in order of last use
        self._refused: set[LimitedProtocol] = set()  # refused connections that linger

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: LimitedProtocol) -> bool:
        """Count a connection. Return False at the limit."""
        if len(self._open) >= self.limits.max_connections:
            idle = self._most_dispensable()
            if idle is None:
                return False
            idle.abort()
            self.remove(idle)
        self._open[connection] = None
        return True

    def _most_dispensable(self) -> LimitedProtocol | None:
        counts = Counter(other.owner for other in self._open)
        idle = (other for other in self._open if other.idle)
        # The first of several equals is the longest idle one.
        return max(idle, key=lambda other: counts[other.owner], default=None)

    def touch(self, connection: LimitedProtocol) -> None:
        """Mark a connection as used now."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def may_linger(self, connection: LimitedProtocol) -> bool:
        """Return whether a refused connection may linger; count it if it was not admitted."""
        if connection in self._open:
            return True
        if len(self._refused) >= _MAX_LINGERING:
            return False
        self._refused.add(connection)
        return True

    def remove(self, connection: LimitedProtocol) -> None:
        """Forget a closed connection."""
        self._open.pop(connection, None)
        self._refused.discard(connection)

    def protocol(self) -> type[LimitedProtocol]:
        """Return the protocol class for uvicorn, whose connections this object counts."""

        class Counted(LimitedProtocol):
            registry = self

        return Counted


class LimitedProtocol(H11Protocol):
    """Uvicorn's protocol with a deadline for headers, a limit of connections, and JSON errors for invalid HTTP.

    A request finds its connection as ``scope["state"]["connection"]``.
    """

    registry: Connections
    _lingering: LingeringTransport  # the same as ``transport``

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self._header_deadline: asyncio.TimerHandle | None = None
        self.owner = ""  # user of the last request, the client's address before the first header
        self._holds_body = False  # the client waits for "100 Continue" before it sends its body
        self.half_closed = asyncio.Event()  # the client sends no more: it waits for its answer, or has left

    @property
    def idle(self) -> bool:
        """Whether no request runs. An incomplete header counts as idle, so idle clients cannot hold connections."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is None or cycle.response_complete or self._lingering.lingers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count or refuse the connection."""
        limits = self.registry.limits
        self._lingering = LingeringTransport(
            transport, sends_more=self._sends_more, linger_s=limits.linger_s, linger_bytes=limits.linger_bytes
        )
        super().connection_made(self._lingering)
        self.owner = address_of(self.client)
        if not self.registry.admit(self):
            self._refuse(
                HttpProblem(
                    status=503,
                    message=f"all {limits.max_connections} connections are in use",
                    code="too_many_connections",
                    headers={"Retry-After": "1"},
                )
            )
            return
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.registry.remove(self)
        self._lingering.lost()
        self._header_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a header or of a body."""
        if self.transport.is_closing():
            self._lingering.drop(len(data))
            return
        if self.idle and self.conn.their_state is h11.SEND_BODY:  # uvicorn drops it, to keep the connection
            self._lingering.drop(len(data))
        if self.idle and self._header_deadline is None:
            self._expect_header()
        size = MAX_HEADER_BYTES if self.idle else len(data)  # h11 measures a header only while it is incomplete
        for start in range(0, len(data), size):
            if not self.transport.is_closing():
                super().data_received(data[start : start + size])

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle that the client sends no more. It waits for its answer, or has left; the event does not show which.

        So keep computing the answer, and probe whether the client has left. A streamed answer that has begun probes by
        its own comments (``EventStream``).
        """
        if self.idle or self.conn.their_state not in (h11.DONE, h11.MUST_CLOSE):
            return False
        self.half_closed.set()
        self._find_leaver(_FIRST_PROBE_S)
        return True

    def handle_events(self) -> None:
        """Start requests whose header is complete, also later requests of a pipeline."""
        before = self.cycle
        super().handle_events()
        self._holds_body = self.conn.they_are_waiting_for_100_continue
        if self.cycle is not before:
            self._header_came()
            self._lingering.renew()

    def on_response_complete(self) -> None:
        """Mark the connection as idle, or continue with a request that the client has sent already."""
        self.registry.touch(self)
        self.cycle.body.clear()  # the part that the handler did not read
        super().on_response_complete()
        if self.idle and self.half_closed.is_set():
            self.transport.close()
        if self.idle and self.conn.trailing_data[0] and self._header_deadline is None:
            self._expect_header()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP, or a header that is too large."""
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        code = "header_too_large" if status == 431 else "invalid_http"
        text = f"the header is larger than {MAX_HEADER_BYTES >> 10} KiB" if status == 431 else "this is not valid HTTP"
        self._refuse(HttpProblem(status=status, message=text, code=code))

    def shutdown(self) -> None:
        """End with the gateway: at once if the connection lingers, else after the running answer."""
        if self._lingering.lingers:
            self.abort()
        else:
            super().shutdown()

    def abort(self) -> None:
        """Close at once and drop unsent data."""
        self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a request for a WebSocket gets the same answer as without."""

    def _sends_more(self) -> bool:
        """Whether the client sends the body of a request that has its answer."""
        return self.conn.their_state is h11.SEND_BODY and not self._holds_body

    def _find_leaver(self, next_s: float) -> None:
        """Send something until the answer begins, to detect a client that has left.

        The client's system then refuses the data, and the next write closes the connection. HTTP/1.1 has "102
        Processing" for that. HTTP/1.0 has no such answers, so its client gets the answer's first bytes one by one.
        """
        if self.transport.is_closing() or self.idle or self.cycle.response_started:
            return
        if self.scope["http_version"] == "1.1":
            processing = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
            self.transport.write(self.conn.send(processing) or b"")
        elif not self._lingering.write_ahead(_EVERY_ANSWER):
            return
        self.loop.call_later(next_s, self._find_leaver, min(2 * next_s, _LAST_PROBE_S))

    def _expect_header(self) -> None:
        self._header_deadline = self.loop.call_later(self.registry.limits.header_s, self._header_is_late)

    def _header_came(self) -> None:
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None

    def _header_is_late(self) -> None:
        self._header_deadline = None
        if self.idle:
            self.abort()

    def _refuse(self, problem: HttpProblem) -> None:
        """Send an error without a request, then close."""
        self._header_came()
        body = json.dumps(problem.body()).encode()
        headers: Mapping[str, str] = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **problem.headers,
        }
        response = h11.Response(
            status_code=problem.status, headers=list(headers.items()), reason=STATUS_PHRASES[problem.status]
        )
        try:
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # an answer is partly sent
            self.abort()
        else:
            self._end_request()
            if self.registry.may_linger(self):
                self._lingering.linger()
            else:
                self.transport.close()

    def _end_request(self) -> None:
        """Tell a running request that no more of its body comes, as if the client had left."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
