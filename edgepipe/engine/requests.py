"""The engine's record of a request: a copy of its gateway's log, and how much of it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from sys import getsizeof

from edgepipe.ids import NodeId, RequestId, RequestKey, SequenceId
from edgepipe.sampling import LogprobLog, PromptLogprobs, SamplingParams, TokenLogprobs
from edgepipe.sampling.logprobs import logprob_bytes
from edgepipe.wire.requests import Ending, EngineNews, Submission
from edgepipe.wire.sizes import ENDING_BYTES, ID_BYTES, logprobs_bytes

_MAX_NEWS = 16_384  # choices of one gateway with unsent news, 2 KB each: far more than an engine admits


# Upper bounds of a request's memory in an engine; tests measure them.
REQUEST_BYTES = 4096
CHOICE_BYTES = 6144  # including the scheduler's record
PROMPT_TOKEN_BYTES = 48  # an integer and its slot in the prompt
CHOICE_TOKEN_BYTES = 24  # the scheduler's copy for each choice, and its share of the block key
OUTPUT_TOKEN_BYTES = 72  # an integer, its slots here and in the scheduler, and its share of the block key
_BIAS_BYTES = 160


def submission_bytes(submission: Submission) -> int:
    """Return an upper bound of a request's memory in an engine before its first output token."""
    sampling = submission.sampling
    return (
        REQUEST_BYTES
        + CHOICE_BYTES * submission.num_choices
        + known_bytes(submission)
        + OUTPUT_TOKEN_BYTES * sum(map(len, submission.generated))
        + _BIAS_BYTES * len(sampling.logit_bias)
        + (getsizeof(sampling.grammar.text) if sampling.grammar is not None else 0)
        + (logprob_bytes(sampling.top_logprobs) * len(submission.prompt) if sampling.prompt_logprobs else 0)
    )


def known_bytes(submission: Submission) -> int:
    """Return the part for the prompt and the continued output, which is freed when the request ends."""
    prompt_token_bytes = PROMPT_TOKEN_BYTES + CHOICE_TOKEN_BYTES * submission.num_choices
    return prompt_token_bytes * len(submission.prompt) + PROMPT_TOKEN_BYTES * sum(map(len, submission.generated))


