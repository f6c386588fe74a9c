"""Runs one HTTP request through the engine: takes prompts, yields deltas of all choices."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from edgepipe.gateway.admission import Ticket
from edgepipe.gateway.answer_reader import AnswerFormat, AnswerReader
from edgepipe.gateway.answer_stops import answer_stops
from edgepipe.gateway.generation import Generation
from edgepipe.gateway.metrics import RequestMeter
from edgepipe.gateway.models import Assets, ModelEntry
from edgepipe.gateway.text import ChoiceText, Delta, parts_of
from edgepipe.gateway.thought_tokens import ThoughtTokens
from edgepipe.gateway.tool_calls import Scanned, call_id, joined_calls
from edgepipe.gateway.tool_names import ToolNames
from edgepipe.gateway.turns import Turns
from edgepipe.ids import PipelineId
from edgepipe.sampling import LogprobLog
from edgepipe.sampling.logprobs import logprob_bytes
from edgepipe.wire.requests import Submission

_TOKEN_BYTES = 64  # an integer, its references, its text
_TURN_TOKENS, _TURN_SCORES = 128, 512  # tokens, and those with their alternatives, read at once: some milliseconds
# Tokens of one message about a choice, for a reader of whole answers. An answer goes on until the gateway finds its
# stop string, so that groups are small where there is one.
_GROUP_TOKENS, _STOPPED_GROUP_TOKENS = 32, 8
_CHOICE_BYTES = 8192  # detokenizer, reader, the engine's link


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A checked and tokenised request. Choices are numbered prompt by prompt."""

    model: str
    requests: tuple[Submission, ...]  # one per prompt
    stops: tuple[str, ...]
    answer: AnswerFormat | None = None  # set: find reasoning and tool calls in the text
    only_scores: bool = False  # scores of the prompts only; hides the one token that engines always generate
    continues: bool = False  # the answer continues the prompt's text; in a chat it begins a new text

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts, each prompt counted once."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def held_bytes(self) -> int:
        """Estimated memory in this process before the first output token, in bytes."""
        sampling = self.requests[0].sampling
        grammar = len(sampling.grammar.text) if sampling.grammar is not None else 0
        scores = logprob_bytes(sampling.top_logprobs) if sampling.prompt_logprobs else 0
        return (_TOKEN_BYTES + scores) * self.num_prompt_tokens + _CHOICE_BYTES * self.num_choices + grammar

    @property
    def token_bytes(self) -> int:
        """Estimated memory per output token, in bytes; an unstreamed answer is held beside its log."""
        sampling = self.requests[0].sampling
        return 2 * (_TOKEN_BYTES + (logprob_bytes(sampling.top_logprobs) if sampling.logprobs else 0))

    @property
    def num_choices(self) -> int:
        """Number of choices of all prompts."""
        return sum(request.num_choices for request in self.requests)

    def in_groups(self) -> Completion:
        """Return the completion for a reader that wants whole answers only: tokens come from the engine in groups.

        A message of few tokens costs this process, which serves chats, too, as much as one of many.
        """
        group = _STOPPED_GROUP_TOKENS if self.stops else _GROUP_TOKENS
        return replace(self, requests=tuple(replace(request, group_tokens=group) for request in self.requests))

    def prompt_of(self, choice: int) -> int:
        """Return the index of the prompt that a choice answers."""
        return choice // self.requests[0].num_choices


@dataclass(slots=True, kw_only=True)
class Counts:
    """Token counts of a request so far: a function of the log."""

    completion_tokens: int = 0
    reasoning_tokens: int = 0  # part of the completion tokens
    cached_prompt_tokens: int = 0
    read_prompt_tokens: int = 0  # computed tokens of prompts that take several steps
    # The pipelines that computed each started prompt, the present one last.
    pipelines: list[Sequence[PipelineId]] = field(default_factory=list[Sequence[PipelineId]])
    # Scores of the prompts' tokens; the key is the prompt's index.
    prompt_logprobs: dict[int, LogprobLog] = field(default_factory=dict[int, LogprobLog])


@dataclass(slots=True, kw_only=True)
class _Track:
    """A running choice: the generation that feeds it, and its text so far."""

    generation: Generation
    prompt: int  # index
    choice: int  # index within the generation
    text: ChoiceText
    reader: AnswerReader | None
    names: ToolNames
    thoughts: ThoughtTokens

    @property
    def unread(self) -> bool:
        """Whether the log has tokens that the text lacks, or the request has failed: its error follows its tokens."""
        has_tokens = self.text.num_tokens < self.generation.log.num_tokens(self.choice)
        return has_tokens or (self.generation.failure is not None and not self.text.finished)


