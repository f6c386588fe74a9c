"""The page's requests: its files, its event stream, and what other programs need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgepipe.errors import EdgepipeError
from edgepipe.gateway.access import address_of, is_address, owner_of
from edgepipe.gateway.endpoints import Handler
from edgepipe.gateway.models import ModelTable
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.streams import EventStream, StreamTimeouts
from edgepipe.gateway.turns import Turns
from edgepipe.gateway.ui.connecting import programs_json
from edgepipe.gateway.ui.feed import PageFeed, event
from edgepipe.gateway.ui.files import INDEX, PageFiles
from edgepipe.gateway.ui.paths import FILES, wants_page

MOST_STREAMS = 16  # of a gateway; a stream costs some milliseconds of each second
MOST_STREAMS_OF_A_CLIENT = 4  # browsers allow six connections to a host


class Page:
    """Handlers of the page. ``feed`` is what its streams send."""

    def __init__(self, *, feed: PageFeed, models: ModelTable, turns: Turns, timeouts: StreamTimeouts) -> None:
        self.feed = feed
        self._models = models
        self._files = PageFiles()
        self._turns = turns
        self._timeouts = timeouts
        self._streams: Counter[str] = Counter()  # by client

    def routes(self, *, text: Handler) -> Sequence[BaseRoute]:
        """Return the routes of the page. ``text``: what clients other than browsers get at ``/``."""

        async def root(request: Request) -> Response:
            answer = self._files.answer(request, INDEX) if wants_page(request.scope) else None
            return answer or await text(request)

        return [
            Route("/", root, methods=["GET"]),
            Route(FILES + "{name:path}", self._file, methods=["GET"]),
            Route("/ui/events", self._events, methods=["GET"]),
            Route("/ui/connect", self._connect, methods=["GET"]),
        ]

    async def _file(self, request: Request) -> Response:
        answer = self._files.answer(request, request.path_params["name"])
        if answer is None:
            raise HTTPException(404)
        return answer

    async def _events(self, request: Request) -> Response:
        """``GET /ui/events``: the view, the history, and each change."""
        return EventStream(
            self.feed.events(),
            opening=(),
            on_error=_error,
            place=self._place(address_of(request.scope.get("client"))),
            timeouts=self._timeouts,
            turns=self._turns,
        )

    async def _connect(self, request: Request) -> Response:
        """``GET /ui/connect?model=NAME``: what programs need to use the model. Raises ModelUnknown."""
        served = self._models.get(request.query_params.get("model")).served
        return JSONResponse(
            programs_json(
                base_url=f"{request.url.scheme}://{request.headers['host']}",
                model=served.name,
                context_length=served.context_length,
                needs_key=not is_address(owner_of(request)),
            )
        )

    @contextmanager
    def _place(self, client: str) -> Generator[None]:
        """Count a stream while it runs. Raises HttpProblem beyond the limits."""
        if self._streams[client] >= MOST_STREAMS_OF_A_CLIENT or self._streams.total() >= MOST_STREAMS:
            raise HttpProblem(
                status=503,
                message=f"too many pages are open: {self._streams[client]} of this client, limit "
                f"{MOST_STREAMS_OF_A_CLIENT}; {self._streams.total()} in all, limit {MOST_STREAMS}. Close some",
                code="too_many_pages",
                headers={"Retry-After": "5"},
            )
        self._streams[client] += 1
        try:
            yield
        finally:
            self._streams[client] -= 1
            if not self._streams[client]:
                del self._streams[client]


def _error(error: EdgepipeError) -> bytes:
    return event("error", {"what": error.what})
