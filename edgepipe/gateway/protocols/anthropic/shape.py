"""Answers in Anthropic's form, whole and as server-sent events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from edgepipe.gateway.completion_service import PreparedCompletion
from edgepipe.gateway.json_pieces import JsonPiece, TextParts, compact, encoded, json_pieces
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.anthropic.errors import anthropic_error
from edgepipe.gateway.protocols.shape import GatheredChoice
from edgepipe.gateway.text import Delta

SIGNATURE = "edgepipe"
"""Every block of reasoning has this signature. Clients send it back; edgepipe does not check it."""

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class MessagesShape:
    """``message``, whole and streamed. A stream has one open block at a time."""

    media_type = "text/event-stream"

    def __init__(self, prepared: PreparedCompletion, *, message_id: str, shows_thinking: bool) -> None:
        self._prepared = prepared
        self._message_id = message_id
        self._shows_thinking = shows_thinking
        self._stops = prepared.completion.stops
        self._open = ""  # content of the open block: thinking, text, or the index of a call; empty: no block is open
        self._index = -1  # index of the last block
        self._reason, self._stopped_by = "stop", ""

    def whole(self, choices: Sequence[GatheredChoice]) -> Iterator[JsonPiece]:
        """See Shape."""
        (choice,) = choices
        self._reason, self._stopped_by = choice.finish_reason, choice.stopped_by
        blocks: list[dict[str, Any]] = []
        if self._shows_thinking and any(choice.reasoning):
            blocks.append({"type": "thinking", "thinking": TextParts(choice.reasoning), "signature": SIGNATURE})
        if any(choice.text):
            blocks.append({"type": "text", "text": TextParts(choice.text)})
        for call in choice.whole_calls():
            if isinstance(value := call.value(), dict):  # a call that was cut off has none
                blocks.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": value})
        return json_pieces(self._message(blocks) | self._end() | {"usage": self._usage()})

    def opening(self) -> Iterator[bytes]:
        """See Shape."""
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        yield _event("message_start", {"message": message}) + self.pause()

    def delta(self, delta: Delta) -> Iterable[bytes]:
        """See Shape."""
        parts: list[str] = []
        if delta.reasoning and self._shows_thinking:
            parts += self._begun("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            parts.append(self._piece("thinking_delta", "thinking", delta.reasoning))
        if delta.text:
            parts += self._begun("text", {"type": "text", "text": ""})
            parts.append(self._piece("text_delta", "text", delta.text))
        for call in delta.calls:
            head: dict[str, Any] = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
            parts += self._begun(f"call {call.index}", head)
            if call.arguments:
                parts.append(self._piece("input_json_delta", "partial_json", call.arguments))
        if delta.finish_reason is not None:
            self._reason, self._stopped_by = delta.finish_reason, delta.stopped_by
        return (encoded("".join(parts)),) if parts else ()

    def pause(self) -> bytes:
        """See Shape."""
        return _event("ping", {})

    def ending(self) -> bytes:
        """See Shape. Only now the engine has said how many tokens of the prompt were cached."""
        closing = encoded("".join(self._closed()))
        end = _event("message_delta", {"delta": self._end(), "usage": self._usage()})
        return closing + end + _event("message_stop", {})

    def error(self, problem: HttpProblem) -> bytes:
        """See Shape."""
        return encoded(f"event: error\ndata: {compact(anthropic_error(problem))}\n\n")

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._prepared.completion.model,
            "content": content,
        }

    def _end(self) -> dict[str, Any]:
        if self._stopped_by and self._stopped_by in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stopped_by}
        return {"stop_reason": _REASONS[self._reason], "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        counts = self._prepared.counts
        return {
            "input_tokens": self._prepared.completion.num_prompt_tokens - counts.cached_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached_prompt_tokens,
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"thinking_tokens": counts.reasoning_tokens},
        }

    def _begun(self, what: str, block: dict[str, Any]) -> list[str]:
        """Return the events that make a block the open one."""
        if self._open == what:
            return []
        closing = self._closed()
        self._open = what
        self._index += 1
        return [*closing, _text("content_block_start", {"index": self._index, "content_block": block})]

    def _closed(self) -> list[str]:
        """Return the events that close the open block."""
        events = [self._piece("signature_delta", "signature", SIGNATURE)] if self._open == "thinking" else []
        if self._open:
            events.append(_text("content_block_stop", {"index": self._index}))
        self._open = ""
        return events

    def _piece(self, kind: str, field: str, text: str) -> str:
        delta = f'{{"type":"{kind}","{field}":{compact(text)}}}'
        head = f'{{"type":"content_block_delta","index":{self._index}'
        return f'event: content_block_delta\ndata: {head},"delta":{delta}}}\n\n'


def _text(kind: str, fields: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {compact({'type': kind} | fields)}\n\n"


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return encoded(_text(kind, fields))
