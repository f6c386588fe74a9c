"""Reads calls of the form name and arguments between marks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from edgepipe.gateway.formats.chat_format import Functions
from edgepipe.gateway.formats.content import AnswerContent
from edgepipe.gateway.formats.json_calls import overlap
from edgepipe.gateway.formats.tagged import begins
from edgepipe.gateway.tool_call_json import CallNews
from edgepipe.gateway.tool_calls import Scanned

_MAX_HEAD_CHARS = 256  # longest text between the opening and the arguments; a longer one is no call

Bracket = TypeVar("Bracket")


class Arguments(Protocol):
    """Turns the arguments of one call into JSON as they arrive."""

    def feed(self, text: str, start: int) -> tuple[int, bool]:
        """Read ``text[start:]``. Return where reading stopped, and whether the arguments ended.

        Text after that place may be an incomplete mark: the next call brings it again.
        """
        ...


class BracketedArguments(Generic[Bracket]):
    """Arguments that end with their outermost bracket; see Arguments. A subclass reads one part at a time."""

    def __init__(self, calls: CallNews) -> None:
        self._say = calls.arguments
        self._open: list[Bracket] = []

    def feed(self, text: str, start: int) -> tuple[int, bool]:
        """See Arguments."""
        at = start
        while at < len(text):
            end = self._read(text, at)
            if end is None:
                return at, False
            at = end
            if not self._open:
                return at, True
        return at, False

    def _read(self, text: str, at: int) -> int | None:
        """Read the next part and return its end, or None at a mark that may be incomplete."""
        raise NotImplementedError


class NamedReader:
    """State machine over content, a call's head and its arguments; see TextReader."""

    def __init__(
        self,
        calls: CallNews,
        functions: Functions,
        *,
        opening: str,
        head: re.Pattern[str],
        closings: tuple[str, ...],
        next_call: str = "",
        lacks_opening: bool = False,
        separators: str = "",
        begun: re.Pattern[str] | None = None,
        arguments: Callable[[CallNews], Arguments],
    ) -> None:
        """
        opening        mark before a group of calls
        head           text between the opening and the arguments; group 1 is the name
        closings       marks after the arguments, which are dropped
        next_call      mark of a further call of the group
        lacks_opening  some models begin a group with the mark of its first call
        separators     characters that may stand after a call in its group
        begun          beginning of a further call's head, where calls of a group have no mark; a closing then ends it
        """
        self._calls = calls
        self._functions = functions
        self._opening = opening
        self._openings = (opening, next_call) if lacks_opening else (opening,)
        self._opened = ""  # the opening of the current group
        self._head_reading = head
        self._closings = closings
        self._after = (*closings, next_call) if next_call else closings
        self._separators = separators
        self._begun = begun
        self._new_arguments = arguments
        self._arguments = arguments(calls)
        self._state: Callable[[str, int], int] = self._text
        self._pending = ""  # text that may be an incomplete mark
        self._content = AnswerContent()

    @property
    def in_call(self) -> bool:
        """See TextReader."""
        return self._state in (self._head, self._in_arguments)

    def push(self, text: str) -> Scanned:
        """See TextReader."""
        text, self._pending = self._pending + text, ""
        at = 0
        while at < len(text):
            at = self._state(text, at)
        return Scanned(self._content.take(), self._calls.take())

    def finish(self, *, followed_by: str | None = None) -> Scanned:
        """See TextReader."""
        held = self._pending if self._state in (self._text, self._ended) else ""
        if self._state == self._head and followed_by is None:
            held = self._opened + self._pending
        marks = self._openings if self._state == self._text else self._after
        if held and followed_by is not None and begins(held + followed_by, 0, marks):
            held = ""
        if self._state == self._ended and (self._begun or begins(held, 0, self._after)):
            held = ""
        self._content.add(held)
        self._content.end(keep_spaces=not self._calls.count)
        self._pending = ""
        return Scanned(self._content.take(), self._calls.take())

    def _text(self, text: str, at: int) -> int:
        """State: content, until the opening."""
        found = min((place for mark in self._openings if (place := text.find(mark, at)) >= 0), default=-1)
        if found >= 0:
            self._content.add(text[at:found])
            self._state = self._head
            self._opened = self._opening if text.startswith(self._opening, found) else ""
            return found + len(self._opened)
        keep = max(overlap(text, at, mark) for mark in self._openings)
        self._content.add(text[at : len(text) - keep])
        self._pending = text[len(text) - keep :]
        return len(text)

    def _head(self, text: str, at: int) -> int:
        """State: after the opening, before the first call's arguments."""
        found = self._head_reading.match(text, at, at + _MAX_HEAD_CHARS)
        if found is not None and found[1] in self._functions:
            return self._begin(found)
        if found is None and len(text) - at < _MAX_HEAD_CHARS:
            self._pending = text[at:]
            return len(text)
        # A group without an opening shows its first character, so that reading goes on.
        shown = self._opened or text[at]
        self._content.add(shown)
        self._state = self._text
        return at if self._opened else at + len(shown)

    def _begin(self, found: re.Match[str]) -> int:
        self._content.drop_spaces()
        self._calls.begin(found[1])
        self._arguments = self._new_arguments(self._calls)
        self._state = self._in_arguments
        return found.end()

    def _in_arguments(self, text: str, at: int) -> int:
        """State: in a call's arguments."""
        at, ended = self._arguments.feed(text, at)
        if ended:
            self._state = self._ended
            return at
        self._pending = text[at:]
        return len(text)

    def _ended(self, text: str, at: int) -> int:
        """State: after a call's arguments."""
        if text[at].isspace() or text[at] in self._separators:
            return at + 1
        for mark in self._closings:
            if text.startswith(mark, at):
                if self._begun:
                    self._state = self._text
                return at + len(mark)
        found = self._head_reading.match(text, at, at + _MAX_HEAD_CHARS)
        marked = begins(text, at, self._after)
        if found is not None and found[1] in self._functions and (self._begun or marked):
            return self._begin(found)
        if found is None and len(text) - at < _MAX_HEAD_CHARS and (marked or self._may_go_on(text, at)):
            self._pending = text[at:]
            return len(text)
        self._state = self._text
        return at

    def _may_go_on(self, text: str, at: int) -> bool:
        """Return whether the text may be an incomplete head of a call without a mark."""
        return self._begun is not None and self._begun.fullmatch(text, at) is not None