async def run_completion(
    completion: Completion,
    entry: ModelEntry,
    assets: Assets,
    counts: Counts,
    meter: RequestMeter,
    turns: Turns,
    ticket: Ticket,
) -> AsyncGenerator[Delta]:
    """Yield deltas of all choices as they become visible; the last delta of a choice has its finish reason.

    The engine gets a prompt when its part of the ticket starts. A reader that comes late gets what it missed in deltas
    of bounded size, with a turn of the loop in between. Raises the engine's error if a choice cannot be finished.
    Closing the generator stops the running choices.
    """
    most = min(_TURN_TOKENS, _TURN_SCORES // (1 + completion.requests[0].sampling.top_logprobs))
    unturned = 0  # tokens read since the last turn
    generations: list[Generation] = []
    running: list[_Track] = []
    with ExitStack() as stack:
        closings: dict[int, ExitStack] = {}  # things to close for each prompt with a running choice
        while running or len(generations) < len(completion.requests):
            await ticket.changed.wait()
            ticket.changed.clear()
            ticket.raise_refusal()
            for prompt in range(len(generations), ticket.num_started):
                closings[prompt] = stack.enter_context(ExitStack())
                opening = entry.link.open(completion.requests[prompt], changed=ticket.changed)
                generations.append(closings[prompt].enter_context(opening))
                counts.pipelines.append(generations[prompt].pipelines)
                counts.prompt_logprobs[prompt] = generations[prompt].log.prompt_logprobs
                running += _tracks(completion, prompt, generations[prompt], assets)
            counts.read_prompt_tokens = sum(each.num_read for each in generations)
            for track in running:
                before = track.text.num_tokens
                if (delta := _advance(track, counts, meter, most=most)) is not None:
                    for part in parts_of(_without_output(delta, counts) if completion.only_scores else delta):
                        yield part
                unturned += track.text.num_tokens - before
                if unturned >= most:
                    unturned = 0
                    await turns.take()
                if track.unread:
                    ticket.changed.set()
                if track.text.finished:
                    ticket.choice_ended(track.prompt)
            running = [track for track in running if not track.text.finished]
            for prompt in closings.keys() - {track.prompt for track in running}:
                closings.pop(prompt).close()


def _without_output(delta: Delta, counts: Counts) -> Delta:
    counts.completion_tokens = 0
    reason = None if delta.finish_reason is None else "length"
    return replace(delta, text="", ids=(), logprobs=(), finish_reason=reason)


def _tracks(completion: Completion, prompt: int, generation: Generation, assets: Assets) -> list[_Track]:
    tracks: list[_Track] = []
    num_choices = generation.request.num_choices
    for choice in range(num_choices):
        text = ChoiceText(
            prompt * num_choices + choice,
            new_detokenizer=partial(
                assets.new_detokenizer,
                keep=completion.answer.marks if completion.answer is not None else (),
                before=generation.request.prompt if completion.continues else (),
            ),
            stops=answer_stops(completion.stops, completion.answer),
            stop_token_ids=generation.request.stop_token_ids,
        )
        reader = _reader(completion, generation, choice)
        names = completion.answer.names if completion.answer is not None else ToolNames()
        thoughts = ThoughtTokens(inside=completion.answer is not None and completion.answer.in_reasoning)
        tracks.append(
            _Track(
                generation=generation,
                prompt=prompt,
                choice=choice,
                text=text,
                reader=reader,
                names=names,
                thoughts=thoughts,
            )
        )
    return tracks


def _reader(completion: Completion, generation: Generation, choice: int) -> AnswerReader | None:
    if completion.answer is None:
        return None
    request_id = generation.request.request_id
    return AnswerReader(completion.answer, new_id=lambda index: call_id(request_id, choice, index))


def _advance(track: _Track, counts: Counts, meter: RequestMeter, *, most: int) -> Delta | None:
    """Return the new part of one choice, of at most ``most`` tokens, or None.

    Raises the request's failure after all earlier tokens.
    """
    log = track.generation.log
    before = track.text.num_tokens
    ids = log.tokens(track.choice, start=before, end=before + most)
    is_all = before + len(ids) == log.num_tokens(track.choice)
    ending = track.generation.ending(track.choice) if is_all else None
    if not ids and ending is None:
        if track.generation.failure is not None:
            raise track.generation.failure
        return None
    delta = track.text.advance(ids, ending.reason if ending else None)
    count = track.text.num_tokens - before
    counts.completion_tokens += count
    if count:
        meter.tokens(delta.choice, count)
    if delta.stopped_at is not None:
        track.generation.cancel(track.choice, at_position=delta.stopped_at)
    if ending is not None and track.choice == 0:
        counts.cached_prompt_tokens += ending.cached_prompt_tokens
    if track.generation.request.sampling.logprobs:
        delta = replace(delta, logprobs=tuple(log.logprobs(track.choice, start=before, count=count)))
    if track.reader is not None:
        before_thoughts = track.thoughts.count
        delta = _read(delta, track.reader, track.names, track.thoughts)
        counts.reasoning_tokens += track.thoughts.count - before_thoughts
    if delta.finish_reason is not None:
        meter.choice_ended(delta.finish_reason)
    return delta


def _read(delta: Delta, reader: AnswerReader, names: ToolNames, thoughts: ThoughtTokens) -> Delta:
    """Move tool calls and reasoning from the delta's text to its calls, by the client's names, and its reasoning."""
    parts: list[Scanned] = []
    for text in delta.pieces:
        parts.append(reader.push(text))
        thoughts.add(parts[-1])
    if rest := delta.text[sum(map(len, delta.pieces)) :]:
        parts.append(reader.push(rest))
    reason = delta.finish_reason
    if reason is not None:
        parts.append(reader.finish(followed_by=delta.stopped_by or ("" if reason == "length" else None)))
        thoughts.finish()
        if reason == "stop" and reader.num_calls and not reader.in_call:
            reason = "tool_calls"
    found = joined_calls(call for part in parts for call in part.calls)
    return replace(
        delta,
        text="".join(part.content for part in parts),
        calls=tuple(replace(call, name=names.for_client(call.name)) for call in found),
        reasoning="".join(part.reasoning for part in parts),
        finish_reason=reason,
    )
