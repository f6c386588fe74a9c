"""Reads the JSON of one tool call as it arrives, and passes its arguments on before their end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import cast

from edgepipe.gateway.tool_calls import CallDelta

_IN_STRING = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\],:]')
_BRACKETS = re.compile(r'["{}\[\]]')
_NAME_KEYS = ("name", "tool_name")
_CALL_KEYS = frozenset({*_NAME_KEYS, "arguments", "parameters", "type", "id", "tool_call_id"})


@dataclass(slots=True, kw_only=True)
class _News:
    """New parts of one call."""

    index: int
    name: str = ""  # set at the beginning of the call
    pieces: list[str] = field(default_factory=list[str])  # pieces of its arguments


class CallNews:
    """Numbers the calls, and collects the new parts of each."""

    def __init__(self, new_id: Callable[[int], str]) -> None:
        self.count = 0
        self._new_id = new_id
        self._news: list[_News] = []

    def begin(self, name: str) -> None:
        """Begin a call of this function."""
        self._news.append(_News(index=self.count, name=name))
        self.count += 1

    def arguments(self, text: str) -> None:
        """Add a piece to the arguments of the newest call."""
        if text and not self._news:
            self._news.append(_News(index=self.count - 1))
        if text:
            self._news[-1].pieces.append(text)

    def take(self) -> tuple[CallDelta, ...]:
        """Return the new parts, one entry per call: clients refuse two entries of one index in a delta."""
        news, self._news = self._news, []
        return tuple(self._delta(each) for each in news)

    def _delta(self, news: _News) -> CallDelta:
        call_id = self._new_id(news.index) if news.name else ""
        return CallDelta(index=news.index, call_id=call_id, name=news.name, arguments="".join(news.pieces))


class NotACall(Exception):
    """The text is no call. ``at``: the index where reading stopped."""

    at = 0


class CallObject:
    """Reader of one object ``{"name": ..., "arguments": ...}``, from its brace on; parses its own members only."""

    def __init__(self, calls: CallNews, names: Container[str] | None = None) -> None:
        """``names``: an object that names something else is no call. None: any name is one."""
        self._calls = calls
        self._names = names
        self._raw: list[str] = []  # the whole text, until this is certainly a call
        self._certain = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None  # key of the current member
        self._part: list[str] = []  # text of the current key or value
        self._first = ""  # first character of ``_part`` that is no space
        self._streams = False  # pass the value on as it arrives
        self._spaces: list[str] = []  # spaces held back of such a value: they may be its end
        self._name = ""
        self._arguments: str | None = None  # complete arguments that came before the name

    @property
    def raw(self) -> str:
        """The text so far, or "" if it is certainly a call."""
        return "" if self._certain else "".join(self._raw)

    def feed(self, text: str, start: int) -> tuple[int, bool]:
        """Read ``text[start:]``. Return where reading stopped, and whether the object ended. Raises NotACall."""
        at = start
        while at < len(text):
            before = at
            try:
                at = self._string(text, at) if self._in_string else self._structure(text, at)
            except NotACall as no_call:
                no_call.at = before
                raise
            if not self._certain:
                self._raw.append(text[before:at])
            if self._depth == 0:
                return at, True
        return at, False

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            self._take(text[at])
            return at + 1
        found = _IN_STRING.search(text, at)
        end = found.end() if found else len(text)
        self._take(text[at:end])
        self._escaped = found is not None and found.group() == "\\"
        self._in_string = found is None or self._escaped
        return end

    def _structure(self, text: str, at: int) -> int:
        found = _STRUCTURE.search(text, at)
        if found is None:
            self._take(text[at:])
            return len(text)
        self._take(text[at : found.start()])
        sign = found.group()
        if sign == '"':
            self._in_string = True
            self._take(sign)
        elif sign in "{[":
            self._depth += 1
            if self._depth > 1:
                self._take(sign)
        elif sign in "}]":
            self._close(sign)
        elif self._depth == 1 and sign == ("," if self._key is not None else ":"):
            self._end_part()
        else:
            self._take(sign)
        return found.end()

    def _close(self, sign: str) -> None:
        self._depth -= 1
        if self._depth:
            self._take(sign)
            return
        if self._key is not None:
            self._end_part()
        if not self._certain:
            if not self._name:
                raise NotACall
            self._begin()
            self._calls.arguments(self._arguments if self._arguments is not None else "{}")

    def _take(self, text: str) -> None:
        """Add text to the current key or value."""
        if self._streams:
            self._send(text)
            return
        self._part.append(text)
        self._first = self._first or text.lstrip()[:1]
        if self._name and self._key in ("arguments", "parameters") and self._first not in ("", '"'):
            self._begin()  # a string is held: some models write the arguments as one that holds JSON
            self._streams = True
            self._send("".join(self._part).lstrip())

    def _send(self, text: str) -> None:
        shown = text if self._in_string else text.rstrip()
        if shown:
            for part in (*self._spaces, shown):
                self._calls.arguments(part)
            self._spaces.clear()
        self._spaces.append(text[len(shown) :])

    def _end_part(self) -> None:
        """Handle a complete key or value."""
        text = "".join(self._part).strip()
        self._part, self._first, self._spaces = [], "", []
        if self._key is None:
            key = _decoded(text)
            if not isinstance(key, str) or (not self._certain and key not in _CALL_KEYS):
                raise NotACall
            self._key = key
            return
        if self._key in _NAME_KEYS and not self._certain:
            name = _decoded(text)
            if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
                raise NotACall
            self._name = name
        elif self._key in ("arguments", "parameters") and not self._streams:
            value = _decoded(text) if text.startswith('"') else text
            self._arguments = value if isinstance(value, str) else text
        self._key, self._streams = None, False

    def _begin(self) -> None:
        self._certain = True
        self._raw.clear()
        self._calls.begin(self._name)


class CallArguments:
    """Reader of the arguments of a named call: one JSON object, from its brace on, passed on as it arrives."""

    raw = ""  # this is certainly a call

    def __init__(self, calls: CallNews) -> None:
        self._calls = calls
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, start: int) -> tuple[int, bool]:
        """Read ``text[start:]``. Return where reading stopped, and whether the object ended."""
        at = start
        while at < len(text):
            at = self._string(text, at) if self._in_string else self._structure(text, at)
            if self._depth == 0:
                break
        self._calls.arguments(text[start:at])
        return at, self._depth == 0

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _IN_STRING.search(text, at)
        if found is None:
            return len(text)
        self._escaped = found.group() == "\\"
        self._in_string = self._escaped
        return found.end()

    def _structure(self, text: str, at: int) -> int:
        found = _BRACKETS.search(text, at)
        if found is None:
            return len(text)
        sign = found.group()
        if sign == '"':
            self._in_string = True
        else:
            self._depth += 1 if sign in "{[" else -1
        return found.end()


def _decoded(text: str) -> object:
    """Return the value of a JSON text, None if it is invalid."""
    if not text.startswith('"'):
        return None
    try:
        return cast("object", json.loads(text, strict=False))
    except ValueError:
        return None
