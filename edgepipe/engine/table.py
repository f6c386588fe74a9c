"""All requests of all gateways: their owners, tokens and unsent results."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from edgepipe.engine.grammar_waits import GrammarWaits
from edgepipe.engine.progress import EpochProgress
from edgepipe.engine.pump import StepNews
from edgepipe.engine.requests import Choice, GatewayStream, Request, known_bytes, submission_bytes
from edgepipe.engine.settings import MOST_CRASHES, SUSPECTED_CRASHES, EngineLimits, EngineTimeouts
from edgepipe.errors import (
    EdgepipeError,
    GrammarNotReady,
    PeerClosed,
    QueueFull,
    RemoteProtocolError,
    RequestInvalid,
)
from edgepipe.ids import RequestId, RequestKey, SequenceId
from edgepipe.sampling import SamplingParams, TokenLogprobs
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.scheduler import Event, SequenceSpec, TokenSampled
from edgepipe.spec.facts import ModelConfig
from edgepipe.wire.intake import MAX_CHOICES, check_submission
from edgepipe.wire.registrations import Registration, registration_bytes
from edgepipe.wire.requests import Cancellation, Ending, Resumption, Submission

logger = logging.getLogger(__name__)

_NO_LOGPROBS: Mapping[SequenceId, Sequence[TokenLogprobs]] = MappingProxyType({})
_NOTHING: Iterator[TokenLogprobs] = iter(())
_FLYING = frozenset({"auto", "model"})  # what drafts may come from for windows in flight: see ``Registration.draft``


class Queue(Protocol):
    """Computes sequences during one epoch."""

    def submit(self, specs: Sequence[SequenceSpec], *, accepted: bool = False) -> list[Event]:
        """Queue sequences: all or none. Raises PromptTooLong, QueueFull (unless ``accepted``), or the epoch's error."""
        ...

    def cancel(self, sequence: SequenceId, *, at_position: int) -> list[Event]:
        """End a sequence at output position ``at_position``, at once if it is reached."""
        ...


