"""The page's requests: its files, its event streams, and what other programs need."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgepipe.errors import EdgepipeError
from edgepipe.gateway.access import address_of, needs_key
from edgepipe.gateway.endpoints import Handler
from edgepipe.gateway.engine_types import RoutedModel
from edgepipe.gateway.models import ModelTable
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.request_ring import RequestRing
from edgepipe.gateway.streams import EventStream, StreamTimeouts
from edgepipe.gateway.turns import Turns
from edgepipe.gateway.ui.bodies import AnswerBody, InviteBody
from edgepipe.gateway.ui.connecting import programs_json
from edgepipe.gateway.ui.feed import PageFeed
from edgepipe.gateway.ui.files import INDEX, PageFiles
from edgepipe.gateway.ui.inviting import Inviting, log_events
from edgepipe.gateway.ui.managing import Managing, managed, read_action
from edgepipe.gateway.ui.paths import FILES, wants_page
from edgepipe.gateway.ui.requests import RequestsTopic
from edgepipe.gateway.ui.steps import follow_steps
from edgepipe.gateway.ui.topic import Topic, event
from edgepipe.security.mutual_tls import Security

MOST_STREAMS = 16  # streams of a gateway; a stream costs some milliseconds of each second
MOST_STREAMS_OF_A_CLIENT = 4  # browsers allow six connections to a host


class Page:
    """Handlers of the page. ``feed`` is what its streams send."""

    def __init__(
        self,
        *,
        feed: PageFeed,
        models: ModelTable,
        managing: Managing,
        requests: RequestRing,
        security: Security,
        turns: Turns,
        timeouts: StreamTimeouts,
    ) -> None:
        self.feed = feed
        self._models = models
        self._managing = managing
        self._requests = requests
        self._security = security
        self._inviting = Inviting()
        self._files = PageFiles()
        self._turns = turns
        self._timeouts = timeouts
        self._streams: Counter[str] = Counter()  # open streams of each client

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
            Route("/ui/log", managed(self._log), methods=["GET"]),
            Route("/ui/invite", managed(self._invite), methods=["POST"]),
            Route("/ui/invite/answer", managed(self._answer), methods=["POST"]),
            *self._managing.routes(),
        ]

    async def _file(self, request: Request) -> Response:
        answer = self._files.answer(request, request.path_params["name"])
        if answer is None:
            raise HTTPException(404)
        return answer

    async def _events(self, request: Request) -> Response:
        """``GET /ui/events``: the present state, and each change. ``?requests=MODEL`` adds requests and steps."""
        model = request.query_params.get("requests")
        return self._stream(request, self.feed.events() if model is None else self._with_requests(model))

    async def _with_requests(self, model: str) -> AsyncGenerator[bytes]:
        """Yield the events of a stream that shows the requests, and the steps of one model's engine."""
        found: list[dict[str, Any]] = []
        steps = Topic("steps", lambda: found.pop() if found else None, newest=False)
        news = asyncio.Event()

        def tell(trace: dict[str, Any]) -> None:
            found[:] = [trace]  # a slow reader gets the newest steps only
            steps.version += 1
            news.set()

        following = asyncio.create_task(
            follow_steps(lambda: self._served(model), self._security, tell=tell), name="page:steps"
        )
        try:
            async with aclosing(self.feed.events(RequestsTopic(self._requests), steps, news=news)) as events:
                async for each in events:
                    yield each
        finally:
            following.cancel()

    def _served(self, model: str) -> RoutedModel | None:
        try:
            return self._models.get(model).served
        except EdgepipeError:
            return None

    async def _log(self, request: Request) -> Response:
        """``GET /ui/log``: the lines of this node's log."""
        return self._stream(request, log_events(self._managing.admin))

    async def _invite(self, request: Request) -> Response:
        """``POST /ui/invite``: open a pairing window until the client leaves."""
        body = await read_action(request, InviteBody)
        return self._stream(request, self._inviting.events(self._managing.admin, body.role))

    async def _answer(self, request: Request) -> Response:
        """``POST /ui/invite/answer``: let the waiting machine in, or refuse it."""
        body = await read_action(request, AnswerBody)
        self._inviting.answer(accept=body.accept)
        return JSONResponse({})

    async def _connect(self, request: Request) -> Response:
        """``GET /ui/connect?model=NAME``: what programs need to use the model. Raises ModelUnknown."""
        served = self._models.get(request.query_params.get("model")).served
        return JSONResponse(
            programs_json(
                base_url=f"{request.url.scheme}://{request.headers['host']}",
                model=served.name,
                context_length=served.context_length,
                needs_key=needs_key(request),
            )
        )

    def _stream(self, request: Request, events: AsyncGenerator[bytes]) -> EventStream:
        return EventStream(
            events,
            opening=(),
            on_error=_error,
            place=self._place(address_of(request.scope.get("client"))),
            timeouts=self._timeouts,
            turns=self._turns,
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
    return event("error", {"what": error.what, "fact": error.fact, "next_step": error.next_step})
