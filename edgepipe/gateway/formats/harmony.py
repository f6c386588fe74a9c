"""gpt-oss' answers: messages in channels. Source: https://github.com/openai/harmony, docs/format.md.

A header (``<|channel|>``, perhaps ``to=`` and ``<|constrain|>``) and a body make a message. The channel ``analysis`` is
reasoning, ``final`` and ``commentary`` are content, and a message to ``functions.NAME`` is a call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from edgepipe.gateway.formats.chat_format import CallForm, Channels, ChatFormat, Functions, Reasoning
from edgepipe.gateway.formats.json_calls import any_call, written_json
from edgepipe.gateway.formats.tagged import begins
from edgepipe.gateway.tool_call_json import CallArguments, CallNews
from edgepipe.gateway.tool_calls import Call, Scanned
from edgepipe.sampling.grammar import json_rule

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_AFTER_BODY = re.compile(r"<\|(?:end|call|return|start|channel)\|>")
_BODY_MARKS = (*_ENDS, _START, _CHANNEL)
_MAX_MARK_CHARS = max(map(len, _BODY_MARKS))
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER_STARTS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS, "assistant", "to=")
_MAX_HEADER_CHARS = 256
_FUNCTIONS = "functions."


class HarmonyReader:
    """Reads messages as they arrive; see TextReader. A text without a header is content.

    A message to an unknown recipient, or a call whose body is no JSON object, is content without its header.
    """

    def __init__(self, calls: CallNews, functions: Functions) -> None:
        self._calls = calls
        self._functions = functions
        self._state = self._header
        self._pending = ""  # text that may be an incomplete header or mark
        self._name = ""  # name of the function that the body calls; empty: no call
        self._arguments: CallArguments | None = None
        self._ended = False  # the arguments are complete
        self._is_reasoning = False
        self._parts: dict[bool, list[str]] = {True: [], False: []}  # reasoning and content
        self._gap = dict.fromkeys((True, False), "")  # text between this message's text and an earlier one's
        self._shown = dict.fromkeys((True, False), False)

    @property
    def in_call(self) -> bool:
        """See TextReader."""
        return self._arguments is not None and not self._ended

    def push(self, text: str) -> Scanned:
        """See TextReader."""
        text, self._pending = self._pending + text, ""
        at = 0
        while at < len(text):
            at = self._state(text, at)
        return self._scanned()

    def finish(self, *, followed_by: str | None = None) -> Scanned:
        """See TextReader."""
        held, self._pending = self._pending, ""
        if self._state == self._header:
            if followed_by is None and "<|" not in held and "to=" not in held:
                self._show(held)
        elif held and (followed_by is None or not begins(held + followed_by, 0, _BODY_MARKS)):
            self._add(held)
        return self._scanned()

    def _scanned(self) -> Scanned:
        reasoning, content = "".join(self._parts[True]), "".join(self._parts[False])
        self._parts[True].clear()
        self._parts[False].clear()
        return Scanned(content, self._calls.take(), reasoning)

    def _header(self, text: str, at: int) -> int:
        """State: before a body."""
        limit = at + _MAX_HEADER_CHARS
        first = at + len(text[at:limit]) - len(text[at:limit].lstrip())
        for mark in _ENDS:
            if text.startswith(mark, first):
                return first + len(mark)
        if begins(text, first, _HEADER_STARTS):
            end = text.find(_MESSAGE, first, limit)
            if end >= 0:
                self._open(text[first:end])
                return end + len(_MESSAGE)
        elif first < min(len(text), limit):
            self._open("")
            return at
        if len(text) < limit:
            self._pending = text[at:]
            return len(text)
        if text.startswith("<|", first):  # no header follows; its mark is never content
            return text.index(">", first) + 1
        self._open("")
        return at

    def _open(self, header: str) -> None:
        """Begin the body of a message with this header."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        name = recipient[1].removeprefix(_FUNCTIONS) if recipient is not None else ""
        self._name = name if name in self._functions else ""
        self._arguments, self._ended = None, False
        self._is_reasoning = channel is not None and channel[1] == "analysis" and not self._name
        self._gap[self._is_reasoning] = "\n" if self._shown[self._is_reasoning] else ""
        self._state = self._body

    def _body(self, text: str, at: int) -> int:
        """State: in a body."""
        found = _AFTER_BODY.search(text, at)
        if found is None:
            end = len(text) - _mark_overlap(text, at)
            self._add(text[at:end])
            self._pending = text[end:]
            return len(text)
        self._add(text[at : found.start()])
        if self._arguments is not None and not self._ended:
            self._ended = True  # the mark ends the arguments, though they are no complete object
        self._state = self._header
        return found.end() if found.group() in _ENDS else found.start()

    def _add(self, text: str) -> None:
        """Take a part of the body."""
        if self._name and self._arguments is None and text.strip():
            if text.lstrip().startswith("{"):
                self._calls.begin(self._name)
                self._arguments = CallArguments(self._calls)
                text = text.lstrip()
            else:
                self._name = ""
        if self._arguments is None:
            if not self._name:
                self._show(text)
        elif not self._ended:
            _, self._ended = self._arguments.feed(text, 0)

    def _show(self, text: str) -> None:
        if text:
            self._parts[self._is_reasoning].append(self._gap[self._is_reasoning] + text)
            self._gap[self._is_reasoning], self._shown[self._is_reasoning] = "", True


