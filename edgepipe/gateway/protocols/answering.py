"""Runs a prepared completion and answers in the shape of the client's protocol, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from edgepipe.gateway.bodies import BodyReader
from edgepipe.gateway.completion_service import CompletionService, PreparedCompletion
from edgepipe.gateway.pieced import PiecedAnswers
from edgepipe.gateway.problems import from_error
from edgepipe.gateway.protocols.shape import GatheredChoice, Shape
from edgepipe.gateway.schema import RequestBody
from edgepipe.gateway.streams import EventStream, until_disconnect
from edgepipe.gateway.text import Delta
from edgepipe.gateway.turns import Turns

RequestT = TypeVar("RequestT", bound=RequestBody)
_PRIORITY_HEADER = "x-edgepipe-priority"  # interactive | batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """What the handlers of every protocol need to read a request, run it and answer it."""

    service: CompletionService
    bodies: BodyReader
    answers: PiecedAnswers

    async def answer(self, request: Request, prepared: PreparedCompletion, shape: Shape, *, streams: bool) -> Response:
        """Run the completion and answer in ``shape``."""
        deltas = self.service.run(prepared)
        if streams:
            return EventStream(
                _events(deltas, shape, self.answers.turns),
                opening=shape.opening(),
                on_error=lambda error: shape.error(from_error(error)),
                place=prepared.ticket,
                timeouts=self.answers.timeouts,
                turns=self.answers.turns,
                news=prepared.news,
                pause=shape.pause,
                media_type=shape.media_type,
            )
        with ExitStack() as stack:
            stack.enter_context(prepared.ticket)
            choices = await until_disconnect(request, gather(deltas, prepared.completion.num_choices))
            return self.answers.of(shape.whole(choices), place=stack.pop_all())


def prioritised(body: RequestT, request: Request) -> RequestT:
    """Return the body with the priority that a header sets, for clients that cannot send ``service_tier``."""
    if request.headers.get(_PRIORITY_HEADER, "").lower() == "batch":
        return body.model_copy(update={"service_tier": "batch"})
    return body


async def gather(deltas: AsyncGenerator[Delta], num_choices: int) -> list[GatheredChoice]:
    """Return the whole choices of a completion. Raises the engine's error."""
    choices = [GatheredChoice() for _ in range(num_choices)]
    async with aclosing(deltas):
        async for delta in deltas:
            choices[delta.choice].add(delta)
    return choices


async def _events(deltas: AsyncGenerator[Delta], shape: Shape, turns: Turns) -> AsyncGenerator[bytes]:
    """Yield the events of an answer. The shape makes a piece when the stream has sent the one before."""
    async with aclosing(deltas):
        async for delta in deltas:
            for place, part in enumerate(shape.delta(delta)):
                yield part
                if place or not part.endswith(b"\n"):
                    await turns.take()
    yield shape.ending()
