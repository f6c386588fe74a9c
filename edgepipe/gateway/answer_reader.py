"""Reads one choice's text: reasoning, content and calls, in the format of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgepipe.gateway.formats.chat_format import ChatFormat, Functions, Reasoning, TextReader
from edgepipe.gateway.formats.json_calls import overlap
from edgepipe.gateway.formats.tagged import begins
from edgepipe.gateway.tool_call_json import CallNews
from edgepipe.gateway.tool_calls import Scanned, joined_calls
from edgepipe.gateway.tool_names import ToolNames


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How to read the answers of one request."""

    chat: ChatFormat
    # Functions that may be called; empty: none.
    functions: Functions = field(default_factory=dict[str, dict[str, object]])
    in_reasoning: bool = False  # the prompt has opened the reasoning
    names: ToolNames = field(default_factory=ToolNames)  # the functions' names for the client

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that have text."""
        return self.chat.kept_marks(calls=bool(self.functions))


class AnswerReader:
    """Splits one choice's text into reasoning, content and calls. The result does not depend on the text's pieces."""

    def __init__(self, answer: AnswerFormat, *, new_id: Callable[[int], str]) -> None:
        """``new_id``: the id of the call with that index, see ``call_id``."""
        self._calls = CallNews(new_id)
        chat = answer.chat
        reader: TextReader = _PlainReader()
        if answer.functions or chat.has_channels or chat.frames_content:
            reader = chat.new_reader(self._calls, answer.functions)
        if chat.reasoning is not None:
            reader = _ReasoningReader(chat.reasoning, reader, inside=answer.in_reasoning, frame=chat.answer_frame)
        self._reader = reader

    @property
    def num_calls(self) -> int:
        """Number of calls begun so far."""
        return self._calls.count

    @property
    def in_call(self) -> bool:
        """Whether a call is incomplete."""
        return self._reader.in_call

    def push(self, text: str) -> Scanned:
        """Take the next piece."""
        return self._reader.push(text)

    def finish(self, *, followed_by: str | None = None) -> Scanned:
        """Return what was held back, at the end of the text; see TextReader."""
        return self._reader.finish(followed_by=followed_by)


class _PlainReader:
    """Reader of text without calls."""

    in_call = False

    def push(self, text: str) -> Scanned:
        """See TextReader."""
        return Scanned(text)

    def finish(self, *, followed_by: str | None = None) -> Scanned:
        """See TextReader."""
        return Scanned()


class _FramedReader:
    """Takes the mark at the end of an answer away; another reader reads the rest. See TextReader."""

    def __init__(self, rest: TextReader, closing: str) -> None:
        self._rest = rest
        self._closing = closing
        self._pending = ""  # text that may be an incomplete mark
        self._end: list[str] = []  # the mark and spaces after it: the end of the answer if no other text follows

    @property
    def in_call(self) -> bool:
        """See TextReader."""
        return self._rest.in_call

    def push(self, text: str) -> Scanned:
        """See TextReader."""
        if self._end and not text.strip():
            self._end.append(text)
            return Scanned()
        text = "".join([*self._end, self._pending, text])
        bare = text.rstrip()
        if bare.endswith(self._closing):
            end = len(bare) - len(self._closing)
            self._end, self._pending = [text[end:]], ""
        else:
            end = len(text) - overlap(text, 0, self._closing)
            self._end, self._pending = [], text[end:]
        return self._rest.push(text[:end])

    def finish(self, *, followed_by: str | None = None) -> Scanned:
        """See TextReader."""
        held, self._pending = self._pending, ""
        if followed_by is not None and begins(held + followed_by, 0, (self._closing,)):
            held = ""
        first, last = self._rest.push(held), self._rest.finish(followed_by=followed_by)
        return Scanned(first.content + last.content, joined_calls([*first.calls, *last.calls]))


class _ReasoningReader:
    """Takes reasoning out of a text; another reader reads the rest. See TextReader.

    Spaces around reasoning are dropped, and those between it and the content.
    """

    def __init__(
        self, marks: Reasoning, rest: TextReader, *, inside: bool, frame: tuple[str, str] | None = None
    ) -> None:
        """``frame``: marks around an answer that follows reasoning."""
        self._marks = marks
        self._frame = frame
        self._rest = rest
        self._state: Callable[[str, int], int] = self._begin if inside else self._before
        self._pending = ""  # text that may be an incomplete mark
        self._held: list[str] = []  # spaces before the first text, until it is known whether reasoning begins
        self._spaces: list[str] = []  # spaces at the end of the reasoning so far
        self._parts: list[Scanned] = []
        self._has_reasoning = False

    @property
    def in_call(self) -> bool:
        """See TextReader."""
        return self._rest.in_call

    def push(self, text: str) -> Scanned:
        """See TextReader."""
        text, self._pending = self._pending + text, ""
        at = 0
        while at < len(text):
            at = self._state(text, at)
        return self._joined()

    def finish(self, *, followed_by: str | None = None) -> Scanned:
        """See TextReader."""
        held = "" if self._state == self._begin else "".join([*self._held, self._pending])
        self._held, self._pending = [], ""
        inside = self._state == self._reasoning
        marks = (self._marks.closing,) if inside else (self._marks.opening,)
        if self._state == self._after and self._frame is not None:
            marks = self._frame
        if held and (followed_by is None or not begins((held + followed_by).lstrip(), 0, marks)):
            if inside:
                self._think(held)
            else:
                self._parts.append(self._rest.push(held))
        self._parts.append(self._rest.finish(followed_by=followed_by))
        return self._joined()

    def _joined(self) -> Scanned:
        parts, self._parts = self._parts, []
        return Scanned(
            "".join(part.content for part in parts),
            joined_calls(call for part in parts for call in part.calls),
            "".join(part.reasoning for part in parts),
        )

    def _before(self, text: str, at: int) -> int:
        """State: reasoning may begin."""
        first = len(text) - len(text[at:].lstrip())
        opening = self._marks.opening
        self._held.append(text[at:first])
        if text.startswith(opening, first):
            self._state, self._held = self._begin, []
            return first + len(opening)
        if opening.startswith(text[first:]):
            self._pending = text[first:]
            return len(text)
        self._parts += map(self._rest.push, self._held)
        self._state, self._held = self._content, []
        return first

    def _begin(self, text: str, at: int) -> int:
        """State: after the opening: spaces and a label are no reasoning."""
        first, label = len(text) - len(text[at:].lstrip()), self._marks.label
        if first == len(text):
            return first
        if label and text.startswith(label, first):
            first += len(label)
        elif label and label.startswith(text[first:]):
            self._pending = text[at:]
            return len(text)
        self._state = self._reasoning
        if self._has_reasoning:
            self._spaces = ["\n"]
        return first

    def _reasoning(self, text: str, at: int) -> int:
        """State: in reasoning."""
        closing = self._marks.closing
        found = text.find(closing, at)
        end = found if found >= 0 else len(text) - overlap(text, at, closing)
        self._think(text[at:end])
        if found >= 0:
            self._spaces, self._state = [], self._after
            return found + len(closing)
        self._pending = text[end:]
        return len(text)

    def _think(self, piece: str) -> None:
        """Add reasoning; hold back spaces at its end, drop them at its beginning."""
        text = piece if self._has_reasoning else piece.lstrip()
        shown = text.rstrip()
        if shown:
            self._has_reasoning = True
            self._parts.append(Scanned(reasoning="".join([*self._spaces, shown])))
            self._spaces = []
        self._spaces.append(text[len(shown) :])

    def _after(self, text: str, at: int) -> int:
        """State: after reasoning: spaces are no content."""
        if text[at].isspace():
            return at + 1
        opening, closing = self._frame or ("", "")
        if opening and text.startswith(opening, at):
            self._rest, self._frame = _FramedReader(self._rest, closing), None
            return at + len(opening)
        if opening.startswith(text[at:]):
            self._pending = text[at:]
            return len(text)
        self._state = self._before if self._marks.anywhere else self._content
        return at

    def _content(self, text: str, at: int) -> int:
        """State: no reasoning can follow, or none has begun."""
        if not self._marks.anywhere:
            self._parts.append(self._rest.push(text[at:]))
            return len(text)
        opening = self._marks.opening
        found = text.find(opening, at)
        end = found if found >= 0 else len(text) - overlap(text, at, opening)
        self._parts.append(self._rest.push(text[at:end]))
        if found >= 0:
            self._state = self._begin
            return found + len(opening)
        self._pending = text[end:]
        return len(text)