class HarmonySpans(HarmonyReader):
    """Cuts a text into spans, see ``answer_stops.Spans``: headers, ends of messages and reasoning are no answer."""

    def __init__(self, functions: Functions) -> None:
        super().__init__(CallNews(str), functions)
        self._spans: list[tuple[str, bool]] = []

    def feed(self, text: str) -> Sequence[tuple[str, bool]]:
        """Take the next piece."""
        self.push(text)
        spans, self._spans = self._spans, []
        return spans

    def rest(self) -> tuple[str, bool]:
        """Return what was held back, at the end of the text."""
        return self._pending, self._state == self._body and not self._is_reasoning

    def _header(self, text: str, at: int) -> int:
        end = super()._header(text, at)
        self._spans.append((text[at : end - len(self._pending)], False))
        return end

    def _body(self, text: str, at: int) -> int:
        end = super()._body(text, at)
        body = text[at : end - len(self._pending)]
        mark = next(filter(body.endswith, _ENDS), "")
        self._spans += [(body.removesuffix(mark), not self._is_reasoning), (mark, False)]
        return end


def _mark_overlap(text: str, at: int) -> int:
    """Return the length of the end of ``text[at:]`` that may begin a mark."""
    start = text.rfind("<", max(at, len(text) - _MAX_MARK_CHARS + 1))
    return len(text) - start if start >= 0 and any(mark.startswith(text[start:]) for mark in _BODY_MARKS) else 0


_ASIDES = (
    f'asides: (aside "{_START}assistant")*',
    r"aside[lazy]: /<\|channel\|>(analysis|commentary)<\|message\|>(.|\n)*<\|end\|>/",
)
_BOUNDED_ASIDES = (
    f'asides: (thought "{_START}assistant")? (preamble "{_START}assistant")*',
    r"thought[lazy]: /<\|channel\|>analysis<\|message\|>(.|\n)*<\|end\|>/",
    r"preamble[lazy]: /<\|channel\|>commentary<\|message\|>(.|\n)*<\|end\|>/",
)
_FINAL = r"FINAL: /<\|channel\|>final( ?<\|constrain\|>[A-Za-z]{1,16})?<\|message\|>/"


def _rules(functions: Functions, form: CallForm) -> list[str]:
    """Bind a call, after any reasoning. An answer has one call: its end mark ends the answer."""
    calls = [
        f"call_{index}: HEAD_{index} {json_rule(schema)}\n{_head_terminal(index, name)}"
        for index, (name, schema) in enumerate(functions.items())
    ]
    last = "call" if form.forced else "(call | FINAL ANYTHING)"
    return [f"answer: asides {last}", _FINAL, any_call(len(calls)), *calls]


def _head_terminal(index: int, name: str) -> str:
    """Return the header of a call: its recipient stands before or after the channel."""
    to, kind = rf" to=functions\.{re.escape(name)}", r"( ?<\|constrain\|>json| json)?"
    channel = r"<\|channel\|>(analysis|commentary)"
    return rf"HEAD_{index}: /({to}{channel}|{channel}{to}){kind}<\|message\|>/"


def _write(calls: Sequence[Call]) -> str:
    return f"{_START}assistant".join(
        f"{_CHANNEL}commentary to={_FUNCTIONS}{call.name} {_CONSTRAIN}json"
        f"{_MESSAGE}{written_json(call.arguments)}<|call|>"
        for call in calls
    )


HARMONY = ChatFormat(
    name="harmony",
    marks=(_START, "<|end|>", _CHANNEL, _MESSAGE, _CONSTRAIN),
    new_reader=HarmonyReader,
    call_rules=_rules,
    write=_write,
    form_rules=("answer: asides FINAL form", _FINAL),
    free_rules=("answer: asides FINAL ANYTHING", _FINAL),
    channels=Channels(
        asides=_ASIDES,
        bounded_asides=_BOUNDED_ASIDES,
        thought=Reasoning(opening=f"{_CHANNEL}analysis{_MESSAGE}", closing="<|end|>"),
    ),
)
"""``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>``."""
