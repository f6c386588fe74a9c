"""Tool calls in a model's text: how each family writes them, and a linear scanner that finds them as text arrives.

Nothing here backtracks: every character is looked at a bounded number of times, whatever the model wrote.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import cast


class ToolFormat(Enum):
    """How a model family writes calls."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once per call: Qwen, Hermes, SmolLM
    LLAMA = "llama"  # {"name": ..., "parameters": {...}} as the whole answer, perhaps behind <|python_tag|>
    MISTRAL = "mistral"  # [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
    MISTRAL_ARGS = "mistral-args"  # [TOOL_CALLS]name[ARGS]{...}, once per call: since tokenizer version 11


def detect_format(template: str) -> ToolFormat:
    """What a model's chat template speaks; Hermes' where it speaks of none: the most common, and easy to be taught."""
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL_ARGS if "[ARGS]" in template else ToolFormat.MISTRAL
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters"' in template):
        return ToolFormat.LLAMA
    return ToolFormat.HERMES


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of one call, as OpenAI's streams carry them: id and name come first, once; then arguments in pieces."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""  # JSON text


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a piece of text gave."""

    content: str = ""  # what is no call
    calls: tuple[CallDelta, ...] = ()


def call_id(request_id: str, choice: int, index: int) -> str:
    """The id of a choice's ``index``-th call: a function of the request, so that a resumed answer has the same."""
    digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"


class ToolCallScanner:
    """Splits one choice's text into content and calls. A function of the text, however it is cut into pieces.

    Text that turns out to be no call (broken JSON, a tag never closed) is content, unchanged: nothing is lost.
    """

    def __init__(self, kind: ToolFormat, *, new_id: Callable[[int], str]) -> None:
        """``new_id``: the id of the call with that index, see ``call_id``."""
        self._reader = _READERS[kind](_Calls(new_id))

    @property
    def num_calls(self) -> int:
        """Calls begun so far; if any, the choice's finish reason is ``tool_calls``."""
        return self._reader.calls.count

    def push(self, text: str) -> Scanned:
        """Take the next piece."""
        return self._reader.push(text)

    def finish(self) -> Scanned:
        """What was held back, at the end of the text."""
        return self._reader.finish()


class _Calls:
    """Gives calls their numbers and collects what is to be told of them."""

    def __init__(self, new_id: Callable[[int], str]) -> None:
        self.count = 0
        self._new_id = new_id
        self._news: list[CallDelta] = []

    def begin(self, name: str) -> None:
        self._news.append(CallDelta(index=self.count, call_id=self._new_id(self.count), name=name))
        self.count += 1

    def arguments(self, text: str) -> None:
        """A piece for the call begun last."""
        if text:
            self._news.append(CallDelta(index=self.count - 1, arguments=text))

    def take(self) -> tuple[CallDelta, ...]:
        news, self._news = tuple(self._news), []
        return news


_IN_STRING = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\],:]')
_BRACKETS = re.compile(r'["{}\[\]]')
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})


class _NotACall(Exception):
    """The text is JSON at best. ``at``: where the reading stopped."""

    at = 0


