"""A request as the engine keeps it: a cache of its gateway's log, and what has been sent of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import islice

from edgepipe.ids import NodeId, RequestKey, SequenceId
from edgepipe.sampling import PromptLogprobs, TokenLogprobs
from edgepipe.wire.requests import Ending, Submission, ending_to_wire, prompt_scores_to_wire, tokens_to_wire
from edgepipe.wire.v1 import engine_pb2

_MAX_CHOICES = 256  # told of in one message; what a resumed gateway lacks may be its whole context each


@dataclass(slots=True, eq=False)
class Choice:
    """One of a request's token streams."""

    request: Request
    index: int
    sequence: SequenceId
    log: list[int]  # output tokens by position, those of earlier attempts first
    sent: int  # of the log, over the stream in use
    wanted: int | None = None  # cancelled at this output position
    ending: Ending | None = None
    told: bool = False  # the ending, over the stream in use
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])  # by output position, if asked
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])  # from prompt position 1 on
    prompt_sent: int = 0  # of those, over the stream in use
    crashes: int = 0  # steps with it that could not be computed

    def add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """The next part; what a recomputed prompt gives again is dropped."""
        known = len(self.prompt_logprobs) + 1 - part.position
        if known >= 0:
            self.prompt_logprobs += part.tokens[known:]


@dataclass(slots=True, eq=False)
class Request:
    """What one gateway asked, with all its choices."""

    key: RequestKey
    submission: Submission
    choices: list[Choice] = field(default_factory=list[Choice])
    stream: GatewayStream | None = None  # None: it broke, and was not resumed yet
    expiry: asyncio.TimerHandle | None = None  # while there is no stream

    @property
    def attempt(self) -> int:
        """Which try of the gateway this is."""
        return self.submission.attempt

    @property
    def ended(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.ending is not None for choice in self.choices)

    def attach(self, stream: GatewayStream | None) -> None:
        """From now on results go there."""
        self.stream = stream
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


class GatewayStream:
    """What one gateway is yet to be told.

    Nothing is queued: a choice that has news is marked, and its log is read when the stream can take more. So a slow
    gateway gets larger messages, and costs no memory beyond the logs.
    """

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self._news: dict[Choice, None] = {}  # in order
        self._wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._closed = False

    def mark(self, choice: Choice) -> None:
        """The choice has tokens or an ending to tell."""
        self._news[choice] = None
        self._flushed.clear()
        self._wake.set()

    def close(self) -> None:
        """End the stream once everything is told."""
        self._closed = True
        self._wake.set()

    async def flush(self) -> None:
        """Wait until everything marked so far has been handed to the connection."""
        await self._flushed.wait()

    async def events(self) -> AsyncGenerator[engine_pb2.EngineEvent]:
        """Everything that is to be told, as it comes and what is there at once in one message; ends after ``close``."""
        while True:
            while self._news:
                if (event := self._take()) is not None:
                    yield event
            self._flushed.set()
            if self._closed:
                return
            self._wake.clear()
            await self._wake.wait()

    def _take(self) -> engine_pb2.EngineEvent | None:
        """The news of the choices marked first; None if another stream tells all of theirs."""
        event = engine_pb2.EngineEvent()
        for choice in list(islice(self._news, _MAX_CHOICES)):
            del self._news[choice]
            if choice.request.stream is self:  # else its gateway has resumed it over another stream
                _tell(choice, event)
        return event if event.tokens or event.ended or event.prompt_scores else None


def _tell(choice: Choice, event: engine_pb2.EngineEvent) -> None:
    request = choice.request
    name, attempt = request.key.request_id, request.attempt
    if choice.prompt_sent < len(choice.prompt_logprobs):
        tokens = tuple(choice.prompt_logprobs[choice.prompt_sent :])
        part = PromptLogprobs(position=1 + choice.prompt_sent, tokens=tokens)
        event.prompt_scores.append(prompt_scores_to_wire(name, attempt=attempt, choice=choice.index, part=part))
        choice.prompt_sent = len(choice.prompt_logprobs)
    if choice.sent < len(choice.log):
        positions = range(choice.sent, len(choice.log))
        event.tokens.append(
            tokens_to_wire(
                name,
                attempt=attempt,
                choice=choice.index,
                position=choice.sent,
                ids=choice.log[choice.sent :],
                logprobs=[choice.logprobs[each] for each in positions] if choice.logprobs else (),
            )
        )
        choice.sent = len(choice.log)
    if choice.ending is not None and not choice.told:
        event.ended.append(ending_to_wire(name, attempt=attempt, choice=choice.index, ending=choice.ending))
        choice.told = True
