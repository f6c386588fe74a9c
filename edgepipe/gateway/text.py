"""Converts token ids to visible text: incremental detokenising and stop strings. No I/O."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from edgepipe.gateway.tool_calls import CallDelta
from edgepipe.sampling import TokenLogprobs

MAX_PART_CHARS = 16 << 10  # longest text of a delta that ``parts_of`` yields


class TokenDecoder(Protocol):
    """Turns one choice's ids into text as they arrive. ``edgepipe.text.detokenizer`` implements it."""

    def add(self, token: int) -> str:
        """Add a token. Return the text that it completes; empty within a character."""
        ...

    def finish(self) -> str:
        """Return the rest of the text, with replacements for invalid bytes."""
        ...


class Stops(Protocol):
    """Finds the first stop string of one choice. ``StopMatcher``, and ``answer_stops`` for chats, implement it."""

    def push(self, piece: str) -> tuple[str, str]:
        """Return text that is now safe to show, and the stop string that ended it (not shown), or ""."""
        ...

    def finish(self) -> tuple[str, str]:
        """Return the text held back, at the end of the text, and the stop string that ended it, or ""."""
        ...


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces; see Stops.

    The result does not depend on the pieces: the match that ends first wins, and of several that end together the
    longest. The matcher holds back text that may still become a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(stops)  # those that begin alike lie side by side
        self._held = ""

    def push(self, piece: str) -> tuple[str, str]:
        """See Stops."""
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, start = min(found)
            return text[:start], text[start:end]
        keep = self._may_continue(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def finish(self) -> tuple[str, str]:
        """See Stops. The text held back is no stop string."""
        held, self._held = self._held, ""
        return held, ""

    def _may_continue(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that begins a stop string. No stop string is in ``text``."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            end = text[-size:]
            place = bisect_left(self._stops, end)
            if place < len(self._stops) and self._stops[place].startswith(end):
                return size
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New visible part of one choice."""

    choice: int
    text: str
    ids: tuple[int, ...]
    pieces: tuple[str, ...] = ()  # the shown text of each id; the rest of the text follows it
    finish_reason: str | None = None  # "stop" | "length" | "tool_calls" in the last delta
    stopped_at: int | None = None  # number of kept tokens, if a stop string ended the choice in the gateway
    stopped_by: str = ""  # the stop string of ``stopped_at``
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per id if the request asked for them
    calls: tuple[CallDelta, ...] = ()  # pieces of tool calls
    reasoning: str = ""


def parts_of(delta: Delta) -> Iterator[Delta]:
    """Yield the delta in parts with texts of at most MAX_PART_CHARS each; the last one has all the rest.

    A reader may hold a long text back, such as a call's arguments, and release it at once.
    """
    if not delta.calls and max(len(delta.text), len(delta.reasoning)) <= MAX_PART_CHARS:
        yield delta
        return
    pieces = [
        *(Delta(choice=delta.choice, text="", ids=(), reasoning=text) for text in _all_but_last(delta.reasoning)),
        *(Delta(choice=delta.choice, text=text, ids=()) for text in _all_but_last(delta.text)),
    ]
    calls = [part for call in delta.calls for part in _call_parts(call)]
    if not pieces and len(calls) == len(delta.calls):
        yield delta
        return
    yield from pieces
    yield from (Delta(choice=delta.choice, text="", ids=(), calls=(part,)) for part in calls)
    yield replace(delta, text=_last(delta.text), reasoning=_last(delta.reasoning), calls=())


def _call_parts(call: CallDelta) -> list[CallDelta]:
    texts = [*_all_but_last(call.arguments), _last(call.arguments)]
    first = replace(call, arguments=texts[0])
    return [first, *(CallDelta(index=call.index, arguments=text) for text in texts[1:])]


def _all_but_last(text: str) -> list[str]:
    end = len(text) - len(_last(text))
    return [text[start : start + MAX_PART_CHARS] for start in range(0, end, MAX_PART_CHARS)]


def _last(text: str) -> str:
    return text[max(0, len(text) - 1) // MAX_PART_CHARS * MAX_PART_CHARS :]


class ChoiceText:
    """Text of one choice: a function of (request, log).

    The same ids give the same text in any grouping, so a resumed request continues its text.
    """

    def __init__(
        self,
        choice: int,
        *,
        new_detokenizer: Callable[[], TokenDecoder],
        stops: Stops,
        stop_token_ids: frozenset[int],
    ) -> None:
        self._choice = choice
        self._detokenizer = new_detokenizer()
        self._stops = stops
        self._stop_token_ids = stop_token_ids
        self.num_tokens = 0  # tokens of the log that count for this choice
        self.finished = False

    def advance(self, ids: Sequence[int], ending: str | None) -> Delta:
        """Add new ids; ``ending`` is the engine's reason once the log is complete. Call until ``finished``."""
        pieces: list[str] = []
        for index, token_id in enumerate(ids):
            self.num_tokens += 1
            shown, stopped = self._stops.push(self._decode(token_id))
            pieces.append(shown)
            if stopped:
                return self._stop(pieces, ids[: index + 1], stopped)
        if ending is None:
            return Delta(choice=self._choice, text="".join(pieces), ids=tuple(ids), pieces=tuple(pieces))
        rest, stopped = self._stops.push(self._detokenizer.finish())
        if not stopped:
            shown, stopped = self._stops.finish()
            rest += shown
        if stopped:
            return self._stop(pieces, ids, stopped, rest=rest)
        self.finished = True
        text = "".join([*pieces, rest])
        return Delta(choice=self._choice, text=text, ids=tuple(ids), pieces=tuple(pieces), finish_reason=ending)

    def _decode(self, token_id: int) -> str:
        """Return a token's text. A stop id is the last token: it counts, but its text is not shown."""
        return "" if token_id in self._stop_token_ids else self._detokenizer.add(token_id)

    def _stop(self, pieces: list[str], ids: Sequence[int], stopped_by: str, *, rest: str = "") -> Delta:
        self.finished = True
        return Delta(
            choice=self._choice,
            text="".join([*pieces, rest]),
            ids=tuple(ids),
            pieces=tuple(pieces),
            finish_reason="stop",
            stopped_at=self.num_tokens,
            stopped_by=stopped_by,
        )
