"""A gateway in virtual time: clients that ask and leave, their logs, a stream to the engine that breaks and resumes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from edgepipe.engine.requests import Choice, GatewayStream
from edgepipe.engine.table import RequestTable
from edgepipe.gateway.log import RequestLog
from edgepipe.ids import NodeId, RequestId
from edgepipe.sampling import SamplingParams
from edgepipe.wire.requests import Cancellation, Resumption, Submission
from tests.support.engine.simulated_stage import VOCAB, next_token

_BREAK_CHANCE = 0.04  # chance that the stream is lost with what is on it


class _Stream(GatewayStream):
    """What the engine marks for a gateway; told when the simulation lets a message through."""

    def __init__(self, node_id: NodeId) -> None:
        super().__init__(node_id)
        self.marked: dict[Choice, None] = {}

    def mark(self, choice: Choice) -> None:
        self.marked[choice] = None


@dataclass(slots=True)
class _Client:
    """A request with its gateway's log: the only truth."""

    submission: Submission
    log: RequestLog
    reasons: dict[int, str] = field(default_factory=dict[int, str])  # why each choice ended
    attempt: int = 1
    left: bool = False

    @property
    def ended(self) -> bool:
        return len(self.reasons) == self.log.num_choices

    def cancellation(self, choice: int) -> Cancellation:
        """Where the log stands."""
        return Cancellation(
            request_id=self.submission.request_id,
            attempt=self.attempt,
            choice=choice,
            at_position=len(self.log.tokens(choice)),
        )


class SimulatedGateway:
    """Draws what is asked of an engine's table and keeps what comes back."""

    def __init__(self, random: random.Random, *, note: Callable[[str], None]) -> None:
        self.to_ask = random.randint(1, 4)
        self.resumed = 0  # times that the stream broke
        self._random = random
        self._note = note
        self._clients: dict[RequestId, _Client] = {}
        self._stream = _new_stream()

    @property
    def done(self) -> bool:
        """Whether all has been asked and all has ended."""
        return not self.to_ask and all(client.ended for client in self._clients.values())

    def ask(self, table: RequestTable) -> None:
        """A client comes with a request."""
        self.to_ask -= 1
        submission = self._draw_submission()
        self._note(f"asked {submission.request_id}: {submission.max_tokens} tokens x {submission.num_choices}")
        log = RequestLog(num_choices=submission.num_choices, max_tokens=submission.max_tokens)
        self._clients[submission.request_id] = _Client(submission, log)
        table.submit(self._stream, submission)

    def leave(self, table: RequestTable) -> None:
        """A client goes away: every choice of it is cancelled where it stands."""
        client = self._random.choice(list(self._clients.values()))
        if client.left:
            return
        client.left = True
        self._note(f"left {client.submission.request_id}")
        for choice in range(client.log.num_choices):
            if choice not in client.reasons:
                client.reasons[choice] = "left"
                table.cancel(self._stream, client.cancellation(choice))

    def take_news(self, table: RequestTable, *, may_break: bool) -> bool:
        """The engine's news arrive. False if they were lost with the stream, which is resumed then."""
        marked, self._stream.marked = list(self._stream.marked), {}
        if marked and self._random.random() < _BREAK_CHANCE and may_break:
            self._resume(table)
            return False
        for choice in marked:
            if choice.request.stream is self._stream:
                self._take(choice)
        return True

    def ask_again(self, table: RequestTable) -> None:
        """The engine is another one and knows nothing: it is asked with what the logs hold."""
        self._stream = _new_stream()
        for client in self._clients.values():
            if not client.ended:
                self._submit_again(client, table)

    def check(self, *, num_stages: int, max_tokens: int) -> None:
        """Every token of every answer is right, and every answer ended for a reason. Raises AssertionError."""
        for client in self._clients.values():
            for choice in range(client.log.num_choices):
                _check_tokens(client, choice, num_stages)
                _check_ending(client, choice, max_tokens)

    def _draw_submission(self) -> Submission:
        draw = self._random
        shared = [7] * 9 if draw.random() < 0.5 else []
        return Submission(
            request_id=RequestId(f"request-{len(self._clients)}"),
            prompt=(*shared, *(draw.randrange(VOCAB) for _ in range(draw.randint(1, 12)))),
            num_choices=draw.choice((1, 1, 2)),
            max_tokens=draw.randint(1, 14),
            ignore_eos=True,
            stop_token_ids=frozenset(draw.sample(range(VOCAB), draw.choice((0, 0, 6)))),
            sampling=SamplingParams(temperature=0.0),
            group_tokens=draw.choice((0, 0, 4)),
        )

    def _take(self, choice: Choice) -> None:
        client = self._clients[choice.request.key.request_id]
        if choice.request.attempt != client.attempt:
            return
        ids, position = choice.log[choice.sent :], choice.sent
        choice.sent = len(choice.log)
        if choice.index in client.reasons:
            return
        client.log.append(choice=choice.index, position=position, ids=ids)
        if choice.ending is not None and not choice.reported:
            choice.reported = True
            assert choice.ending.error is None, f"{choice.request.key.request_id} failed: {choice.ending.error}"
            assert len(client.log.tokens(choice.index)) == choice.ending.num_tokens
            client.reasons[choice.index] = choice.ending.reason

    def _resume(self, table: RequestTable) -> None:
        """The stream to the engine breaks; what was on it is lost."""
        self._note("the gateway's stream breaks and is resumed")
        self.resumed += 1
        table.detach(self._stream)
        self._stream = _new_stream()
        for client in self._clients.values():
            if not client.ended:
                resumption = Resumption(
                    request_id=client.submission.request_id, attempt=client.attempt, have=tuple(client.log.have())
                )
                table.resume(self._stream, resumption)

    def _submit_again(self, client: _Client, table: RequestTable) -> None:
        client.attempt += 1
        generated = tuple(tuple(client.log.tokens(choice)) for choice in range(client.log.num_choices))
        table.submit(self._stream, replace(client.submission, attempt=client.attempt, generated=generated))
        for choice, reason in client.reasons.items():  # those that ended before are wanted no further
            if reason == "left":
                table.cancel(self._stream, client.cancellation(choice))


def _new_stream() -> _Stream:
    return _Stream(NodeId("gateway"))


def _check_tokens(client: _Client, choice: int, num_stages: int) -> None:
    name, first = client.submission.request_id, client.submission
    ids = list(client.log.tokens(choice))
    for count in range(len(ids)):
        right = next_token([*first.prompt, *ids[:count]], num_stages)
        assert ids[count] == right, f"{name}, choice {choice}, position {count}: {ids[count]} instead of {right}"
    assert not first.stop_token_ids & set(ids[:-1]), f"{name} went on behind a stop id"


def _check_ending(client: _Client, choice: int, max_tokens: int) -> None:
    name, first = client.submission.request_id, client.submission
    ids, reason = client.log.tokens(choice), client.reasons[choice]
    if reason == "stop":
        assert ids[-1] in first.stop_token_ids, f"{name} stopped for nothing"
    elif reason == "length":
        assert len(ids) == min(first.max_tokens, max_tokens - len(first.prompt)), f"{name} is short"
    else:
        assert client.left, f"{name} ended with {reason}"
