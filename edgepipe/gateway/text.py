"""From token ids to the text a client may see: incremental detokenising and stop strings. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgepipe.gateway.tool_calls import CallDelta
from edgepipe.sampling import TokenLogprobs


class Detokenizer(Protocol):
    """Turns one choice's ids into text as they come. ``edgepipe.model.detokenizer`` has the real one."""

    def add(self, token: int) -> str:
        """Text that is complete with this token; may be empty in the middle of a character."""
        ...

    def finish(self) -> str:
        """What is still held back, as good as it can be decoded."""
        ...


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces.

    The result does not depend on how the text was cut: the match that ends first wins, of those ending together the
    longest. Text that may still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, str]:
        """Return the text that is now safe to show, and the stop string that ended it (which is not shown) or ""."""
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, start = min(found)
            return text[:start], text[start:end]
        keep = self._may_continue(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def finish(self) -> str:
        """Text that turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _may_continue(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops if len(stop) > size):
                return size
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What became visible of one choice."""

    choice: int
    text: str
    ids: tuple[int, ...]
    finish_reason: str | None = None  # "stop" | "length" | "tool_calls" in the last one
    stopped_at: int | None = None  # number of tokens kept, when a stop string ended the choice here
    stopped_by: str = ""  # that stop string
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per id if the request asked for them
    calls: tuple[CallDelta, ...] = ()  # pieces of tool calls


class ChoiceText:
    """One choice's text. A function of (request, log): feeding the same ids again gives the same text, however they are
    grouped, so a resumed request continues where its text was."""

    def __init__(
        self,
        choice: int,
        *,
        new_detokenizer: Callable[[], Detokenizer],
        stops: Sequence[str],
        stop_token_ids: frozenset[int],
    ) -> None:
        self._choice = choice
        self._detokenizer = new_detokenizer()
        self._matcher = StopMatcher(stops)
        self._stop_token_ids = stop_token_ids
        self.num_tokens = 0  # of the log, that count for this choice
        self.finished = False

    def advance(self, ids: Sequence[int], ending: str | None) -> Delta:
        """Take new ids; ``ending`` is the engine's reason once the log is complete. Call until ``finished``."""
        pieces: list[str] = []
        for index, token_id in enumerate(ids):
            self.num_tokens += 1
            shown, stopped = self._matcher.push(self._decode(token_id))
            pieces.append(shown)
            if stopped:
                return self._stop(pieces, ids[: index + 1], stopped)
        if ending is None:
            return Delta(choice=self._choice, text="".join(pieces), ids=tuple(ids))
        shown, stopped = self._matcher.push(self._detokenizer.finish())
        pieces.append(shown)
        if stopped:
            return self._stop(pieces, ids, stopped)
        pieces.append(self._matcher.finish())
        self.finished = True
        return Delta(choice=self._choice, text="".join(pieces), ids=tuple(ids), finish_reason=ending)

    def _decode(self, token_id: int) -> str:
        """The engine ends on a stop id, so it is the last one: it counts, and its text is not shown."""
        return "" if token_id in self._stop_token_ids else self._detokenizer.add(token_id)

    def _stop(self, pieces: list[str], ids: Sequence[int], stopped_by: str) -> Delta:
        self.finished = True
        return Delta(
            choice=self._choice,
            text="".join(pieces),
            ids=tuple(ids),
            finish_reason="stop",
            stopped_at=self.num_tokens,
            stopped_by=stopped_by,
        )
