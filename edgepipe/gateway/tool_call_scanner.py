"""A linear scanner that finds tool calls in a model's text as it arrives.

Nothing here backtracks: every character is looked at a bounded number of times, whatever the model wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from edgepipe.gateway.tool_call_json import CallArguments, CallNews, CallObject, NotACall
from edgepipe.gateway.tool_calls import Scanned, ToolFormat


class ToolCallScanner:
    """Splits one choice's text into content and calls. A function of the text, however it is cut into pieces.

    Text that turns out to be no call (broken JSON) is content, unchanged. What the end of the text leaves unfinished of
    a call is dropped, but for the arguments that were shown: a call's markup is never content.
    """

    def __init__(self, kind: ToolFormat, *, new_id: Callable[[int], str]) -> None:
        """``new_id``: the id of the call with that index, see ``call_id``."""
        self._reader = _READERS[kind](CallNews(new_id))

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return self._reader.calls.count

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and is not complete."""
        return self._reader.in_call

    def push(self, text: str) -> Scanned:
        """Take the next piece."""
        return self._reader.push(text)

    def finish(self, *, followed_by: str | None = None) -> str:
        """Return the content that was held back, at the end of the text.

        followed_by  how the text went on, as far as it is known, if it was cut off: what may be the beginning of a call
                     is dropped then
        """
        return self._reader.finish(followed_by=followed_by)


class _Reader:
    """Content, markers and calls in turn. Each state takes text from a place on and says how far it got."""

    def __init__(
        self, calls: CallNews, *, opening: str, closing: str = "", separators: str = "", at_start: bool = False
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
        self._object: CallObject | CallArguments | None = None
        self._begun = 0  # calls of the group
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
        """Return whether what is held back begins the opening if this follows."""
        text = self._pending + more
        held = self._state == self._text and self._pending != ""
        return held and (self._opening.startswith(text) or text.startswith(self._opening))

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
_MAX_NAMED_CHARS = 256  # of a name with its id; what is longer before the arguments is no call


class _MistralReader(_Reader):
    """Both ways in which Mistral's models write calls: an array of objects, and a name with its arguments."""

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
        """Behind the name."""
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
    """Length of the longest end of ``text[start:]`` that begins ``marker``."""
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
