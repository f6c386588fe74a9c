"""Messages about requests between gateways and engines, as values, and their conversion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgepipe.errors import EdgepipeError, RemoteProtocolError
from edgepipe.ids import Epoch, PipelineId, RequestId
from edgepipe.sampling import PromptLogprobs, SamplingParams, TokenLogprobs
from edgepipe.wire.bounds import check_numbers
from edgepipe.wire.codec import to_wire, value_of
from edgepipe.wire.common import Hello, epoch_to_wire, hello_from_wire, hello_to_wire
from edgepipe.wire.errors import error_to_wire
from edgepipe.wire.sampling import logprobs_from_wire, logprobs_to_wire, sampling_from_wire, sampling_to_wire
from edgepipe.wire.sizes import HEAD_BYTES, PACKED_BYTES
from edgepipe.wire.v1 import engine_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request of a gateway. A higher attempt replaces lower ones."""

    request_id: RequestId
    attempt: int = 1
    prompt: tuple[int, ...]
    num_choices: int = 1
    generated: tuple[tuple[int, ...], ...] = ()  # output of earlier attempts per choice; never sampled again
    max_tokens: int = 0  # output tokens per choice, including ``generated``; 0: up to the context length
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParams
    priority: int = 0  # 0 interactive, 1 batch
    # The engine sends output tokens in groups of so many; the first token comes at once, the last ones with the end.
    # 0: each step's tokens come at once.
    group_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancellation:
    """Ends a choice at output position ``at_position``."""

    request_id: RequestId
    attempt: int = 1
    choice: int = 0
    at_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Resumes a request after a broken stream, after ``have`` output tokens of each choice."""

    request_id: RequestId
    attempt: int = 1
    have: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a choice."""

    reason: str  # "stop" | "length" | "cancelled" | "error"
    num_tokens: int  # output tokens of the choice
    error: EdgepipeError | None = None
    cached_prompt_tokens: int = 0  # prompt tokens found in the prefix cache


GatewayCommand = Submission | Cancellation | Resumption


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensArrived:
    """Tokens of one choice from output position ``position`` on."""

    request_id: RequestId
    attempt: int
    choice: int
    position: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per id if the request asked for them


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens from the absolute ``position`` on."""

    request_id: RequestId
    attempt: int
    choice: int
    position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRead:
    """Number of computed prompt tokens. A late or lost report has no effect."""

    request_id: RequestId
    attempt: int
    choice: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnded:
    """End of a choice; each choice has exactly one."""

    request_id: RequestId
    attempt: int
    choice: int
    reason: str  # "stop" | "length" | "cancelled" | "error"
    num_tokens: int  # output tokens of the choice
    cached_prompt_tokens: int = 0
    error: EdgepipeError | None = None


EngineReport = TokensArrived | PromptScored | PromptRead | ChoiceEnded


def command_to_wire(command: GatewayCommand) -> engine_pb2.GatewayMessage:
    """Convert a gateway's command for an engine."""
    if isinstance(command, Submission):
        return engine_pb2.GatewayMessage(submit=_submission_to_wire(command))
    if isinstance(command, Cancellation):
        return engine_pb2.GatewayMessage(cancel=to_wire(command, engine_pb2.Cancel))
    return engine_pb2.GatewayMessage(resume=to_wire(command, engine_pb2.Resume))


def submission_from_wire(message: engine_pb2.Submit) -> Submission:
    """Convert a received request. Raises RequestInvalid for invalid sampling parameters, and RemoteProtocolError."""
    check_numbers(message)
    return Submission(
        request_id=RequestId(message.request_id),
        attempt=message.attempt,
        prompt=tuple(message.prompt),
        num_choices=message.num_choices or 1,
        generated=tuple(tuple(choice.ids) for choice in message.generated),
        max_tokens=message.max_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=frozenset(message.stop_token_ids),
        sampling=sampling_from_wire(message.sampling),
        priority=message.priority,
        group_tokens=message.group_tokens,
    )


def opening_hello(message: engine_pb2.GatewayMessage) -> Hello:
    """Return the hello that begins a gateway's stream. Raises RemoteProtocolError for any other message."""
    if message.WhichOneof("message") != "hello":
        raise RemoteProtocolError("the gateway sent a request before its hello")
    return hello_from_wire(message.hello)


