"""Items of a conversation in the Responses API, and their conversion to messages of the common form."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator, Field, model_validator

from edgepipe.gateway.content_parts import MAX_PARTS, Content, LongText
from edgepipe.gateway.json_pieces import compact
from edgepipe.gateway.schema import Text
from edgepipe.gateway.strict_body import WithoutNulls, misfit

MAX_ITEMS = 8192
_ROLES = ("user", "assistant", "system", "developer")
_ITEM_BYTES = 1024  # an item without its texts
_IMAGE_NOTICE = "[An image was here. This model reads text only.]"
_FILE_NOTICE = "[A file was here. This model reads text only.]"
_NOTICES = {"input_image": _IMAGE_NOTICE, "image": _IMAGE_NOTICE, "input_file": _FILE_NOTICE, "file": _FILE_NOTICE}
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
}
_LEFT_OUT = frozenset(
    {
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Items of tools that other servers run themselves. Clients send them back with the history of a chat."""


def result_text(value: object) -> object:
    """Join the parts of a tool's result. A notice takes the place of images and files: clients resend results."""
    if not isinstance(value, list):
        return value
    parts = cast("list[object]", value)
    if len(parts) > MAX_PARTS:
        raise ValueError(f"it has more than {MAX_PARTS} parts")
    return "".join(map(_part_text, parts))


def _part_text(part: object) -> str:
    fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    kind, text = fields.get("type"), fields.get("text")
    if isinstance(kind, str) and kind in _NOTICES:
        return _NOTICES[kind]
    if not isinstance(text, str):
        raise ValueError("only parts like {'type': 'input_text', 'text': '...'} are supported")
    return text


_RawParts = Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)]
_Result = Annotated[LongText | None, BeforeValidator(result_text, json_schema_input_type=LongText | _RawParts | None)]


class InputItem(WithoutNulls):
    """One item of a conversation: a message, reasoning, a call, or the result of a call."""

    kinds: ClassVar[Iterable[str]] = _REQUIRED

    type: Text = "message"
    id: Text | None = None
    role: Text | None = None
    content: Content = None  # content of a message, or of reasoning
    call_id: Text | None = None
    name: Text | None = None
    namespace: Text | None = None
    arguments: LongText | None = None
    input: LongText | None = None
    output: _Result = None

    @model_validator(mode="before")
    @classmethod
    def _joined_reasoning(cls, raw: Any) -> Any:
        """Join the texts of a reasoning item, whose parts have types of their own."""
        fields = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
        if fields.get("type") != "reasoning" or not isinstance(fields.get("content"), list):
            return cast("object", raw)
        parts = cast("list[object]", fields["content"])[:MAX_PARTS]
        texts = [cast("dict[str, Any]", part).get("text") for part in parts if isinstance(part, dict)]
        return {**fields, "content": "".join(text for text in texts if isinstance(text, str))}

    @model_validator(mode="after")
    def _is_whole(self) -> InputItem:
        if self.type == "item_reference":
            raise misfit("type", "items of type 'item_reference' are not supported; send the item itself")
        if self.type not in _REQUIRED and self.type not in _LEFT_OUT:
            raise misfit("type", f"items of type '{self.type[:64]}' are not supported")
        for name in _REQUIRED.get(self.type, ()):
            optional = name == "content" and self.role == "assistant"
            if getattr(self, name) is None and not optional:
                raise misfit(name, f"{name} is required for an item of type '{self.type}'")
        if self.type == "message" and self.role not in _ROLES:
            raise misfit("role", f"role must be one of {', '.join(_ROLES)}")
        return self

    @property
    def called(self) -> str:
        """The function that a call calls, by the name in the common form."""
        return flat_name(self.name or "", self.namespace)

    @property
    def held_bytes(self) -> int:
        """Estimated memory, in bytes."""
        texts = (self.content, self.arguments, self.input, self.output)
        return _ITEM_BYTES + sum(sys.getsizeof(text) for text in texts if text)

    def shown(self, place: str) -> dict[str, Any]:
        """Return the item as a list of input items shows it. ``place``: the id of an item that came without one."""
        body: dict[str, Any] = {"id": self.id or place, "type": self.type, "status": "completed"}
        if self.type == "message":
            kind = "output_text" if self.role == "assistant" else "input_text"
            more: dict[str, Any] = {"annotations": []} if self.role == "assistant" else {}
            return body | {"role": self.role, "content": [{"type": kind, "text": self.content or ""} | more]}
        if self.type == "reasoning":
            return body | reasoning_fields([self.content or ""])
        given = self.model_dump(include={"call_id", "name", "namespace", "arguments", "input", "output"})
        return body | {name: value for name, value in given.items() if value is not None}


def reasoning_fields(text: object) -> dict[str, Any]:
    """Return the fields of a reasoning item. ``text``: a list with its text."""
    texts = cast("list[object]", text)
    content = [{"type": "reasoning_text", "text": each} for each in texts]
    return {"summary": [], "content": content, "encrypted_content": None}


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool in the common form, which has no namespaces."""
    return f"{namespace}__{name}" if namespace else name


def messages_of(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Convert items to messages. Reasoning, a text and calls that follow one another are one turn of the assistant."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's turn that further items may belong to
    for item in items:
        if item.type in ("function_call", "custom_tool_call"):
            turn = turn if turn is not None else _new_turn(messages)
            turn.setdefault("tool_calls", []).append(_call(item))
        elif item.type == "reasoning":
            turn = _new_turn(messages)
            turn["reasoning_content"] = item.content or ""
        elif item.type == "message" and item.role == "assistant":
            if turn is None or "content" in turn or "tool_calls" in turn:
                turn = _new_turn(messages)
            turn["content"] = item.content or ""
        elif item.type == "message":
            turn = None
            messages.append({"role": item.role, "content": item.content})
        elif item.type in _REQUIRED:
            turn = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
    return messages


def _new_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant"}
    messages.append(turn)
    return turn


def _call(item: InputItem) -> dict[str, Any]:
    custom = item.type == "custom_tool_call"
    arguments = compact({"input": item.input}) if custom else item.arguments or ""
    return {"id": item.call_id, "type": "function", "function": {"name": item.called, "arguments": arguments}}
