"""Reads calls that are JSON objects between marks, and writes their grammars.

The reader never backtracks: it reads every character a bounded number of times, for any text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from edgepipe.gateway.formats.chat_format import Functions
from edgepipe.gateway.formats.content import AnswerContent
from edgepipe.gateway.tool_call_json import CallArguments, CallNews, CallObject, NotACall
from edgepipe.gateway.tool_calls import Call, Scanned
from edgepipe.sampling.grammar import json_rule


class JsonReader:
    """State machine over content, markers and calls. Each state reads from an index and returns where it stopped."""

    def __init__(
        self,
        calls: CallNews,
        *,
        opening: str,
        closing: str = "",
        separators: str = "",
        at_start: bool = False,
        dropped: Sequence[str] = (),
        names: Container[str] | None = None,
    ) -> None:
        """
        opening     marker before a group of calls; empty: no calls
        closing     marker after the group
        separators  characters allowed before, between and after the calls of a group
        at_start    a call may begin the text without the opening
        dropped     markers around content that are no part of it
        names       of the functions, if an object with another name is content
        """
        self._names = names
        self.calls = calls
        self._opening = opening
        self._closing = closing
        self._outside = [mark for mark in (opening, *dropped) if mark]  # markers within or after content
        self._mark = re.compile("|".join(map(re.escape, self._outside)))
        self._between = re.compile(rf"[\s{re.escape(separators)}]+")
        self._state: Callable[[str, int], int] = self._start if at_start else self._text
        self._pending = ""  # text that may be an incomplete marker
        self._marks: list[str] = []  # markers since the content ended; content if no call follows
        self._object: CallObject | CallArguments | None = None
        self._begun = 0  # calls of the group so far
        self._content = AnswerContent()

    def push(self, text: str) -> Scanned:
        """Take the next piece."""
        text, self._pending = self._pending + text, ""
        at = 0
        while at < len(text):
            at = self._state(text, at)
        return Scanned(self._content.take(), self.calls.take())

    @property
    def in_call(self) -> bool:
        """See TextReader."""
        between_calls = self._state == self._group and self._begun > 0
        return self._state not in (self._start, self._text) and not between_calls

    def finish(self, *, followed_by: str | None = None) -> Scanned:
        """See TextReader."""
        dropped = self.in_call or (followed_by is not None and self._may_open(followed_by))
        if not dropped and self._state in (self._start, self._text):
            self._content.add("".join([*self._marks, self._pending]))
        self._content.end(keep_spaces=not dropped and not self.calls.count)
        self._marks, self._pending, self._object = [], "", None
        return Scanned(self._content.take(), self.calls.take())

    def _may_open(self, more: str) -> bool:
        """Return whether the held text and then ``more`` begin a marker."""
        text = self._pending + more
        held = self._state == self._text and self._pending != ""
        return held and any(mark.startswith(text) or text.startswith(mark) for mark in self._outside)

    def _give_back(self, more: str = "") -> None:
        """Treat text that looked like a call as content."""
        self._content.add("".join([*self._marks, more]))
        self._marks, self._object = [], None
        self._state = self._text

    def _start(self, text: str, at: int) -> int:
        """State: only spaces so far."""
        if text[at].isspace():
            self._marks.append(text[at])
            return at + 1
        if text[at] == "{":
            self._state = self._call
        else:
            self._give_back()
        return at

    def _text(self, text: str, at: int) -> int:
        """State: content, until the opening."""
        if found := self._mark.search(text, at):
            self._content.add(text[at : found.start()])
            if found.group() == self._opening:
                self._marks, self._begun = [self._opening], 0
                self._state = self._group
            return found.end()
        keep = max(overlap(text, at, mark) for mark in self._outside)
        self._content.add(text[at : len(text) - keep])
        self._pending = text[len(text) - keep :]
        return len(text)

    def _group(self, text: str, at: int) -> int:
        """State: after the opening or after a call."""
        if text[at] == "{":
            self._state = self._call
            return at
        closing = self._closing
        if self._begun and closing and text.startswith(closing, at):
            return self._leave_group(at + len(closing))
        if self._begun and len(text) - at < len(closing) and closing.startswith(text[at:]):
            self._pending = text[at:]
            return len(text)
        between = self._between.match(text, at)
        if between is not None:
            self._marks.append(between.group())
            return between.end()
        if self._begun:
            return self._leave_group(at)
        self._give_back()
        return at

    def _leave_group(self, at: int) -> int:
        self._content.drop_spaces()
        self._marks = []
        self._state = self._text
        return at

    def _call(self, text: str, at: int) -> int:
        """State: inside a call's object."""
        if self._object is None:
            self._object = CallObject(self.calls, self._names)
        try:
            at, ended = self._object.feed(text, at)
        except NotACall as no_call:
            self._give_back(self._object.raw)
            return no_call.at
        if ended:
            self._content.drop_spaces()
            self._object, self._marks = None, []
            self._begun += 1
            self._state = self._group
        return at


def overlap(text: str, start: int, marker: str) -> int:
    """Return the length of the longest end of ``text[start:]`` that begins ``marker``."""
    for size in range(min(len(marker) - 1, len(text) - start), 0, -1):
        if marker.startswith(text[len(text) - size :]):
            return size
    return 0


def object_rules(functions: Functions) -> list[str]:
    """Return the rule ``call``: one object of any of the functions."""
    rules = [
        f'call_{index}: {json.dumps(_opening(name, key="arguments"))} {json_rule(schema)} "}}"'
        for index, (name, schema) in enumerate(functions.items())
    ]
    return [any_call(len(rules)), *rules]


def any_call(count: int) -> str:
    """Return the rule ``call`` for any of the rules ``call_0``, ``call_1`` and so on."""
    return "call: " + " | ".join(f"call_{index}" for index in range(count))


def free_start(calls: str, *, several: bool) -> str:
    """Return the rule ``answer`` of an automatic choice: text with calls in it, or text that ends with one call."""
    return f"answer: {calls}* PLAIN" if several else f"answer: {calls} | PLAIN"


def lazy_opening(mark: str) -> str:
    """Return the rule ``opening``: text until the first mark."""
    return f"opening[lazy]: PLAIN {json.dumps(mark, ensure_ascii=False)}"


def written_object(call: Call, *, key: str = "arguments") -> str:
    """Return a call as JSON."""
    return _opening(call.name, key=key) + written_json(call.arguments) + "}"


def written_json(value: Mapping[str, Any]) -> str:
    """Return JSON as models write it."""
    return json.dumps(value, ensure_ascii=False)


def _opening(name: str, *, key: str) -> str:
    return '{"name": ' + json.dumps(name, ensure_ascii=False) + f', "{key}": '
