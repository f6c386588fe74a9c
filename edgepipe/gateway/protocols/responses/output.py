"""The output of a response: items that grow with the deltas of one choice (PURE)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from edgepipe.gateway.json_pieces import TextParts
from edgepipe.gateway.protocols.responses.items import InputItem, reasoning_fields
from edgepipe.gateway.protocols.responses.tools import ToolForm
from edgepipe.gateway.text import MAX_PART_CHARS, Delta
from edgepipe.gateway.tool_calls import CallDelta

_NO_TOOL = ToolForm(name="")
Kind = Literal["reasoning", "message", "function_call", "custom_tool_call"]
_PREFIXES: dict[Kind, str] = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}


@dataclass(slots=True, kw_only=True)
class OutputItem:
    """One item of an output."""

    kind: Kind
    item_id: str
    index: int
    form: ToolForm  # form of a call
    call_id: str = ""
    texts: list[str] = field(default_factory=list[str])  # the text so far, or the arguments or input of a call
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"

    def body(self) -> dict[str, Any]:
        """Return the item as answers show it."""
        body: dict[str, Any] = {"id": self.item_id, "type": self.kind, "status": self.status}
        if self.kind == "message":
            return body | {"role": "assistant", "content": [self.part()] if self.texts else []}
        if self.kind == "reasoning":
            return body | reasoning_fields([TextParts(self.texts)] if self.texts else [])
        namespace = {"namespace": self.form.namespace} if self.form.namespace else {}
        body |= {"call_id": self.call_id, "name": self.form.name} | namespace
        return body | {"input" if self.kind == "custom_tool_call" else "arguments": TextParts(self.texts)}

    def part(self) -> dict[str, Any]:
        """Return the only content part of a message or of reasoning."""
        text = TextParts(list(self.texts))
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def as_input(self) -> InputItem:
        """Return the item as a later request would send it back."""
        text = "".join(self.texts)
        if self.kind == "message":
            return InputItem(type="message", id=self.item_id, role="assistant", content=text)
        if self.kind == "reasoning":
            return InputItem(type="reasoning", id=self.item_id, content=text)
        is_custom = self.kind == "custom_tool_call"
        return InputItem(
            type=self.kind,
            id=self.item_id,
            call_id=self.call_id,
            name=self.form.name,
            namespace=self.form.namespace,
            arguments=None if is_custom else text,
            input=text if is_custom else None,
        )


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to an item: it began, it grew by a text, or it ended."""

    item: OutputItem
    what: Literal["began", "grew", "ended"]
    text: str = ""


class Output:
    """The items of one answer. Reasoning, text and each call are items in the order in which they begin."""

    def __init__(self, *, suffix: str, form: Callable[[str], ToolForm]) -> None:
        """
        suffix  ends the items' ids
        form    how the client names a tool
        """
        self.items: list[OutputItem] = []
        self._suffix = suffix
        self._form = form
        self._open: OutputItem | None = None
        self._call_index = -1  # index of the open call in the choice's calls
        self._arguments: list[str] = []  # JSON of the open call of a custom tool

    def add(self, delta: Delta) -> Iterator[Change]:
        """Add a delta and yield the changes. The last delta ends the open item."""
        if delta.reasoning:
            yield from self._text("reasoning", delta.reasoning)
        if delta.text:
            yield from self._text("message", delta.text)
        for call in delta.calls:
            yield from self._call(call)
        if delta.finish_reason is not None:
            yield from self._end("incomplete" if delta.finish_reason == "length" else "completed")

    def _text(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        yield from self._grow(text)

    def _call(self, call: CallDelta) -> Iterator[Change]:
        if self._open is None or self._call_index != call.index:
            form = self._form(call.name)
            kind: Kind = "custom_tool_call" if form.custom else "function_call"
            yield from self._begin(kind, form, call.call_id)
            self._call_index = call.index
        assert self._open is not None
        if self._open.kind == "custom_tool_call":
            self._arguments.append(call.arguments)
        elif call.arguments:
            yield from self._grow(call.arguments)

    def _begin(self, kind: Kind, form: ToolForm = _NO_TOOL, call_id: str = "") -> Iterator[Change]:
        yield from self._end("completed")
        index = len(self.items)
        item_id = f"{_PREFIXES[kind]}_{self._suffix}_{index}"
        self._open = OutputItem(kind=kind, item_id=item_id, index=index, form=form, call_id=call_id)
        self.items.append(self._open)
        yield Change(self._open, "began")

    def _grow(self, text: str) -> Iterator[Change]:
        assert self._open is not None
        self._open.texts.append(text)
        yield Change(self._open, "grew", text)

    def _end(self, status: Literal["completed", "incomplete"]) -> Iterator[Change]:
        if self._open is None:
            return
        if self._open.kind == "custom_tool_call":
            text = _input_of("".join(self._arguments))
            for start in range(0, len(text), MAX_PART_CHARS):
                yield from self._grow(text[start : start + MAX_PART_CHARS])
            self._arguments = []
        self._open.status = status
        yield Change(self._open, "ended")
        self._open, self._call_index = None, -1


def _input_of(arguments: str) -> str:
    """Return the text ``input`` of a call's arguments; of arguments that were cut off, the beginning."""
    for ending in ("", "}", '"}', 'n"}', '\\"}'):
        try:
            value: object = json.loads(arguments + ending)
        except (ValueError, RecursionError):
            continue
        text = cast("dict[str, object]", value).get("input") if isinstance(value, dict) else None
        return text if isinstance(text, str) else ""
    return ""