class RequestTable:
    """Receives requests from gateways, submits their sequences, and marks results to send.

    Requests are keyed by (gateway's node, request id). A higher attempt replaces a lower one. Runs on one event loop.
    """

    def __init__(self, *, config: ModelConfig, limits: EngineLimits, timeouts: EngineTimeouts, draft: str = "") -> None:
        """Starts without an epoch; see ``attach``. ``draft``: see ``Registration``."""
        self._config = config
        self._draft = draft
        self._bounds = ModelBounds(vocab_size=config.vocab_size, context_length=config.context_length)
        self._queue: Queue | None = None  # set while an epoch serves
        self._refusal: EdgepipeError | None = None  # why requests are refused
        self._limits = limits
        self._timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        self._requests: dict[RequestKey, Request] = {}
        self._choices: dict[SequenceId, Choice] = {}  # choices that have not ended
        self._waits = GrammarWaits(self._begin_again)
        self._finished: OrderedDict[RequestKey, float] = OrderedDict()  # time to forget each request, ascending
        self._forget_timer: asyncio.TimerHandle | None = None
        self._sequences = 0
        self._held_bytes = 0  # bytes that all requests hold
        self._held_back: list[Request] = []  # suspected requests that the epoch computes later, one by one
        self._on_trial: Request | None = None  # the suspected request that the epoch computes
        self._sampled = False  # the epoch sampled a token

    def attach(self, queue: Queue) -> None:
        """Continue all requests in a new epoch, from their tokens so far."""
        self._queue, self._refusal, self._sampled = queue, None, False
        self._waits.close()
        for request in self._requests.values():
            for choice in request.choices:
                choice.before, choice.begun = choice.position, False
        self._held_back = [request for request in self._requests.values() if request.suspected and not request.ended]
        self._on_trial = self._held_back.pop(0) if self._held_back else None
        for request in [each for each in self._requests.values() if each not in self._held_back]:
            self._continue(request, queue)

    def _continue(self, request: Request, queue: Queue) -> None:
        waiting = [choice for choice in request.choices if choice.ending is None]
        try:
            self.note(queue.submit([self._spec(choice) for choice in waiting], accepted=True))
        except EdgepipeError as error:  # the new pipeline holds less
            for choice in waiting:
                self._end(choice, Ending(reason="error", num_tokens=len(choice.log), error=error))
            return
        for choice in waiting:
            if choice.wanted is not None and choice.ending is None:
                self.note(queue.cancel(choice.sequence, at_position=choice.wanted))

    def pause(self) -> None:
        """Leave the ended epoch. The table accepts and keeps requests until the next one."""
        self._queue = None

    def progress(self) -> EpochProgress:
        """Return the progress of the epoch that serves, or has just ended, for requests that have not ended."""
        running = [request for request in self._requests.values() if not request.ended]
        begun = [request for request in running if any(map(self._is_computed, request.choices))]
        further = [request for request in begun if request.is_further]
        return EpochProgress(
            further=self._sampled or bool(further),
            stalled=frozenset(request.key for request in begun if not request.is_further),
            waiting=frozenset(request.key for request in running) - frozenset(request.key for request in begun),
        )

    def _is_computed(self, choice: Choice) -> bool:
        """Return whether the epoch computes a choice. One that waits for its grammar is not to blame for the end."""
        return choice.begun and choice not in self._waits

    def suspect(self, requests: Collection[RequestKey]) -> None:
        """Compute these requests one by one from the next epoch on; no others are suspected."""
        for request in self._requests.values():
            request.suspected = request.key in requests

    def refuse_one(self, key: RequestKey, error: EdgepipeError) -> None:
        """End one request with ``error``."""
        if (request := self._requests.get(key)) is not None:
            logger.error("request=%s refused: %s", key.request_id, error)
            self._end_all(request, error)

    def refuse_all(self, error: EdgepipeError) -> None:
        """End all requests with ``error``, and refuse new ones until the next epoch."""
        self._refusal = error
        self.fail_all(error)

    def requests_of(self, sequences: Iterable[SequenceId]) -> frozenset[RequestKey]:
        """Return the requests of these sequences that have not ended."""
        return frozenset(choice.request.key for choice in self._running(sequences))

    def is_guilty(self, sequences: Sequence[SequenceId]) -> bool:
        """Return whether a crash of a step with these sequences proves guilt: one sequence, at its third crash."""
        return len(sequences) == 1 and any(choice.crashes + 1 >= MOST_CRASHES for choice in self._running(sequences))

    def accuse(self, sequences: Sequence[SequenceId], error: EdgepipeError) -> None:
        """Count a crashed step against its sequences.

        After its second crash a sequence is computed alone; if that crashes, its request is refused with ``error``.
        """
        guilty = self.is_guilty(sequences)
        for choice in self._running(sequences):
            choice.crashes += 1
            if guilty:
                key = choice.request.key
                logger.error("request=%s refused: %d of its steps failed", key.request_id, choice.crashes)
                self._end_all(choice.request, error)

    def acquit(self, requests: Iterable[RequestKey]) -> None:
        """Forget the crashes of these requests, because a stage was at fault."""
        for key in requests:
            if (request := self._requests.get(key)) is not None:
                for choice in request.choices:
                    choice.crashes = 0

    def _running(self, sequences: Iterable[SequenceId]) -> list[Choice]:
        return [choice for sequence in sequences if (choice := self._choices.get(sequence)) is not None]

    def _end_all(self, request: Request, error: EdgepipeError) -> None:
        for choice in request.choices:
            if choice.ending is None:
                self._end(choice, Ending(reason="error", num_tokens=len(choice.log), error=error))

    def submit(self, stream: GatewayStream, submission: Submission) -> None:
        """Take a new request or a new attempt. An invalid one gets an ending with its error."""
        key = RequestKey(stream.node_id, submission.request_id)
        known = self._requests.get(key)
        if known is not None and known.attempt > submission.attempt:
            return  # the gateway drops tokens of this old attempt
        if known is not None and known.attempt == submission.attempt:
            self._attach(known, stream, have=[len(ids) for ids in submission.generated])
            return
        if known is not None:
            self._drop(known)
        request = Request(key, submission, stream=stream, held_bytes=submission_bytes(submission))
        count = min(submission.num_choices, MAX_CHOICES)  # more are refused below
        request.choices = [self._new_choice(request, index) for index in range(count)]
        self._requests[key] = request
        self._start(request)

    def cancel(self, stream: GatewayStream, cancellation: Cancellation) -> None:
        """End a choice at a position. Ignores unknown and ended choices."""
        request = self._requests.get(RequestKey(stream.node_id, cancellation.request_id))
        if request is None or request.attempt != cancellation.attempt:
            return
        if cancellation.choice < len(request.choices):
            choice = request.choices[cancellation.choice]
            if choice.sequence in self._choices:
                self._cancel(choice, cancellation.at_position)
                self._end_trial()

    def resume(self, stream: GatewayStream, resumption: Resumption) -> None:
        """Resume a request after its stream broke, after the tokens that the gateway has."""
        request = self._requests.get(RequestKey(stream.node_id, resumption.request_id))
        if request is not None and request.attempt == resumption.attempt:
            self._attach(request, stream, have=resumption.have)
            return
        error = _forgotten(self._timeouts.resume_s)
        self.refuse(stream, resumption.request_id, resumption.attempt, len(resumption.have), error)

    def refuse(
        self, stream: GatewayStream, request_id: RequestId, attempt: int, num_choices: int, error: EdgepipeError
    ) -> None:
        """End every choice of a refused request with ``error``."""
        submission = Submission(
            request_id=request_id, attempt=attempt, prompt=(), sampling=SamplingParams(temperature=0.0)
        )
        request = Request(RequestKey(stream.node_id, request_id), submission, stream=stream)
        count = min(max(1, num_choices), MAX_CHOICES)
        request.choices = [self._new_choice(request, index) for index in range(count)]
        self._refuse(request, error)

    def note_step(self, news: StepNews) -> None:
        """Record a retired step's results: tokens, log-probabilities, failed sequences."""
        for sequence, part in news.prompts:
            if (choice := self._choices.get(sequence)) is not None:
                choice.add_prompt_logprobs(part)
                self._mark(choice)
        for sequence, num_tokens in news.reads:
            choice = self._choices.get(sequence)
            if choice is None or choice.log:
                continue
            choice.furthest = max(choice.furthest, num_tokens)
            if not choice.index:  # choices share their prompt
                choice.prompt_read = num_tokens
                self._mark(choice)
        self.note(news.events, news.logprobs)
        for sequence, error in news.failures.items():
            choice = self._choices.get(sequence)
            if choice is None:
                continue
            if choice.cached_prompt_tokens is None:
                choice.cached_prompt_tokens = news.cached.get(sequence)
            if not (isinstance(error, GrammarNotReady) and self._wait(choice)):
                self._end(choice, Ending(reason="error", num_tokens=len(choice.log), error=error))
        self._end_trial()

    def _end_trial(self) -> None:
        """Once the request on trial got further or ended, acquit it and try the next suspected request."""
        while self._on_trial is not None and self._queue is not None:
            if self._is_running(self._on_trial) and not self._on_trial.is_further:
                return
            self._on_trial.suspected = False
            self._held_back = [each for each in self._held_back if self._is_running(each)]
            self._on_trial = self._held_back.pop(0) if self._held_back else None
            if self._on_trial is not None:
                self._continue(self._on_trial, self._queue)

    def _is_running(self, request: Request) -> bool:
        return self._requests.get(request.key) is request and not request.ended

    def note(
        self, events: Iterable[Event], logprobs: Mapping[SequenceId, Sequence[TokenLogprobs]] = _NO_LOGPROBS
    ) -> None:
        """Record the scheduler's events and mark their choices for sending.

        ``logprobs``: of each sequence's tokens in ``events``, in their order.
        """
        given = {sequence: iter(scores) for sequence, scores in logprobs.items()} if logprobs else {}
        for event in events:
            choice = self._choices.get(event.sequence)
            if choice is None:
                continue  # belongs to a replaced attempt
            if isinstance(event, TokenSampled):
                if event.position != len(choice.log):
                    raise RuntimeError(f"position {event.position} was sampled, {len(choice.log)} is next")
                scores, request = None, choice.request
                if choice.is_scored and request.submission.sampling.logprobs:
                    scores = next(given.get(event.sequence, _NOTHING), None)
                    if scores is None:
                        self._fail(choice, RemoteProtocolError("the last stage left out a token's log-probabilities"))
                        continue
                choice.add(event.token_id, scores)
                self._sampled = True
                if choice.crashes >= SUSPECTED_CRASHES:
                    choice.crashes = 0  # it was alone in this step, which retired
                choice.grammar_waits = 0
                self._hold(request, request.token_bytes)
                if request.stream is not None and choice.has_news:
                    request.stream.mark(choice)
            else:
                known = choice.cached_prompt_tokens  # a sequence that begins again would count its own prompt
                cached = event.cached_prompt_tokens if known is None else known
                ending = Ending(reason=event.reason.value, num_tokens=event.num_tokens, cached_prompt_tokens=cached)
                self._end(choice, ending)
        if self._held_bytes > self._limits.max_held_bytes:
            self._shed()

    def registration(self, sequence: SequenceId, tokens: Sequence[int]) -> Registration:
        """Return the registration of a sequence that a step begins (again).

        ``tokens``: all known ones, prompt and output; the log here may lack the newest.
        """
        choice = self._choices[sequence]
        choice.begun = True
        submission = choice.request.submission
        sampling, prompt_tokens = choice.sampling, len(submission.prompt)
        return Registration(
            sequence=sequence,
            sampling=sampling,
            choice=choice.index,
            prompt_tokens=prompt_tokens,
            prompt=submission.prompt if sampling.prompt_logprobs or self._draft else (),
            seen=tuple(sorted(set(submission.prompt))) if sampling.penalises_prompt else (),
            generated=tuple(tokens[prompt_tokens:]) if sampling.needs_output or self._draft else (),
            end_ids=tuple(sorted(self._stop_ids(submission))) if sampling.min_tokens else (),
            draft=self._draft,
        )

    def detach(self, stream: GatewayStream) -> None:
        """Keep the requests of a broken stream for ``resume_s``, so that the gateway can resume them, then cancel."""
        for request in list(self._requests.values()):
            if request.stream is stream:
                request.attach(None)
                if not request.ended:
                    request.expiry = self._loop.call_later(self._timeouts.resume_s, self._drop, request)

    def fail_all(self, error: EdgepipeError) -> None:
        """End all running requests with ``error``."""
        for choice in list(self._choices.values()):
            self._end(choice, Ending(reason="error", num_tokens=len(choice.log), error=error))

    def close(self) -> None:
        """Drop all requests and timers."""
        self._waits.close()
        for request in self._requests.values():
            request.attach(None)
        self._requests.clear()
        self._choices.clear()
        self._finished.clear()
        self._held_bytes = 0
        if self._forget_timer is not None:
            self._forget_timer.cancel()
            self._forget_timer = None

    def _start(self, request: Request) -> None:
        try:
            check_submission(request.submission, self._bounds)
            if self._refusal is not None:
                raise self._refusal.changed()
            specs = [self._spec(choice) for choice in request.choices]
            self._make_room(request)
            events = self._queue.submit(specs) if self._queue is not None else self._keep(specs)
        except EdgepipeError as error:
            error = error.changed(request_id=error.request_id or request.key.request_id)
            del self._requests[request.key]
            if request.stream is not None:
                self.refuse(request.stream, request.key.request_id, request.attempt, len(request.choices), error)
            return
        self._held_bytes += request.held_bytes
        self._choices.update((choice.sequence, choice) for choice in request.choices)
        self.note(events)

    def _wait(self, choice: Choice) -> bool:
        """Let a choice wait for its grammar, as another sequence: the stages have forgotten this one."""
        del self._choices[choice.sequence]
        self._sequences += 1
        choice.sequence = SequenceId(self._sequences)
        self._choices[choice.sequence] = choice
        if choice.wanted is not None and len(choice.log) >= choice.wanted:
            self._end(choice, Ending(reason="cancelled", num_tokens=len(choice.log)))
            return True
        return self._waits.hold(choice)

    def _begin_again(self, choice: Choice) -> None:
        """Submit a choice that has waited for its grammar. Without an epoch, the next one takes it."""
        if self._queue is None:
            return
        try:
            self.note(self._queue.submit([self._spec(choice)], accepted=True))
        except EdgepipeError as error:
            self._end(choice, Ending(reason="error", num_tokens=len(choice.log), error=error))
            return
        if choice.wanted is not None and choice.ending is None:
            self.note(self._queue.cancel(choice.sequence, at_position=choice.wanted))

    def _keep(self, specs: Sequence[SequenceSpec]) -> list[Event]:
        """Check that sequences may wait for the next epoch. Raises QueueFull."""
        most = self._limits.max_running + self._limits.max_waiting
        if len(self._choices) + len(specs) > most:
            raise QueueFull(
                fact=f"{len(self._choices)} sequences wait for the pipeline to recover, at most {most} may",
                next_step="try again in some seconds",
            )
        return []

    def _make_room(self, request: Request) -> None:
        """Forget finished requests if memory is short; raise QueueFull if that does not suffice.

        A further attempt gets the higher limit, since its request was accepted before.
        """
        most = self._limits.max_new_bytes if request.attempt == 1 else self._limits.max_held_bytes
        while self._finished and self._held_bytes + request.held_bytes > most:
            self._forget(next(iter(self._finished)))
        if self._held_bytes + request.held_bytes > most:
            raise QueueFull(
                "the running and waiting requests take too much memory together",
                fact=f"they take {self._held_bytes >> 20} MiB of the engine's memory, this one "
                f"{request.held_bytes / (1 << 20):.1f}; {most >> 20} MiB are the most",
                next_step="try again in some seconds, or send a shorter prompt",
            )

    def _shed(self) -> None:
        """Free memory when outputs have grown too large: forget finished requests, then end the youngest."""
        most = self._limits.max_held_bytes
        while self._finished and self._held_bytes > most:
            self._forget(next(iter(self._finished)))
        for request in reversed(list(self._requests.values())):
            if self._held_bytes <= most:
                return
            stream = request.stream
            self._drop(request)
            if stream is not None:
                error = QueueFull(
                    "the running requests take too much memory together",
                    fact=f"they take more than {most >> 20} MiB of the engine's memory, and this one came last",
                    next_step="send the request again later, or ask for fewer tokens",
                    request_id=request.key.request_id,
                )
                stream.drop(request)
                self.refuse(stream, request.key.request_id, request.attempt, len(request.choices), error)

    def _fail(self, choice: Choice, error: EdgepipeError) -> None:
        if self._queue is not None:
            self._queue.cancel(choice.sequence, at_position=0)
        self._end(choice, Ending(reason="error", num_tokens=len(choice.log), error=error))

    def _hold(self, request: Request, more_bytes: int) -> None:
        request.held_bytes += more_bytes
        self._held_bytes += more_bytes

    def _cancel(self, choice: Choice, at_position: int) -> None:
        choice.wanted = at_position if choice.wanted is None else min(choice.wanted, at_position)
        if self._queue is not None and choice not in self._waits and choice.request not in self._held_back:
            self.note(self._queue.cancel(choice.sequence, at_position=at_position))
        elif len(choice.log) >= at_position:
            self._end(choice, Ending(reason="cancelled", num_tokens=len(choice.log)))

    def _refuse(self, request: Request, error: EdgepipeError) -> None:
        error.__traceback__ = error.__context__ = None  # the frames hold the prompt
        for choice in request.choices:
            choice.ending = Ending(reason="error", num_tokens=len(choice.log), error=error)
            self._mark(choice)

    def _spec(self, choice: Choice) -> SequenceSpec:
        submission = choice.request.submission
        base_bytes, token_bytes = registration_bytes(
            choice.sampling,
            prompt_tokens=len(submission.prompt),
            vocab_size=self._config.vocab_size,
            drafts=bool(self._draft),
        )
        return SequenceSpec(
            sequence=choice.sequence,
            prompt=submission.prompt,
            generated=tuple(choice.log),
            max_tokens=submission.max_tokens or None,
            stop_ids=self._stop_ids(submission),
            priority=submission.priority,
            reuse_prefix=not choice.sampling.prompt_logprobs,
            alone=choice.crashes >= SUSPECTED_CRASHES,
            may_fly=self._draft in _FLYING and not choice.sampling.needs_output,
            registration_base_bytes=base_bytes,
            registration_token_bytes=token_bytes,
        )

    def _stop_ids(self, submission: Submission) -> frozenset[int]:
        return submission.stop_token_ids.union(() if submission.ignore_eos else self._config.eos_token_ids)

    def _new_choice(self, request: Request, index: int) -> Choice:
        self._sequences += 1
        generated = request.submission.generated
        log = list(generated[index]) if index < len(generated) else []
        return Choice(request, index, SequenceId(self._sequences), log, sent=len(log))

    def _attach(self, request: Request, stream: GatewayStream, *, have: Sequence[int]) -> None:
        """Send a request's results over ``stream``, after the tokens that the gateway claims to have.

        A request whose gateway claims tokens that this engine does not have ends with RequestInvalid.
        """
        if fact := _claims_too_much(request, have):
            self._drop(request)
            error = RequestInvalid("the request cannot be resumed", fact=fact, next_step="send the request again")
            self.refuse(stream, request.key.request_id, request.attempt, len(request.choices), error)
            return
        request.attach(stream)
        for choice in request.choices:
            choice.sent = have[choice.index] if choice.index < len(have) else 0
            choice.reported = False
            choice.prompt_sent = 0
            self._mark(choice)

    def _mark(self, choice: Choice) -> None:
        if choice.request.stream is not None and choice.has_news:
            choice.request.stream.mark(choice)

    def _end(self, choice: Choice, ending: Ending) -> None:
        choice.ending = ending
        self._waits.drop(choice)
        del self._choices[choice.sequence]
        self._mark(choice)
        request = choice.request
        if request.ended:
            request.attach(request.stream)  # cancels its expiry: its result is kept like any other
            self._keep_result(request)
            self._finished[request.key] = self._loop.time() + self._timeouts.resume_s
            self._forget_old()

    def _drop(self, request: Request) -> None:
        """Cancel a request without an answer and drop its results."""
        request.attach(None)
        for choice in request.choices:
            self._waits.drop(choice)
            if self._choices.pop(choice.sequence, None) is not None and self._queue is not None:
                self._queue.cancel(choice.sequence, at_position=0)
        self._finished.pop(request.key, None)
        if self._requests.pop(request.key, None) is not None:
            self._held_bytes -= request.held_bytes
        self._end_trial()

    def _keep_result(self, request: Request) -> None:
        """Keep an ended request's output for a gateway that resumes; drop its prompt."""
        self._hold(request, -known_bytes(request.submission))
        request.submission = replace(request.submission, prompt=(), generated=())

    def _forget(self, key: RequestKey) -> None:
        """Drop an ended request's result, and its stream if the gateway does not read it."""
        del self._finished[key]
        request = self._requests.pop(key)
        self._held_bytes -= request.held_bytes
        if request.stream is not None and request.stream.stalled_s > self._timeouts.resume_s:
            request.stream.abandon()

    def _forget_old(self) -> None:
        """Drop expired results and the oldest beyond the limit. Set the timer for the next expiry."""
        now_s = self._loop.time()
        while self._finished:
            key, until_s = next(iter(self._finished.items()))
            if until_s > now_s and len(self._finished) <= self._limits.max_finished:
                break
            self._forget(key)
        if self._finished and self._forget_timer is None:
            self._forget_timer = self._loop.call_at(next(iter(self._finished.values())), self._on_forget_timer)

    def _on_forget_timer(self) -> None:
        self._forget_timer = None
        self._forget_old()


def _claims_too_much(request: Request, have: Sequence[int]) -> str:
    """Compare a gateway's claim of received tokens with the logs; return the first excess, or an empty text."""
    if len(have) > len(request.choices):
        return f"its gateway has tokens of {len(have)} choices, the request has {len(request.choices)}"
    for choice, count in zip(request.choices, have, strict=False):
        if count > len(choice.log):
            return f"its gateway has {count} tokens of choice {choice.index}, this engine has {len(choice.log)}"
    return ""


def _forgotten(resume_s: float) -> PeerClosed:
    return PeerClosed(
        "the engine no longer has the request",
        fact=f"results are kept for {resume_s:.0f} s after their stream breaks",
        next_step="send the request again",
    )
