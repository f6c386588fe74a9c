"""Answers in OpenAI's shapes, whole and as server-sent events. Fields that its schema requires are there, even null."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgepipe.gateway.completion import Completion, Counts
from edgepipe.gateway.engine_types import ServedModel
from edgepipe.gateway.text import Delta

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage(completion: Completion, counts: Counts) -> dict[str, Any]:
    """Token counts of a request."""
    return {
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": completion.num_prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_prompt_tokens},
    }


def model_card(served: ServedModel, *, created_s: int) -> dict[str, Any]:
    """A model as ``/v1/models`` lists it."""
    return {
        "id": served.name,
        "object": "model",
        "created": created_s,
        "owned_by": "edgepipe",
        "max_model_len": served.context_length,
    }


@dataclass(slots=True)
class GatheredChoice:
    """A choice of an answer that is sent whole."""

    text: list[str] = field(default_factory=list[str])
    ids: list[int] = field(default_factory=list[int])
    finish_reason: str = ""

    def add(self, delta: Delta) -> None:
        """Append what became visible."""
        self.text.append(delta.text)
        self.ids.extend(delta.ids)
        self.finish_reason = delta.finish_reason or self.finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every part of an answer repeats."""

    response_id: str
    created_s: int
    model: str
    with_ids: bool  # return_token_ids

    def fields(self, kind: str) -> dict[str, Any]:
        """The first fields of a body."""
        return {"id": self.response_id, "object": kind, "created": self.created_s, "model": self.model}


class Shape(Protocol):
    """The form of one endpoint's answers."""

    def whole(self, completion: Completion, choices: Sequence[GatheredChoice], counts: Counts) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def opening(self, completion: Completion) -> list[dict[str, Any]]:
        """Chunks before the first text."""
        ...

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """The chunk of a delta; None if a client would see nothing new."""
        ...

    def usage_chunk(self, completion: Completion, counts: Counts) -> dict[str, Any]:
        """The last chunk, when usage was asked for."""
        ...


class ChatShape:
    """``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(self, head: Head, *, include_usage: bool) -> None:
        self._head = head
        self._null_usage: dict[str, Any] = {"usage": None} if include_usage else {}

    def whole(self, completion: Completion, choices: Sequence[GatheredChoice], counts: Counts) -> dict[str, Any]:
        """See Shape."""
        body = self._head.fields("chat.completion")
        body["choices"] = [self._choice(index, choice) for index, choice in enumerate(choices)]
        body["usage"] = usage(completion, counts)
        if self._head.with_ids:
            body["prompt_token_ids"] = list(completion.requests[0].prompt)
        return body

    def opening(self, completion: Completion) -> list[dict[str, Any]]:
        """See Shape. The role comes first, so that a client can show the answer's place while the prompt is read."""
        chunks = [
            self._chunk(index, {"role": "assistant", "content": ""}, None) for index in range(completion.num_choices)
        ]
        if self._head.with_ids:
            chunks[0]["prompt_token_ids"] = list(completion.requests[0].prompt)
        return chunks

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """See Shape."""
        if not delta.text and delta.finish_reason is None and not (self._head.with_ids and delta.ids):
            return None
        body = self._chunk(delta.choice, {"content": delta.text} if delta.text else {}, delta.finish_reason)
        if self._head.with_ids:
            body["choices"][0]["token_ids"] = list(delta.ids)
        return body

    def usage_chunk(self, completion: Completion, counts: Counts) -> dict[str, Any]:
        """See Shape."""
        return self._head.fields("chat.completion.chunk") | {"choices": [], "usage": usage(completion, counts)}

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        body = self._head.fields("chat.completion.chunk")
        body["choices"] = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]
        return body | self._null_usage

    def _choice(self, index: int, choice: GatheredChoice) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        return body | ({"token_ids": choice.ids} if self._head.with_ids else {})


class TextShape:
    """``text_completion``, whole and streamed."""

    def __init__(self, head: Head, *, include_usage: bool) -> None:
        self._head = head
        self._null_usage: dict[str, Any] = {"usage": None} if include_usage else {}

    def whole(self, completion: Completion, choices: Sequence[GatheredChoice], counts: Counts) -> dict[str, Any]:
        """See Shape."""
        prompts = _prompt_of_choice(completion)
        body = self._head.fields("text_completion")
        entries: list[dict[str, Any]] = []
        for index, choice in enumerate(choices):
            entry = _text_choice(index, "".join(choice.text), choice.finish_reason)
            if self._head.with_ids:
                entry |= {"token_ids": choice.ids, "prompt_token_ids": prompts[index]}
            entries.append(entry)
        return body | {"choices": entries, "usage": usage(completion, counts)}

    def opening(self, completion: Completion) -> list[dict[str, Any]]:
        """See Shape. Only clients that want ids see anything before the first text."""
        if not self._head.with_ids:
            return []
        chunks: list[dict[str, Any]] = []
        for index, prompt in enumerate(_prompt_of_choice(completion)):
            entry = _text_choice(index, "", None) | {"token_ids": [], "prompt_token_ids": prompt}
            chunks.append(self._chunk(entry))
        return chunks

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """See Shape."""
        if not delta.text and delta.finish_reason is None and not (self._head.with_ids and delta.ids):
            return None
        entry = _text_choice(delta.choice, delta.text, delta.finish_reason)
        return self._chunk(entry | ({"token_ids": list(delta.ids)} if self._head.with_ids else {}))

    def usage_chunk(self, completion: Completion, counts: Counts) -> dict[str, Any]:
        """See Shape."""
        return self._head.fields("text_completion") | {"choices": [], "usage": usage(completion, counts)}

    def _chunk(self, entry: dict[str, Any]) -> dict[str, Any]:
        return self._head.fields("text_completion") | {"choices": [entry]} | self._null_usage


def _text_choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _prompt_of_choice(completion: Completion) -> list[list[int]]:
    return [list(request.prompt) for request in completion.requests for _ in range(request.num_choices)]
