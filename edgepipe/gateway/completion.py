"""One HTTP request's way through the engine: prompts in, deltas of all its choices out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass

from edgepipe.errors import PromptTooLong, RequestInvalid
from edgepipe.gateway.generation import Generation
from edgepipe.gateway.models import Assets, ModelEntry
from edgepipe.gateway.text import ChoiceText, Delta
from edgepipe.wire.requests import Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a client asked for, checked and tokenised. Choices are numbered prompt by prompt."""

    model: str
    requests: tuple[Submission, ...]  # one per prompt
    stops: tuple[str, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return sum(request.num_choices for request in self.requests)


@dataclass(slots=True, kw_only=True)
class Counts:
    """Tokens of a request, for its usage: a function of the log."""

    completion_tokens: int = 0
    cached_prompt_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class _Track:
    """A choice on its way: which generation feeds it, and how far its text is."""

    generation: Generation
    choice: int  # within the generation
    text: ChoiceText


def limit_tokens(*, num_prompt_tokens: int, wanted: int | None, context_length: int) -> int:
    """Output tokens that a request gets: what it asks for, cut to what the context leaves. Raises PromptTooLong,
    RequestInvalid for an empty prompt."""
    if num_prompt_tokens == 0:
        raise RequestInvalid("the prompt is empty", next_step="send at least one token")
    left = context_length - num_prompt_tokens
    if left < 1:
        raise PromptTooLong(
            "the prompt is longer than the model's context",
            fact=f"it has {num_prompt_tokens} tokens; the context has {context_length}, one of them for the answer",
            next_step=f"shorten it by {1 - left} tokens",
        )
    return min(wanted, left) if wanted is not None else left


async def run_completion(
    completion: Completion, entry: ModelEntry, assets: Assets, counts: Counts
) -> AsyncGenerator[Delta]:
    """Deltas of all choices as they become visible; the last of each has its finish reason.

    Raises the engine's error when a choice cannot be finished. Closing the generator stops what still runs.
    """
    changed = asyncio.Event()
    with ExitStack() as stack:
        generations = [stack.enter_context(entry.link.open(r, changed=changed)) for r in completion.requests]
        tracks = _tracks(completion, generations, assets)
        while any(not track.text.finished for track in tracks):
            await changed.wait()
            changed.clear()
            for track in tracks:
                if not track.text.finished and (delta := _advance(track, counts)) is not None:
                    yield delta


def _tracks(completion: Completion, generations: list[Generation], assets: Assets) -> list[_Track]:
    tracks: list[_Track] = []
    for generation in generations:
        for choice in range(generation.request.num_choices):
            text = ChoiceText(
                len(tracks),
                new_detokenizer=assets.new_detokenizer,
                stops=completion.stops,
                stop_token_ids=generation.request.stop_token_ids,
            )
            tracks.append(_Track(generation=generation, choice=choice, text=text))
    return tracks


def _advance(track: _Track, counts: Counts) -> Delta | None:
    """What is new of one choice, or None. Raises the request's failure once everything before it was told."""
    ids = track.generation.log.tokens(track.choice, start=track.text.num_tokens)
    ending = track.generation.ending(track.choice)
    if not ids and ending is None:
        if track.generation.failure is not None:
            raise track.generation.failure
        return None
    before = track.text.num_tokens
    delta = track.text.advance(ids, ending.reason if ending else None)
    counts.completion_tokens += track.text.num_tokens - before
    if delta.stopped_at is not None:
        track.generation.cancel(track.choice, at_position=delta.stopped_at)
    if ending is not None and track.choice == 0:
        counts.cached_prompt_tokens += ending.cached_prompt_tokens
    return delta