class _CallObject:
    """One object ``{"name": ..., "arguments": ...}``, from its brace on. Only its own members are understood."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._raw: list[str] = []  # all text, until it is certain that this is a call
        self._certain = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None  # of the member whose value is being read
        self._part: list[str] = []  # key or value under way
        self._streams = False  # the value goes out as it comes
        self._spaces = ""  # held back of a value that goes out: they may be its last
        self._name = ""
        self._arguments: str | None = None  # complete, but the name was not known yet

    @property
    def raw(self) -> str:
        """The text so far, unless it is certain to be a call."""
        return "" if self._certain else "".join(self._raw)

    def feed(self, text: str, start: int) -> tuple[int, bool]:
        """Read ``text[start:]``: where the reading ended, and whether the object did. Raises _NotACall."""
        at = start
        while at < len(text):
            before = at
            try:
                at = self._string(text, at) if self._in_string else self._structure(text, at)
            except _NotACall as no_call:
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
                raise _NotACall
            self._begin()
            self._calls.arguments(self._arguments if self._arguments is not None else "{}")

    def _take(self, text: str) -> None:
        """Text of the key or value under way."""
        if self._streams:
            self._send(text)
            return
        self._part.append(text)
        if self._name and self._key in ("arguments", "parameters") and text.strip():
            value = "".join(self._part).lstrip()
            if value[0] != '"':  # some models write the arguments as a string that holds JSON
                self._begin()
                self._streams = True
                self._send(value)

    def _send(self, text: str) -> None:
        if self._in_string:
            self._calls.arguments(self._spaces + text)
            self._spaces = ""
            return
        shown = text.rstrip()
        if shown:
            self._calls.arguments(self._spaces + shown)
            self._spaces = text[len(shown) :]
        else:
            self._spaces += text

    def _end_part(self) -> None:
        """A key or a value is complete."""
        text = "".join(self._part).strip()
        self._part, self._spaces = [], ""
        if self._key is None:
            key = _decoded(text)
            if not isinstance(key, str) or (not self._certain and key not in _CALL_KEYS):
                raise _NotACall
            self._key = key
            return
        if self._key == "name" and not self._certain:
            name = _decoded(text)
            if not isinstance(name, str) or not name:
                raise _NotACall
            self._name = name
        elif self._key in ("arguments", "parameters") and not self._streams:
            value = _decoded(text) if text.startswith('"') else text
            self._arguments = value if isinstance(value, str) else text
        self._key, self._streams = None, False

    def _begin(self) -> None:
        self._certain = True
        self._raw.clear()
        self._calls.begin(self._name)


class _Arguments:
    """The arguments of a call whose name came before them: one JSON object, from its brace on, told as it comes."""

    raw = ""  # that this is a call is certain

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, start: int) -> tuple[int, bool]:
        """Read ``text[start:]``: where the reading ended, and whether the object did."""
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
    """A JSON string's value; None if it is none."""
    if not text.startswith('"'):
        return None
    try:
        return cast("object", json.loads(text, strict=False))
    except ValueError:
        return None


class _Reader:
    """Content, markers and calls in turn. Each state takes text from a place on and says how far it got."""

    def __init__(
        self, calls: _Calls, *, opening: str, closing: str = "", separators: str = "", at_start: bool = False
    ) -> None:
        """
        opening     what stands before a group of calls
        closing     what stands behind it
        separators  characters that may stand before, between and behind the calls of a group
        at_start    a call may begin the text without the opening
        """
        self.calls = calls
        self._opening = opening
        self._closing = closing
        self._between = re.compile(rf"[\s{re.escape(separators)}]+")
        self._state: Callable[[str, int], int] = self._start if at_start else self._text
        self._pending = ""  # may belong to a marker that is not complete
        self._spaces: list[str] = []  # at the end of content: dropped where a call follows
        self._marks: list[str] = []  # read since content ended, content after all if no call follows
        self._object: _CallObject | _Arguments | None = None
        self._begun = 0  # calls of the group
        self._content: list[str] = []

    def push(self, text: str) -> Scanned:
        """Take the next piece."""
        text, self._pending = self._pending + text, ""
        at = 0
        while at < len(text):
            at = self._state(text, at)
        return self._scanned()

    def finish(self) -> Scanned:
        """The text is over."""
        closes = self._state == self._group and self._begun
        held = "" if closes else self._pending
        if self._object is not None:
            held = self._object.raw
        if not closes and not (self._object is not None and not held):
            self._show("".join([*self._marks, held]))
        if not self.calls.count:
            self._content += self._spaces
        self._marks, self._spaces, self._pending, self._object = [], [], "", None
        return self._scanned()

    def _scanned(self) -> Scanned:
        content, self._content = "".join(self._content), []
        return Scanned(content, self.calls.take())

    def _show(self, text: str) -> None:
        """Content; spaces at its end wait for what follows."""
        shown = text.rstrip()
        if shown:
            self._content += [*self._spaces, shown]
            self._spaces = []
        if len(shown) < len(text):
            self._spaces.append(text[len(shown) :])

    def _give_back(self, more: str = "") -> None:
        """What looked like a call is content."""
        self._show("".join([*self._marks, more]))
        self._marks, self._object = [], None
        self._state = self._text

    def _start(self, text: str, at: int) -> int:
        """Nothing but spaces came yet."""
        if text[at].isspace():
            self._marks.append(text[at])
            return at + 1
        if text[at] == "{":
            self._state = self._call
        else:
            self._give_back()
        return at

    def _text(self, text: str, at: int) -> int:
        """Content, until the opening."""
        found = text.find(self._opening, at)
        if found >= 0:
            self._show(text[at:found])
            self._marks, self._begun = [self._opening], 0
            self._state = self._group
            return found + len(self._opening)
        keep = _overlap(text, at, self._opening)
        self._show(text[at : len(text) - keep])
        self._pending = text[len(text) - keep :]
        return len(text)

    def _group(self, text: str, at: int) -> int:
        """Behind the opening or behind a call."""
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
        self._marks, self._spaces = [], []
        self._state = self._text
        return at

    def _call(self, text: str, at: int) -> int:
        """Inside a call's object."""
        if self._object is None:
            self._object = _CallObject(self.calls)
        try:
            at, ended = self._object.feed(text, at)
        except _NotACall as no_call:
            self._give_back(self._object.raw)
            return no_call.at
        if ended:
            self._object, self._marks, self._spaces = None, [], []
            self._begun += 1
            self._state = self._group
        return at


