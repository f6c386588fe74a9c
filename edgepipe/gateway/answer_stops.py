"""Matches stop strings in the answer only: text that the model writes while it reasons ends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgepipe.gateway.answer_reader import AnswerFormat
from edgepipe.gateway.formats.chat_format import Reasoning
from edgepipe.gateway.formats.harmony import HarmonySpans
from edgepipe.gateway.formats.json_calls import overlap
from edgepipe.gateway.text import StopMatcher, Stops

Span = tuple[str, bool]
"""A piece of the text, and whether it belongs to the answer."""


class Spans(Protocol):
    """Cuts a text into spans as it arrives. Marks are spans of their own, and the spans join to the text."""

    def feed(self, text: str) -> Sequence[Span]:
        """Take the next piece."""
        ...

    def rest(self) -> Span:
        """Return what was held back, at the end of the text."""
        ...


def answer_stops(strings: Sequence[str], answer: AnswerFormat | None) -> Stops:
    """Return what finds the stop strings of one choice. None: all text counts."""
    if not strings or answer is None or not answer.chat.reasons:
        return StopMatcher(strings)
    if answer.chat.reasoning is None:
        return AnswerStops(strings, HarmonySpans(answer.functions), marks=answer.marks)
    spans = ReasoningSpans(answer.chat.reasoning, inside=answer.in_reasoning)
    return AnswerStops(strings, spans, marks=answer.marks)


class AnswerStops:
    """Finds the first stop string of an answer, see Stops. A stop string that equals a mark of reasoning counts too."""

    def __init__(self, strings: Sequence[str], spans: Spans, *, marks: Sequence[str]) -> None:
        self._marks = frozenset(strings) & frozenset(marks)
        self._matcher = StopMatcher(strings)
        self._spans = spans

    def push(self, piece: str) -> tuple[str, str]:
        """See Stops."""
        return self._match(self._spans.feed(piece))

    def finish(self) -> tuple[str, str]:
        """See Stops."""
        shown, stopped = self._match([self._spans.rest()])
        return (shown, stopped) if stopped else (shown + self._matcher.finish()[0], "")

    def _match(self, spans: Sequence[Span]) -> tuple[str, str]:
        shown: list[str] = []
        for text, counts in spans:
            if counts:
                part, stopped = self._matcher.push(text)
                shown.append(part)
            elif text:
                shown.append(self._matcher.finish()[0])
                stopped = text if text in self._marks else ""
                shown.append("" if stopped else text)
            else:
                continue
            if stopped:
                return "".join(shown), stopped
        return "".join(shown), ""


class ReasoningSpans:
    """Spans of a text with reasoning between marks. Spaces around the reasoning are no part of the answer."""

    def __init__(self, marks: Reasoning, *, inside: bool) -> None:
        self._marks = marks
        self._inside = inside
        self._begun = False  # the answer has begun
        self._follows = False  # the last span was the closing mark, or spaces after it
        self._spaces: list[str] = []  # spaces before the first text, until it is known whether reasoning begins
        self._held = ""  # text that may be an incomplete mark

    def feed(self, text: str) -> Sequence[Span]:
        """See Spans."""
        text, self._held = self._held + text, ""
        found: list[Span] = []
        while text:
            text = self._reasoning(text, found) if self._inside else self._outside(text, found)
        return found

    def rest(self) -> Span:
        """See Spans."""
        held = "".join([*self._spaces, self._held])
        self._spaces, self._held = [], ""
        return held, not self._inside

    def _reasoning(self, text: str, found: list[Span]) -> str:
        """Take text within the reasoning; return what is left."""
        closing = self._marks.closing
        before, mark, after = text.partition(closing)
        if not mark:
            return self._hold(text, overlap(text, 0, closing), found, counts=False)
        found += [(before, False), (closing, False)]
        self._inside, self._follows = False, True
        self._begun = not self._marks.anywhere
        return after

    def _outside(self, text: str, found: list[Span]) -> str:
        """Take text outside the reasoning; return what is left."""
        bare, opening = text.lstrip(), self._marks.opening
        if self._follows:
            found.append((text[: len(text) - len(bare)], False))
            self._follows = not bare
            return bare
        if not self._begun:
            self._spaces.append(text[: len(text) - len(bare)])
            if opening.startswith(bare) and bare != opening:
                self._held = bare
                return ""
            self._begun = not bare.startswith(opening)
            found.append(("".join(self._spaces), self._begun))
            self._spaces, text = [], bare
        if self._begun and not self._marks.anywhere:
            found.append((text, True))
            return ""
        before, mark, after = text.partition(opening)
        if not mark:
            return self._hold(text, overlap(text, 0, opening), found, counts=True)
        found += [(before, self._begun), (opening, False)]
        self._inside = True
        return after

    def _hold(self, text: str, size: int, found: list[Span], *, counts: bool) -> str:
        """Keep the last ``size`` characters for the next piece."""
        found.append((text[: len(text) - size], counts))
        self._held = text[len(text) - size :]
        return ""
