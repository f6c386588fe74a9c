"""Linear scanner that finds tool calls in a model's text as it arrives.

The scanner never backtracks: it reads every character a bounded number of times, for any text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from edgepipe.gateway.tool_call_json import CallArguments, CallNews, CallObject, NotACall
from edgepipe.gateway.tool_calls import Scanned, ToolFormat


class ToolCallScanner:
    """Splits one choice's text into content and calls. The result does not depend on the pieces of the text.

    Text that proves to be no call (invalid JSON) is content, unchanged. The scanner drops an unfinished call at the end
    of the text, except arguments already shown: a call's markup is never content.
    """

    def __init__(self, kind: ToolFormat, *, new_id: Callable[[int], str]) -> None:
        """``new_id``: the id of the call with that index, see ``call_id``."""
        self._reader = _READERS[kind](CallNews(new_id))

    @property
    def num_calls(self) -> int:
        """Number of calls begun so far."""
        return self._reader.calls.count

    @property
    def in_call(self) -> bool:
        """Whether a call is incomplete."""
        return self._reader.in_call

    def push(self, text: str) -> Scanned:
        """Take the next piece."""
        return self._reader.push(text)

    def finish(self, *, followed_by: str | None = None) -> str:
        """Return the content that was held back, at the end of the text.

        followed_by  known continuation of a text that was cut: if it could begin a call, the held text is dropped
        """
        return self._reader.finish(followed_by=followed_by)


class _Reader:
    """State machine over content, markers and calls. Each state reads from an index and returns where it stopped."""

    def __init__(
        self, calls: CallNews, *, opening: str, closing: str = "", separators: str = "", at_start: bool = False
    ) -> None:
        """
        opening     marker before a group of calls
        closing     marker after the group
        separators  characters allowed before, between and after the calls of a group
        at_start    a call may begin the text without the opening
        """
        self.calls = calls
        self._opening = opening
        self._closing = closing
        self._between = re.compile(rf"[\s{re.escape(separators)}]+")
        self._state: Callable[[str, int], int] = self._start if at_start else self._text
        self._pending = ""  # text that may be an incomplete marker
        self._spaces: list[str] = []  # spaces at the end of content; dropped if a call follows
        self._marks: list[str] = []  # markers since the content ended; content if no call follows
        self._object: CallObject | CallArguments | None = None
        self._begun = 0  # calls of the group so far
        self._content: list[str] = []

    def push(self, text: str) -> Scanned:
        """Take the next piece."""
        text, self._pending = self._pending + text, ""
        at = 0
        while at < len(text):
            at = self._state(text, at)
        return self._scanned()

    @property
    def in_call(self) -> bool:
        """See ToolCallScanner."""
        between_calls = self._state == self._group and self._begun > 0
        return self._state not in (self._start, self._text) and not between_calls

    def finish(self, *, followed_by: str | None) -> str:
        """See ToolCallScanner."""
        dropped = self.in_call or (followed_by is not None and self._may_open(followed_by))
        if not dropped and self._state in (self._start, self._text):
            self._show("".join([*self._marks, self._pending]))
        if not dropped and not self.calls.count:
            self._content += self._spaces
        self._marks, self._spaces, self._pending, self._object = [], [], "", None
        return self._scanned().content

    def _may_open(self, more: str) -> bool:
        """Return whether the held text and then ``more`` begin the opening."""
        text = self._pending + more
        held = self._state == self._text and self._pending != ""
        return held and (self._opening.startswith(text) or text.startswith(self._opening))

    def _scanned(self) -> Scanned:
        content, self._content = "".join(self._content), []
        return Scanned(content, self.calls.take())

    def _show(self, text: str) -> None:
        """Add content; hold back spaces at its end."""
        shown = text.rstrip()
        if shown:
            self._content += [*self._spaces, shown]
            self._spaces = []
        if len(shown) < len(text):
            self._spaces.append(text[len(shown) :])

    def _give_back(self, more: str = "") -> None:
        """Treat text that looked like a call as content."""
        self._show("".join([*self._marks, more]))
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
        self._marks, self._spaces = [], []
        self._state = self._text
        return at

    def _call(self, text: str, at: int) -> int:
        """State: inside a call's object."""
        if self._object is None:
            self._object = CallObject(self.calls)
        try:
            at, ended = self._object.feed(text, at)
        except NotACall as no_call:
            self._give_back(self._object.raw)
            return no_call.at
        if ended:
            self._object, self._marks, self._spaces = None, [], []
            self._begun += 1
            self._state = self._group
        return at


_ARGS = "[ARGS]"
_NAMED = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9_-]{1,64})?\s*")
_MAX_NAMED_CHARS = 256  # a name with its id; a longer text before the arguments is no call


class _MistralReader(_Reader):
    """Reader of both formats of Mistral's models: an array of objects, and a name with its arguments."""

    def __init__(self, calls: CallNews) -> None:
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
        """State: after the name."""
        if self._object is None:
            if text[at].isspace():
                self._marks.append(text[at])
                return at + 1
            if text[at] != "{":
                self._give_back()
                return at
            self.calls.begin(self._name)
            self._object = CallArguments(self.calls)
        at, ended = self._object.feed(text, at)
        return self._leave_group(at) if ended else at

    def _leave_group(self, at: int) -> int:
        self._object = None
        return super()._leave_group(at)


def _overlap(text: str, start: int, marker: str) -> int:
    """Return the length of the longest end of ``text[start:]`` that begins ``marker``."""
    for size in range(min(len(marker) - 1, len(text) - start), 0, -1):
        if marker.startswith(text[len(text) - size :]):
            return size
    return 0


_READERS: dict[ToolFormat, Callable[[CallNews], _Reader]] = {
    ToolFormat.HERMES: lambda calls: _Reader(calls, opening="<tool_call>", closing="</tool_call>"),
    ToolFormat.LLAMA: lambda calls: _Reader(calls, opening="<|python_tag|>", separators=";", at_start=True),
    ToolFormat.MISTRAL: _MistralReader,
    ToolFormat.MISTRAL_ARGS: _MistralReader,
}
