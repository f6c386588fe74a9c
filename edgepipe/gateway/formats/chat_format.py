"""The interface of the formats: read an answer's text, bind it by a grammar, write earlier calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgepipe.gateway.tool_call_json import CallNews
from edgepipe.gateway.tool_calls import Call, Scanned

Functions = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by the name of the function."""


class TextReader(Protocol):
    """Finds calls in one choice's text as it arrives. The result does not depend on the pieces of the text.

    A reader never raises for any text, and reads each character a bounded number of times. Text that proves to be no
    call is content, unchanged. A call's markup is never content: a reader drops an unfinished call at the end.
    """

    @property
    def in_call(self) -> bool:
        """Whether a call is incomplete."""
        ...

    def push(self, text: str) -> Scanned:
        """Take the next piece."""
        ...

    def finish(self, *, followed_by: str | None = None) -> Scanned:
        """Return what was held back, at the end of the text.

        followed_by  known continuation of a text that was cut: if it could begin a call, the held text is dropped
        """
        ...


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Marks around the part of an answer that is reasoning."""

    opening: str
    closing: str
    label: str = ""  # text after the opening that is no reasoning
    anywhere: bool = False  # reasoning may follow content; else it can only begin the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Messages before an answer in channels: rules of a grammar for ``asides``, and the marks around reasoning."""

    asides: tuple[str, ...]
    bounded_asides: tuple[str, ...]  # asides with one message of reasoning at most, which comes first
    thought: Reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """What a request binds about the calls of an answer."""

    forced: bool  # a call is required
    several: bool  # calls may follow each other


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """A model family's way to write calls and reasoning."""

    name: str
    marks: tuple[str, ...]  # tokens around calls, which have text even if the model marks them as special
    new_reader: Callable[[CallNews, Functions], TextReader]
    call_rules: Callable[[Functions, CallForm], list[str]]
    """Lark rules of an answer with calls. The rule ``answer`` is the start. ``ANYTHING`` is any text, and ``PLAIN`` any
    text that does not begin with reasoning."""
    write: Callable[[Sequence[Call]], str]  # calls as the model would write them
    reasoning: Reasoning | None = None
    answer_frame: tuple[str, str] | None = None  # marks around an answer that follows reasoning
    frames_content: bool = False  # content is between marks, in answers without calls too
    form_rules: tuple[str, ...] = ("answer: form",)  # rules of an answer whose content is bound to the rule ``form``
    free_rules: tuple[str, ...] = ("answer: PLAIN",)  # rules of an answer whose reasoning alone is bound
    channels: Channels | None = None

    @property
    def has_channels(self) -> bool:
        """Whether all of an answer is in channels, its reasoning too: harmony."""
        return self.channels is not None

    @property
    def reasons(self) -> bool:
        """Whether answers may have reasoning."""
        return self.has_channels or self.reasoning is not None

    def opens_reasoning(self, prompt: str) -> bool:
        """Return whether a prompt ends where the model reasons, with or without the label after the opening."""
        marks = self.reasoning
        return marks is not None and prompt.rstrip().endswith((marks.opening, marks.opening + marks.label))

    def kept_marks(self, *, calls: bool) -> tuple[str, ...]:
        """Return the special tokens that have text, for an answer that may have calls or not."""
        own = self.marks if calls or self.has_channels else ()
        return own if self.reasoning is None else (*own, self.reasoning.opening, self.reasoning.closing)
