"""All requests of all gateways: who asked, what came, who still waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from edgepipe.engine.pump import StepNews
from edgepipe.engine.requests import Choice, GatewayStream, Request, known_bytes, submission_bytes
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.errors import EdgepipeError, PeerClosed, QueueFull, RemoteProtocolError
from edgepipe.ids import RequestId, RequestKey, SequenceId
from edgepipe.model.facts import ModelConfig
from edgepipe.sampling import SamplingParams, TokenLogprobs
from edgepipe.sampling.bounds import ModelBounds
from edgepipe.scheduler import Event, SequenceSpec, TokenSampled
from edgepipe.wire.intake import MAX_CHOICES, check_submission
from edgepipe.wire.plans import Registration, registration_bytes
from edgepipe.wire.requests import Cancellation, Ending, Resumption, Submission

logger = logging.getLogger(__name__)

_NO_LOGPROBS: Mapping[SequenceId, TokenLogprobs] = MappingProxyType({})
_SUSPECTED, _MOST_CRASHES = 2, 3  # steps of a sequence that could not be computed: it runs alone, it is refused


class Queue(Protocol):
    """Where sequences are computed, for as long as an epoch lasts."""

    def submit(self, specs: Sequence[SequenceSpec], *, accepted: bool = False) -> list[Event]:
        """Queue sequences: all or none. Raises PromptTooLong, QueueFull (not for those accepted before), or why
        nothing can be computed now."""
        ...

    def cancel(self, sequence: SequenceId, *, at_position: int) -> list[Event]:
        """Output is wanted up to ``at_position`` and no further."""
        ...


class RequestTable:
    """Takes what gateways send, hands sequences on, and marks what gateways are to be told.

    Requests are keyed by (gateway's node, request id); a higher attempt cancels a lower one. Runs on one event loop.
    """

    def __init__(self, *, config: ModelConfig, limits: EngineLimits, timeouts: EngineTimeouts) -> None:
        """No epoch stands at first: see ``attach``."""
        self._config = config
        self._bounds = ModelBounds(vocab_size=config.vocab_size, context_length=config.context_length)
        self._queue: Queue | None = None  # while an epoch stands
        self._refusal: EdgepipeError | None = None  # why none can
        self._limits = limits
        self._timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        self._requests: dict[RequestKey, Request] = {}
        self._choices: dict[SequenceId, Choice] = {}  # that have not ended
        self._finished: OrderedDict[RequestKey, float] = OrderedDict()  # when to forget, in order
        self._forget_timer: asyncio.TimerHandle | None = None
        self._sequences = 0
        self._held_bytes = 0  # by the requests above

    def attach(self, queue: Queue) -> None:
        """An epoch stands: what was asked before and meanwhile is computed there, from its tokens so far."""
        self._queue, self._refusal = queue, None
        for request in list(self._requests.values()):
            waiting = [choice for choice in request.choices if choice.ending is None]
            try:
                self.note(queue.submit([self._spec(choice) for choice in waiting], accepted=True))
            except EdgepipeError as error:  # the new pipeline holds less
                for choice in waiting:
                    self._end(choice, Ending(reason="error", num_tokens=len(choice.log), error=error))
                continue
            for choice in waiting:
                if choice.wanted is not None and choice.ending is None:
                    self.note(queue.cancel(choice.sequence, at_position=choice.wanted))

    def pause(self) -> None:
        """The epoch has ended. Requests are taken and kept until the next one."""
        self._queue = None

    def refuse_all(self, error: EdgepipeError) -> None:
        """No epoch can stand now: what waits ends with ``error``, and so does what comes until one can."""
        self._refusal = error
        self.fail_all(error)

    def requests_of(self, sequences: Iterable[SequenceId]) -> frozenset[RequestKey]:
        """The requests that these belong to, as far as they have not ended."""
        return frozenset(choice.request.key for choice in self._running(sequences))

    def is_guilty(self, sequences: Sequence[SequenceId]) -> bool:
        """Whether a step with these that cannot be computed proves its sequence guilty: it was alone in it, and it is
        the third one."""
        return len(sequences) == 1 and any(one.crashes + 1 >= _MOST_CRASHES for one in self._running(sequences))

    def accuse(self, sequences: Sequence[SequenceId], error: EdgepipeError) -> None:
        """Count a step that could not be computed against its sequences. After the second such step a sequence is
        computed alone; if that fails too, its request is refused with ``error``."""
        guilty = self.is_guilty(sequences)
        for choice in self._running(sequences):
            choice.crashes += 1
            if guilty:
                key = choice.request.key
                logger.error("request=%s refused: %d of its steps failed", key.request_id, choice.crashes)
                self._end_all(choice.request, error)

    def acquit(self, requests: Iterable[RequestKey]) -> None:
        """Forget the broken steps of these: a stage was at fault."""
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
        """A new request, or a new attempt at one. What cannot be is told as an ending with its error."""
        key = RequestKey(stream.node_id, submission.request_id)
        known = self._requests.get(key)
        if known is not None and known.attempt > submission.attempt:
            return  # its gateway has moved on, and drops tokens of that attempt
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
        """Wanted no further than a position. Unknown and ended choices are left alone."""
        request = self._requests.get(RequestKey(stream.node_id, cancellation.request_id))
        if request is None or request.attempt != cancellation.attempt:
            return
        if cancellation.choice < len(request.choices):
            choice = request.choices[cancellation.choice]
            if choice.sequence in self._choices:
                self._cancel(choice, cancellation.at_position)

    def resume(self, stream: GatewayStream, resumption: Resumption) -> None:
        """A stream broke; send what comes after the tokens that the gateway has."""
        request = self._requests.get(RequestKey(stream.node_id, resumption.request_id))
        if request is not None and request.attempt == resumption.attempt:
            self._attach(request, stream, have=resumption.have)
            return
        error = _forgotten(self._timeouts.resume_s)
        self.refuse(stream, resumption.request_id, resumption.attempt, len(resumption.have), error)

    def refuse(
        self, stream: GatewayStream, request_id: RequestId, attempt: int, num_choices: int, error: EdgepipeError
    ) -> None:
        """End every choice of a request that cannot be taken."""
        submission = Submission(
            request_id=request_id, attempt=attempt, prompt=(), sampling=SamplingParams(temperature=0.0)
        )
        request = Request(RequestKey(stream.node_id, request_id), submission, stream=stream)
        count = min(max(1, num_choices), MAX_CHOICES)
        request.choices = [self._new_choice(request, index) for index in range(count)]
        self._refuse(request, error)

    def note_step(self, news: StepNews) -> None:
        """What a step gave: tokens with what was asked beside them, and sequences that cannot go on."""
        for sequence, part in news.prompts:
            if (choice := self._choices.get(sequence)) is not None:
                choice.add_prompt_logprobs(part)
                self._mark(choice)
        for sequence, num_tokens in news.reads:
            choice = self._choices.get(sequence)
            if choice is not None and not (choice.index or choice.log):  # choices share their prompt
                choice.prompt_read = num_tokens
                self._mark(choice)
        for sequence, error in news.failures.items():
            if (choice := self._choices.get(sequence)) is not None:
                self._end(choice, Ending(reason="error", num_tokens=len(choice.log), error=error))
        self.note(news.events, news.logprobs)

    def note(self, events: Iterable[Event], logprobs: Mapping[SequenceId, TokenLogprobs] = _NO_LOGPROBS) -> None:
        """What the scheduler reports: log it, then mark it to be told."""
        for event in events:
            choice = self._choices.get(event.sequence)
            if choice is None:
                continue  # of an attempt that was replaced
            if isinstance(event, TokenSampled):
                if event.position != len(choice.log):
                    raise RuntimeError(f"position {event.position} was sampled, {len(choice.log)} is next")
                scores = logprobs.get(event.sequence)
                if scores is None and choice.request.submission.sampling.logprobs:
                    self._fail(choice, RemoteProtocolError("the last stage left out a token's log-probabilities"))
                    continue
                choice.add(event.token_id, scores)
                if choice.crashes >= _SUSPECTED:
                    choice.crashes = 0  # it was alone in this step, and the step came back
                self._hold(choice.request, choice.request.token_bytes)
                self._mark(choice)
            else:
                ending = Ending(
                    reason=event.reason.value,
                    num_tokens=event.num_tokens,
                    cached_prompt_tokens=event.cached_prompt_tokens,
                )
                self._end(choice, ending)
        if self._held_bytes > self._limits.max_held_bytes:
            self._shed()

    def registration(self, sequence: SequenceId, tokens: Sequence[int]) -> Registration:
        """How stages learn of a sequence that a step begins (again). ``tokens``: those known now, prompt and output;
        the log here may lack the newest."""
        choice = self._choices[sequence]
        submission = choice.request.submission
        sampling, prompt_tokens = choice.sampling, len(submission.prompt)
        return Registration(
            sequence=sequence,
            sampling=sampling,
            choice=choice.index,
            prompt_tokens=prompt_tokens,
            prompt=submission.prompt if sampling.prompt_logprobs else (),
            seen=tuple(sorted(set(submission.prompt))) if sampling.penalises_prompt else (),
            generated=tuple(tokens[prompt_tokens:]) if sampling.needs_output else (),
            end_ids=tuple(sorted(self._stop_ids(submission))) if sampling.min_tokens else (),
        )

    def detach(self, stream: GatewayStream) -> None:
        """The stream is gone. What it asked goes on for a while, for a gateway that resumes, and is cancelled then."""
        for request in list(self._requests.values()):
            if request.stream is stream:
                request.attach(None)
                if not request.ended:
                    request.expiry = self._loop.call_later(self._timeouts.resume_s, self._drop, request)

    def fail_all(self, error: EdgepipeError) -> None:
        """The epoch is over: what runs ends with ``error``."""
        for choice in list(self._choices.values()):
            self._end(choice, Ending(reason="error", num_tokens=len(choice.log), error=error))

    def close(self) -> None:
        """Forget everything, timers too."""
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
                raise _copy(self._refusal)
            specs = [self._spec(choice) for choice in request.choices]
            self._make_room(request)
            events = self._queue.submit(specs) if self._queue is not None else self._keep(specs)
        except EdgepipeError as error:
            error.request_id = error.request_id or request.key.request_id
            del self._requests[request.key]
            if request.stream is not None:
                self.refuse(request.stream, request.key.request_id, request.attempt, len(request.choices), error)
            return
        self._held_bytes += request.held_bytes
        self._choices.update((choice.sequence, choice) for choice in request.choices)
        self.note(events)

    def _keep(self, specs: Sequence[SequenceSpec]) -> list[Event]:
        """Room for sequences that wait for the next epoch. Raises QueueFull."""
        most = self._limits.max_running + self._limits.max_waiting
        if len(self._choices) + len(specs) > most:
            raise QueueFull(
                fact=f"{len(self._choices)} sequences wait for the pipeline to recover, at most {most} may",
                next_step="try again in some seconds",
            )
        return []

    def _make_room(self, request: Request) -> None:
        """Raise QueueFull if the memory for requests does not suffice, when finished ones are forgotten, too.

        What another attempt goes on with was taken before.
        """
        most = self._limits.max_new_bytes if request.attempt == 1 else self._limits.max_held_bytes
        while self._finished and self._held_bytes + request.held_bytes > most:
            self._forget(next(iter(self._finished)))
        if self._held_bytes + request.held_bytes > most:
            raise QueueFull(
                "the requests that run and wait are too large together",
                fact=f"they take {self._held_bytes >> 20} MiB of the engine's memory, this one "
                f"{request.held_bytes / (1 << 20):.1f}; {most >> 20} MiB are the most",
                next_step="try again in some seconds, or send a shorter prompt",
            )

    def _shed(self) -> None:
        """Outputs have become too large together: forget finished requests, then end the youngest."""
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
                    "the requests that run are too large together",
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
        if self._queue is not None:
            self.note(self._queue.cancel(choice.sequence, at_position=at_position))
        elif len(choice.log) >= at_position:
            self._end(choice, Ending(reason="cancelled", num_tokens=len(choice.log)))

    def _refuse(self, request: Request, error: EdgepipeError) -> None:
        error.__traceback__ = error.__context__ = None  # they hold the frames, and those the prompt
        for choice in request.choices:
            choice.ending = Ending(reason="error", num_tokens=len(choice.log), error=error)
            self._mark(choice)

    def _spec(self, choice: Choice) -> SequenceSpec:
        submission = choice.request.submission
        told_bytes, told_token_bytes = registration_bytes(
            choice.sampling, prompt_tokens=len(submission.prompt), vocab_size=self._config.vocab_size
        )
        return SequenceSpec(
            sequence=choice.sequence,
            prompt=submission.prompt,
            generated=tuple(choice.log),
            max_tokens=submission.max_tokens or None,
            stop_ids=self._stop_ids(submission),
            priority=submission.priority,
            reuse_prefix=not choice.sampling.prompt_logprobs,
            alone=choice.crashes >= _SUSPECTED,
            told_bytes=told_bytes,
            told_token_bytes=told_token_bytes,
        )

    def _stop_ids(self, submission: Submission) -> frozenset[int]:
        return submission.stop_token_ids.union(() if submission.ignore_eos else self._config.eos_token_ids)

    def _new_choice(self, request: Request, index: int) -> Choice:
        self._sequences += 1
        generated = request.submission.generated
        log = list(generated[index]) if index < len(generated) else []
        return Choice(request, index, SequenceId(self._sequences), log, sent=len(log))

    def _attach(self, request: Request, stream: GatewayStream, *, have: Sequence[int]) -> None:
        request.attach(stream)
        for choice in request.choices:
            choice.sent = have[choice.index] if choice.index < len(have) else 0
            choice.told = False
            choice.prompt_sent = 0
            self._mark(choice)

    def _mark(self, choice: Choice) -> None:
        if choice.request.stream is not None:
            choice.request.stream.mark(choice)

    def _end(self, choice: Choice, ending: Ending) -> None:
        choice.ending = ending
        del self._choices[choice.sequence]
        self._mark(choice)
        request = choice.request
        if request.ended:
            request.attach(request.stream)  # no expiry any more: its result is kept as long as every other
            self._keep_result(request)
            self._finished[request.key] = self._loop.time() + self._timeouts.resume_s
            self._forget_old()

    def _drop(self, request: Request) -> None:
        """Nobody wants it any more: cancel what runs, tell nobody, keep nothing."""
        request.attach(None)
        for choice in request.choices:
            if self._choices.pop(choice.sequence, None) is not None and self._queue is not None:
                self._queue.cancel(choice.sequence, at_position=0)
        self._finished.pop(request.key, None)
        if self._requests.pop(request.key, None) is not None:
            self._held_bytes -= request.held_bytes

    def _keep_result(self, request: Request) -> None:
        """An ended request is kept for gateways that resume: its output, and no longer its prompt."""
        self._hold(request, -known_bytes(request.submission))
        request.submission = replace(request.submission, prompt=(), generated=())

    def _forget(self, key: RequestKey) -> None:
        """Drop the result of a request, and the stream of a gateway that does not take it."""
        del self._finished[key]
        request = self._requests.pop(key)
        self._held_bytes -= request.held_bytes
        if request.stream is not None and request.stream.stalled_s > self._timeouts.resume_s:
            request.stream.abandon()

    def _forget_old(self) -> None:
        """Drop results whose time is over, and the oldest beyond the bound; look again when the next one's is."""
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


def _copy(error: EdgepipeError) -> EdgepipeError:
    """For one more request, whose id it will carry."""
    return type(error)(error.what, fact=error.fact, next_step=error.next_step, node=error.node, stage=error.stage)


def _forgotten(resume_s: float) -> PeerClosed:
    return PeerClosed(
        "the engine does not know the request any more",
        fact=f"results are kept for {resume_s:.0f} s after their stream breaks",
        next_step="send the request again",
    )