@dataclass(slots=True, eq=False)
class Choice:
    """One of a request's token streams."""

    request: Request
    index: int
    sequence: SequenceId
    log: list[int]  # output tokens by position, including those of earlier attempts
    sent: int  # tokens of the log sent over the current stream
    wanted: int | None = None  # output position at which it was cancelled
    ending: Ending | None = None
    reported: bool = False  # the ending was sent over the current stream
    logprobs: LogprobLog = field(default_factory=LogprobLog)  # scores of the last tokens: all that this engine sampled
    prompt_logprobs: LogprobLog = field(default_factory=LogprobLog)  # scores of the prompt from its second token on
    prompt_sent: int = 0  # prompt log-probabilities sent over the current stream
    prompt_read: int = 0  # prompt tokens computed so far, not yet reported; 0: nothing to report
    crashes: int = 0  # crashed steps that counted against it
    grammar_waits: int = 0  # times that its grammar was not ready
    cached_prompt_tokens: int | None = None  # found in the prefix cache before it first waited for its grammar
    furthest: int = 0  # prompt tokens computed so far, in any epoch
    before: int = 0  # ``position`` at the beginning of the epoch
    begun: bool = False  # the epoch computes it
    is_scored: bool = field(init=False)  # its request asked for log-probabilities

    def __post_init__(self) -> None:
        sampling = self.request.submission.sampling
        self.is_scored = sampling.logprobs or sampling.prompt_logprobs

    @property
    def position(self) -> int:
        """Return how far it ever was: tokens computed, prompt and output. Lost positions count, too."""
        return len(self.request.submission.prompt) + len(self.log) if self.log else self.furthest

    @property
    def sampling(self) -> SamplingParams:
        """The request's parameters. Only the first choice computes the shared prompt's log-probabilities."""
        sampling = self.request.submission.sampling
        if sampling.prompt_logprobs and self.index:
            return replace(sampling, prompt_logprobs=False)
        return sampling

    @property
    def has_news(self) -> bool:
        """Whether its gateway wants something now: its end, its first token or what comes before, a group of tokens."""
        unsent = len(self.log) - self.sent
        return self.ending is not None or not self.sent or unsent >= self.request.submission.group_tokens

    def add_prompt_logprobs(self, part: PromptLogprobs) -> None:
        """Append the next part; drop what a recomputed prompt repeats, and what the request did not ask for."""
        if not self.sampling.prompt_logprobs:
            return
        known = len(self.prompt_logprobs) + 1 - part.position
        left = len(self.request.submission.prompt) - 1 - len(self.prompt_logprobs)
        if known >= 0:
            self.prompt_logprobs.extend(map(self._clipped, part.tokens[known : known + left]))

    def add(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Append the next output token."""
        self.log.append(token_id)
        if logprobs is not None:
            self.logprobs.append(self._clipped(logprobs))

    def logprobs_of(self, start: int, end: int) -> list[TokenLogprobs]:
        """Return log-probabilities of the log's tokens ``[start, end)``, without those of an earlier attempt."""
        given = len(self.log) - len(self.logprobs)
        return self.logprobs[max(0, start - given) : max(0, end - given)] if self.logprobs else []

    def _clipped(self, logprobs: TokenLogprobs) -> TokenLogprobs:
        most = self.request.submission.sampling.top_logprobs
        return logprobs if len(logprobs.top) <= most else TokenLogprobs(logprobs.logprob, logprobs.top[:most])


@dataclass(slots=True, eq=False)
class Request:
    """One request of a gateway, with all its choices."""

    key: RequestKey
    submission: Submission
    choices: list[Choice] = field(default_factory=list[Choice])
    held_bytes: int = 0  # upper bound of its memory in this engine
    token_bytes: int = field(init=False)  # additional bytes per output token
    stream: GatewayStream | None = None  # None: the stream broke and was not yet resumed
    expiry: asyncio.TimerHandle | None = None  # set only while there is no stream
    suspected: bool = False  # epochs ended before it got further

    def __post_init__(self) -> None:
        sampling = self.submission.sampling
        self.token_bytes = OUTPUT_TOKEN_BYTES + (logprob_bytes(sampling.top_logprobs) if sampling.logprobs else 0)

    @property
    def attempt(self) -> int:
        """Number of the gateway's attempt."""
        return self.submission.attempt

    @property
    def ended(self) -> bool:
        """Whether all choices ended."""
        return all(choice.ending is not None for choice in self.choices)

    @property
    def is_further(self) -> bool:
        """Whether a choice got further in the epoch than in any earlier one."""
        return any(choice.position > choice.before for choice in self.choices)

    def attach(self, stream: GatewayStream | None) -> None:
        """Send further results over this stream; None: keep them."""
        self.stream = stream
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


class GatewayStream:
    """Unsent results for one gateway.

    The stream has no queue: it marks choices with news and reads their logs when the gateway can take more. So a slow
    gateway gets larger messages, up to PACKED_BYTES each, and costs no memory beyond the logs.
    """

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self._loop = asyncio.get_running_loop()
        self._waits_since_s = 0.0  # time on the loop's clock when the gateway last read, or had nothing to read
        self._abandoned = False
        self._news: dict[Choice, None] = {}  # marked choices, in the order of marking
        self._wake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._closed = False

    @property
    def abandoned(self) -> bool:
        """Whether the stream was abandoned."""
        return self._abandoned

    @property
    def stalled_s(self) -> float:
        """Seconds since the gateway last read although results wait."""
        return self._loop.time() - self._waits_since_s if self._news else 0.0

    def mark(self, choice: Choice) -> None:
        """Mark a choice that has tokens or an ending to send."""
        if self._abandoned or choice in self._news:
            return
        if not self._news:
            self._waits_since_s = self._loop.time()
            self._flushed.clear()
            self._wake.set()
        self._news[choice] = None
        if len(self._news) > _MAX_NEWS:
            self.abandon()

    def drop(self, request: Request) -> None:
        """Send nothing more of a request."""
        for choice in request.choices:
            self._news.pop(choice, None)

    def close(self) -> None:
        """End the stream once all results are sent."""
        self._closed = True
        self._wake.set()

    def abandon(self) -> None:
        """End the stream now, since its gateway reads nothing. A live gateway resumes over a new stream."""
        self._abandoned = True
        self._news.clear()
        self.close()

    async def flush(self) -> None:
        """Wait until all marked results were passed to the connection."""
        await self._flushed.wait()

    async def events(self) -> AsyncGenerator[EngineNews]:
        """Yield results as they arrive, packed into messages, until ``close``."""
        while True:
            while self._news:
                if (news := self._take()) is not None:
                    yield news
            self._flushed.set()
            if self._closed:
                return
            self._wake.clear()
            await self._wake.wait()

    def _take(self) -> EngineNews | None:
        """Pack news of the choices marked first, up to PACKED_BYTES; None if other streams took over all of them.

        Each call reports something or unmarks all choices, so ``events`` cannot go round without a message.
        """
        self._waits_since_s = self._loop.time()
        packed = EngineNews()
        for choice in list(self._news):
            if choice.request.stream is self and not _pack(choice, packed):
                self._news[choice] = self._news.pop(choice)  # its rest follows the other choices' news
                break
            del self._news[choice]  # sent, or its gateway resumed it over another stream
        if packed.empty and self._news:
            raise RuntimeError("a choice has news that fit into no message")
        return None if packed.empty else packed


def _pack(choice: Choice, packed: EngineNews) -> bool:
    """Add a choice's news in order: prompt, tokens, ending. Return False if they did not all fit."""
    if choice.ending is None and not choice.prompt_read and not choice.is_scored:  # almost all news
        return _pack_tokens(choice, packed)
    return (
        (not choice.prompt_read or _pack_read(choice, packed))
        and (not choice.prompt_logprobs or _pack_prompt(choice, packed))
        and _pack_tokens(choice, packed)
        and (choice.ending is None or _pack_ending(choice, packed))
    )


def _pack_read(choice: Choice, packed: EngineNews) -> bool:
    if not choice.log:
        if not packed.reserve(1, ID_BYTES):
            return False
        packed.add_prompt_read(*_name(choice), num_tokens=choice.prompt_read)
    choice.prompt_read = 0
    return True


def _pack_prompt(choice: Choice, packed: EngineNews) -> bool:
    start, known = choice.prompt_sent, len(choice.prompt_logprobs)
    end = start + packed.reserve(known - start, _logprobs_bytes(choice))
    if start < end:
        part = PromptLogprobs(position=1 + start, tokens=tuple(choice.prompt_logprobs[start:end]))
        packed.add_prompt_scores(*_name(choice), part=part)
        choice.prompt_sent = end
    return end == known


def _pack_tokens(choice: Choice, packed: EngineNews) -> bool:
    start, known = choice.sent, len(choice.log)
    scored = choice.is_scored and bool(choice.logprobs)
    end = start + packed.reserve(known - start, ID_BYTES + (_logprobs_bytes(choice) if scored else 0))
    if start < end:
        logprobs = choice.logprobs_of(start, end) if scored else ()
        request = choice.request
        packed.add_tokens(
            request.key.request_id,
            request.attempt,
            choice.index,
            position=start,
            ids=choice.log[start:end],
            logprobs=logprobs,
        )
        choice.sent = end
    return end == known


def _pack_ending(choice: Choice, packed: EngineNews) -> bool:
    if choice.ending is None or choice.reported:
        return True
    if not packed.reserve(1, ENDING_BYTES):
        return False
    packed.add_ending(*_name(choice), ending=choice.ending)
    choice.reported = True
    return True


def _name(choice: Choice) -> tuple[RequestId, int, int]:
    """Return request id, attempt and choice index."""
    return choice.request.key.request_id, choice.request.attempt, choice.index


def _logprobs_bytes(choice: Choice) -> int:
    return logprobs_bytes(choice.request.submission.sampling.top_logprobs)
