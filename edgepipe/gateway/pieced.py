"""Unstreamed answers that are made as they are sent, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgepipe.gateway.json_pieces import JsonPiece, json_pieces
from edgepipe.gateway.streams import StreamTimeouts, send_part, send_to_client
from edgepipe.gateway.turns import Turns


class PiecedResponse(Response):
    """An answer in pieces. One that fits into a piece has a Content-Length; a longer one is sent in chunks.

    It ends early if the client leaves or stalls; the rest is not made. Only the piece that is sent is held.
    """

    media_type = "application/json"

    def __init__(
        self,
        pieces: Iterator[JsonPiece],
        *,
        turns: Turns,
        timeouts: StreamTimeouts,
        place: AbstractContextManager[object] | None = None,
    ) -> None:
        """``place``: context that the answer holds until its end."""
        super().__init__()
        self._pieces = pieces
        self._turns = turns
        self._timeouts = timeouts
        self._place = place or nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces."""
        with self._place:
            first = next(self._pieces)
            if first.more:
                del self.headers["content-length"]
                await send_to_client(self._send_all(send, first), scope, receive, timeouts=self._timeouts)
                return
            self.headers["content-length"] = str(len(first.data))
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first.data})

    async def _send_all(self, send: Send, piece: JsonPiece) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while True:
            if piece.data:
                await send_part(send, piece.data, timeouts=self._timeouts)
            if not piece.more:
                break
            await self._turns.take()
            piece = next(self._pieces)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecedAnswers:
    """Makes the gateway's unstreamed answers."""

    turns: Turns
    timeouts: StreamTimeouts

    def json(self, value: object) -> PiecedResponse:
        """Answer with JSON; see ``json_pieces``."""
        return self.of(json_pieces(value))

    def of(self, pieces: Iterator[JsonPiece], *, place: AbstractContextManager[object] | None = None) -> PiecedResponse:
        """Answer with these pieces, and hold ``place`` until the end."""
        return PiecedResponse(pieces, turns=self.turns, timeouts=self.timeouts, place=place)