_ARGS = "[ARGS]"
_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9_-]{1,64})?\s*")
_MAX_NAMED_CHARS = 256  # of a name with its id; what is longer before the arguments is no call


class _MistralReader(_Reader):
    """Both ways in which Mistral's models write calls: an array of objects, and a name with its arguments."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__(calls, opening="[TOOL_CALLS]", closing="]", separators="[,")
        self._name = ""

    def _group(self, text: str, at: int) -> int:
        if self._begun or not (text[at].isalnum() or text[at] == "_"):
            return super()._group(text, at)
        end = text.find(_ARGS, at, at + _MAX_NAMED_CHARS)
        if end < 0 and len(text) - at < _MAX_NAMED_CHARS:
            self._pending = text[at:]
            return len(text)
        named = _NAMED.fullmatch(text, at, end) if end >= 0 else None
        if named is None:
            self._give_back()
            return at
        self._name = named.group(1)
        self._marks.append(text[at : end + len(_ARGS)])
        self._state = self._arguments
        return end + len(_ARGS)

    def _arguments(self, text: str, at: int) -> int:
        """Behind the name."""
        if self._object is None:
            if text[at].isspace():
                self._marks.append(text[at])
                return at + 1
            if text[at] != "{":
                self._give_back()
                return at
            self.calls.begin(self._name)
            self._object = _Arguments(self.calls)
        at, ended = self._object.feed(text, at)
        return self._leave_group(at) if ended else at

    def _leave_group(self, at: int) -> int:
        self._object = None
        return super()._leave_group(at)


def _overlap(text: str, start: int, marker: str) -> int:
    """Length of the longest end of ``text[start:]`` that begins ``marker``."""
    for size in range(min(len(marker) - 1, len(text) - start), 0, -1):
        if marker.startswith(text[len(text) - size :]):
            return size
    return 0


_READERS: dict[ToolFormat, Callable[[_Calls], _Reader]] = {
    ToolFormat.HERMES: lambda calls: _Reader(calls, opening="<tool_call>", closing="</tool_call>"),
    ToolFormat.LLAMA: lambda calls: _Reader(calls, opening="<|python_tag|>", separators=";", at_start=True),
    ToolFormat.MISTRAL: _MistralReader,
    ToolFormat.MISTRAL_ARGS: _MistralReader,
}
