"""Tool calls: the formats of model families, and the pieces that clients get."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum


class ToolFormat(Enum):
    """Format of a model family's calls."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once per call: Qwen, Hermes, SmolLM
    LLAMA = "llama"  # {"name": ..., "parameters": {...}} as the whole answer, perhaps after <|python_tag|>
    MISTRAL = "mistral"  # [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
    MISTRAL_ARGS = "mistral-args"  # [TOOL_CALLS]name[ARGS]{...}, once per call: since tokenizer version 11


def detect_format(template: str) -> ToolFormat:
    """Return the format that a chat template mentions, else Hermes': it is the most common, and easy to explain."""
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL_ARGS if "[ARGS]" in template else ToolFormat.MISTRAL
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters"' in template):
        return ToolFormat.LLAMA
    return ToolFormat.HERMES


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of one call in OpenAI's streams: first the id and the name, once; then pieces of the arguments."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""  # JSON text


@dataclass(frozen=True, slots=True)
class Scanned:
    """Content and calls in a piece of text."""

    content: str = ""  # text outside calls
    calls: tuple[CallDelta, ...] = ()


def call_id(request_id: str, choice: int, index: int) -> str:
    """Return the id of a choice's ``index``-th call. It depends on the request only, so a resumed answer keeps it."""
    digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"