def welcome_to_wire(hello: Hello, *, pipeline_id: PipelineId, epoch: Epoch) -> engine_pb2.EngineEvent:
    """Make the engine's first message on a gateway's stream."""
    return engine_pb2.EngineEvent(
        welcome=engine_pb2.Welcome(hello=hello_to_wire(hello), pipeline_id=pipeline_id, epoch=epoch_to_wire(epoch))
    )


class EngineNews:
    """Builder of one message to a gateway: results of its requests, up to PACKED_BYTES."""

    __slots__ = ("_room_bytes", "message")

    def __init__(self) -> None:
        self.message = engine_pb2.EngineEvent()
        self._room_bytes = PACKED_BYTES

    @property
    def empty(self) -> bool:
        """Whether nothing has reserved room."""
        return self._room_bytes == PACKED_BYTES

    def reserve(self, count: int, each_bytes: int) -> int:
        """Reserve room for up to ``count`` items of one result. Return how many fit."""
        left_bytes = self._room_bytes - HEAD_BYTES
        if count * each_bytes > left_bytes:
            count = left_bytes // each_bytes
        if count <= 0:
            return 0
        self._room_bytes = left_bytes - count * each_bytes
        return count

    def add_prompt_read(self, request_id: RequestId, attempt: int, choice: int, *, num_tokens: int) -> None:
        """Add the number of computed prompt tokens."""
        self.message.prompt_reads.add(request_id=request_id, attempt=attempt, choice=choice, num_tokens=num_tokens)

    def add_prompt_scores(self, request_id: RequestId, attempt: int, choice: int, *, part: PromptLogprobs) -> None:
        """Add log-probabilities of a part of the prompt."""
        self.message.prompt_scores.add(
            request_id=request_id,
            attempt=attempt,
            choice=choice,
            position=part.position,
            logprobs=[logprobs_to_wire(each) for each in part.tokens],
        )

    def add_tokens(
        self,
        request_id: RequestId,
        attempt: int,
        choice: int,
        *,
        position: int,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Add tokens of a choice from output position ``position`` on; ``logprobs``: one per id, or empty."""
        made = self.message.tokens.add(
            request_id=request_id, attempt=attempt, choice=choice, position=position, ids=ids
        )
        if logprobs:
            made.logprobs.extend([logprobs_to_wire(each) for each in logprobs])

    def add_ending(self, request_id: RequestId, attempt: int, choice: int, *, ending: Ending) -> None:
        """Add the ending of a choice."""
        self.message.ended.add(
            request_id=request_id,
            attempt=attempt,
            choice=choice,
            reason=ending.reason,
            num_tokens=ending.num_tokens,
            error=None if ending.error is None else error_to_wire(ending.error),
            cached_prompt_tokens=ending.cached_prompt_tokens,
        )


def reports_from_wire(event: engine_pb2.EngineEvent) -> Iterator[EngineReport]:
    """Yield an engine's reports on requests, in order. Raises RemoteProtocolError."""
    check_numbers(event)
    for read in event.prompt_reads:
        yield value_of(read, PromptRead)
    for scores in event.prompt_scores:
        yield value_of(scores, PromptScored)
    for tokens in event.tokens:  # written by hand, since this runs for every token: a third faster
        yield TokensArrived(
            request_id=RequestId(tokens.request_id),
            attempt=tokens.attempt,
            choice=tokens.choice,
            position=tokens.position,
            ids=tuple(tokens.ids),
            logprobs=tuple(map(logprobs_from_wire, tokens.logprobs)),
        )
    for ended in event.ended:
        yield value_of(ended, ChoiceEnded)


def _submission_to_wire(submission: Submission) -> engine_pb2.Submit:
    return engine_pb2.Submit(
        request_id=submission.request_id,
        attempt=submission.attempt,
        prompt=submission.prompt,
        num_choices=submission.num_choices,
        generated=[engine_pb2.Generated(ids=ids) for ids in submission.generated],
        max_tokens=submission.max_tokens,
        ignore_eos=submission.ignore_eos,
        stop_token_ids=sorted(submission.stop_token_ids),
        sampling=sampling_to_wire(submission.sampling),
        priority=submission.priority,
        group_tokens=submission.group_tokens,
    )
