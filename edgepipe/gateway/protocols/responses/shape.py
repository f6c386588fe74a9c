"""Answers in the shape of the Responses API: whole, and as numbered events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgepipe.gateway.completion_service import PreparedCompletion
from edgepipe.gateway.json_pieces import JsonPiece, compact, encoded, json_parts, json_pieces, pieces
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.responses.output import Change, Output, OutputItem
from edgepipe.gateway.protocols.shape import GatheredChoice
from edgepipe.gateway.text import Delta

_DELTAS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_ERROR_CODES = {429: "rate_limit_exceeded"}


def usage(prepared: PreparedCompletion) -> dict[str, Any]:
    """Return the token counts of a response."""
    counts, num_input = prepared.counts, prepared.completion.num_prompt_tokens
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": counts.cached_prompt_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
        "total_tokens": num_input + counts.completion_tokens,
    }


@dataclass(slots=True, kw_only=True)
class ResponseHead:
    """Fields that a response object repeats: id, time, and what the request set. It repeats no prompt and no tools."""

    response_id: str
    created_s: int
    echo: dict[str, Any]

    def body(self, *, status: str, output: Sequence[OutputItem] = (), **changes: Any) -> dict[str, Any]:
        """Build a response object."""
        fields: dict[str, Any] = {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "output": [item.body() for item in output],
            "tools": [],
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None,
        }
        return fields | self.echo | changes


class ResponsesShape:
    """Shape of ``/v1/responses``."""

    media_type = "text/event-stream"

    def __init__(
        self,
        head: ResponseHead,
        prepared: PreparedCompletion,
        output: Output,
        *,
        now_s: Callable[[], float],
        on_end: Callable[[dict[str, Any], Sequence[OutputItem]], None],
    ) -> None:
        """
        output  collects the items
        now_s   seconds of the wall clock
        on_end  gets the finished response and its items
        """
        self._head = head
        self._prepared = prepared
        self._output = output
        self._now_s = now_s
        self._on_end = on_end
        self._number = 2  # number of the next event; the opening has two

    def whole(self, choices: Sequence[GatheredChoice]) -> Iterator[JsonPiece]:
        """See Shape."""
        (choice,) = choices
        delta = Delta(
            choice=0,
            text="".join(choice.text),
            ids=(),
            finish_reason=choice.finish_reason,
            calls=tuple(choice.calls),
            reasoning="".join(choice.reasoning),
        )
        for _ in self._output.add(delta):
            pass
        return json_pieces(self._ended(choice.finish_reason))

    def opening(self) -> Iterator[bytes]:
        """See Shape."""
        body = self._head.body(status="in_progress")
        for number, name in enumerate(("response.created", "response.in_progress")):
            yield from _event(name, number, {"response": body})

    def delta(self, delta: Delta) -> Iterator[bytes]:
        """See Shape. The last delta ends the response: the counts are known by then."""
        for change in self._output.add(delta):
            yield from self._events(change)
        if delta.finish_reason is not None:
            body = self._ended(delta.finish_reason)
            yield from self._next(f"response.{body['status']}", {"response": body})

    def pause(self) -> bytes:
        """See Shape."""
        return b"".join(self._next("response.in_progress", {"response": self._head.body(status="in_progress")}))

    def ending(self) -> bytes:
        """See Shape."""
        return b""

    def error(self, problem: HttpProblem) -> bytes:
        """See Shape."""
        error = {"code": _ERROR_CODES.get(problem.status, "server_error"), "message": problem.message}
        body = self._head.body(status="failed", output=self._output.items, error=error, usage=usage(self._prepared))
        return b"".join(self._next("response.failed", {"response": body}))

    def _ended(self, reason: str) -> dict[str, Any]:
        """Return the finished response, and report it."""
        cut = reason == "length"
        body = self._head.body(
            status="incomplete" if cut else "completed",
            output=self._output.items,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            completed_at=None if cut else int(self._now_s()),
            usage=usage(self._prepared),
        )
        self._on_end(body, self._output.items)
        return body

    def _events(self, change: Change) -> Iterator[bytes]:
        item = change.item
        place: dict[str, Any] = {"item_id": item.item_id, "output_index": item.index}
        name = _DELTAS[item.kind]
        has_parts = item.kind in ("reasoning", "message")
        part_place = place | ({"content_index": 0} if has_parts else {})
        logprobs: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
        if change.what == "grew":
            fields = {"type": f"{name}.delta", "sequence_number": self._take()} | part_place | logprobs
            yield encoded(f"event: {name}.delta\ndata: {compact(fields | {'delta': change.text})}\n\n")
        elif change.what == "began":
            yield from self._next("response.output_item.added", {"output_index": item.index, "item": item.body()})
            if has_parts:
                yield from self._next("response.content_part.added", part_place | {"part": item.part()})
        else:
            yield from self._next(f"{name}.done", part_place | logprobs | _done_fields(item))
            if has_parts:
                yield from self._next("response.content_part.done", part_place | {"part": item.part()})
            yield from self._next("response.output_item.done", {"output_index": item.index, "item": item.body()})

    def _next(self, name: str, fields: dict[str, Any]) -> Iterator[bytes]:
        return _event(name, self._take(), fields)

    def _take(self) -> int:
        self._number += 1
        return self._number - 1


def _done_fields(item: OutputItem) -> dict[str, Any]:
    if item.kind in ("reasoning", "message"):
        return {"text": item.part()["text"]}
    body = item.body()
    if item.kind == "custom_tool_call":
        return {"input": body["input"]}
    return {"arguments": body["arguments"], "name": item.form.name}


def _event(name: str, number: int, fields: dict[str, Any]) -> Iterator[bytes]:
    """Write a numbered event in pieces."""

    def parts() -> Iterator[str]:
        yield f"event: {name}\ndata: "
        yield from json_parts({"type": name, "sequence_number": number} | fields)
        yield "\n\n"

    return (piece.data for piece in pieces(parts()))
