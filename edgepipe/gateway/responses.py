"""Answers in OpenAI's shapes, whole and as server-sent events. Fields that its schema requires are present, even null.

Events are text templates around the piece that changes, so a token's event costs microseconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgepipe.gateway.completion_service import PreparedCompletion
from edgepipe.gateway.engine_types import ServedModel
from edgepipe.gateway.logprobs import TextLogprobs, chat_logprobs
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.schema import RequestBody
from edgepipe.gateway.text import Delta
from edgepipe.gateway.tool_calls import CallDelta
from edgepipe.sampling import LogprobLog, TokenLogprobs

DONE = b"data: [DONE]\n\n"


def compact(value: object) -> str:
    """Write JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def encoded(text: str) -> bytes:
    """Encode JSON. Halves of surrogate pairs, which UTF-8 lacks, become JSON's escapes again."""
    return text.encode(errors="backslashreplace")


def event(body: str) -> bytes:
    """Write one server-sent event."""
    return encoded(f"data: {body}\n\n")


def usage(prepared: PreparedCompletion) -> dict[str, Any]:
    """Return the token counts of a request so far."""
    prompt_tokens, counts = prepared.completion.num_prompt_tokens, prepared.counts
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_prompt_tokens},
    }


def model_card(served: ServedModel, *, created_s: int) -> dict[str, Any]:
    """Describe a model for ``/v1/models``."""
    return {
        "id": served.name,
        "object": "model",
        "created": created_s,
        "owned_by": "edgepipe",
        "max_model_len": served.context_length,
    }


@dataclass(slots=True)
class GatheredChoice:
    """A choice of an unstreamed answer."""

    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    ids: list[int] = field(default_factory=list[int])
    logprobs: LogprobLog = field(default_factory=LogprobLog)
    calls: list[CallDelta] = field(default_factory=list[CallDelta])
    finish_reason: str = ""

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.text.append(delta.text)
        self.reasoning.append(delta.reasoning)
        self.ids.extend(delta.ids)
        self.logprobs.extend(delta.logprobs)
        self.calls.extend(delta.calls)
        self.finish_reason = delta.finish_reason or self.finish_reason

    def whole_calls(self) -> list[dict[str, Any]]:
        """Return the tool calls with joined pieces."""
        found: dict[int, dict[str, Any]] = {}
        for piece in self.calls:
            call = found.setdefault(
                piece.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            call["id"] += piece.call_id
            call["function"]["name"] += piece.name
            call["function"]["arguments"] += piece.arguments
        return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Fields that every part of an answer repeats, and the parts that the client asked for."""

    response_id: str
    created_s: int
    fingerprint: str
    service_tier: str | None
    with_ids: bool  # return_token_ids
    with_usage: bool  # in the last event
    with_running_usage: bool  # in every event

    @classmethod
    def of(cls, body: RequestBody, prepared: PreparedCompletion, *, response_id: str, created_s: int) -> Head:
        """Build the head from a request."""
        options = body.stream_options
        served = prepared.entry.served
        made_of = f"{served.pipeline_id}/{served.epoch.engine_id}"
        return cls(
            response_id=response_id,
            created_s=created_s,
            fingerprint="fp_" + hashlib.sha256(made_of.encode()).hexdigest()[:10],
            service_tier=None if body.service_tier is None else ("flex" if body.is_batch else "default"),
            with_ids=bool(body.return_token_ids),
            with_usage=bool(options and options.include_usage),
            with_running_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        )

    def fields(self, kind: str, prepared: PreparedCompletion) -> dict[str, Any]:
        """Return the first fields of a body."""
        fields: dict[str, Any] = {
            "id": self.response_id,
            "object": kind,
            "created": self.created_s,
            "model": prepared.completion.model,
            "system_fingerprint": self.fingerprint,
        }
        return fields | ({"service_tier": self.service_tier} if self.service_tier else {})


class Shape(Protocol):
    """Form of one endpoint's answers."""

    media_type: str  # of a stream

    def whole(self, choices: Sequence[GatheredChoice]) -> dict[str, Any]:
        """Return the body of an unstreamed answer."""
        ...

    def opening(self) -> bytes:
        """Return the start of a stream, before the first delta."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """Return the part of a stream for a delta; empty if the client would see no change."""
        ...

    def ending(self) -> bytes:
        """Return the end of a stream without an error."""
        ...

    def error(self, problem: HttpProblem) -> bytes:
        """Return the end of a stream with an error."""
        ...


class _EventShape:
    """Common parts of OpenAI's two endpoints."""

    media_type = "text/event-stream"

    def __init__(self, head: Head, prepared: PreparedCompletion, *, kind: str) -> None:
        self._head = head
        self._prepared = prepared
        self._wants_logprobs = prepared.completion.requests[0].sampling.logprobs
        self._fields = head.fields(kind, prepared)
        self._prefix = compact(self._fields)[:-1] + ',"choices":['
        self._null_usage = ',"usage":null' if head.with_usage else ""

    def ending(self) -> bytes:
        """See Shape."""
        if not self._head.with_usage:
            return DONE
        return event(f'{self._prefix}],"usage":{compact(usage(self._prepared))}}}') + DONE

    def error(self, problem: HttpProblem) -> bytes:
        """See Shape."""
        return event(compact(problem.body()))

    def _event(self, choice: str, more: str = "") -> bytes:
        numbers = f',"usage":{compact(usage(self._prepared))}' if self._head.with_running_usage else self._null_usage
        return event(f"{self._prefix}{choice}]{numbers}{more}}}")

    def _shows(self, delta: Delta) -> bool:
        ids = delta.ids and (self._head.with_ids or self._wants_logprobs)
        return bool(delta.text or delta.reasoning or delta.calls or ids or delta.finish_reason is not None)


class ChatShape(_EventShape):
    """``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(self, head: Head, prepared: PreparedCompletion, *, streams: bool) -> None:
        super().__init__(head, prepared, kind="chat.completion.chunk" if streams else "chat.completion")

    def whole(self, choices: Sequence[GatheredChoice]) -> dict[str, Any]:
        """See Shape."""
        body: dict[str, Any] = self._fields | {
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage(self._prepared),
        }
        if self._head.with_ids:
            body["prompt_token_ids"] = list(self._prepared.completion.requests[0].prompt)
        return body

    def opening(self) -> bytes:
        """See Shape. The role comes first, so that a client can show an empty answer while the prompt is computed."""
        ids = self._prepared.completion.requests[0].prompt
        more = f',"prompt_token_ids":{compact(ids)}' if self._head.with_ids else ""
        return b"".join(
            self._event(self._part(index, '{"role":"assistant","content":""}'), more if index == 0 else "")
            for index in range(self._prepared.completion.num_choices)
        )

    def delta(self, delta: Delta) -> bytes:
        """See Shape."""
        if not self._shows(delta):
            return b""
        parts = [f'"reasoning_content":{compact(delta.reasoning)}'] if delta.reasoning else []
        parts += [f'"content":{compact(delta.text)}'] if delta.text else []
        parts += [f'"tool_calls":{compact([_call_piece(piece) for piece in delta.calls])}'] if delta.calls else []
        fields = ",".join(parts)
        more = f',"token_ids":{compact(delta.ids)}' if self._head.with_ids else ""
        logprobs = compact(self._logprobs(delta.ids, delta.logprobs)) if delta.logprobs else "null"
        return self._event(self._part(delta.choice, f"{{{fields}}}", logprobs, delta.finish_reason, more))

    def _part(
        self, index: int, delta: str, logprobs: str = "null", finish_reason: str | None = None, more: str = ""
    ) -> str:
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        return f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{reason}{more}}}'

    def _choice(self, index: int, choice: GatheredChoice) -> dict[str, Any]:
        text, calls, reasoning = "".join(choice.text), choice.whole_calls(), "".join(choice.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        body: dict[str, Any] = {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": self._logprobs(choice.ids, choice.logprobs) if self._wants_logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        return body | ({"token_ids": choice.ids} if self._head.with_ids else {})

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(self._prepared.assets, ids, logprobs)


class TextShape(_EventShape):
    """``text_completion``, whole and streamed."""

    def __init__(self, head: Head, prepared: PreparedCompletion) -> None:
        super().__init__(head, prepared, kind="text_completion")
        self._texts = prepared.texts  # to echo
        self._logprobs = [
            TextLogprobs(prepared.assets, before=() if self._texts else self._prompt(choice))
            for choice in range(prepared.completion.num_choices)
        ]
        self._begun: set[int] = set()  # choices with a sent echo

    def whole(self, choices: Sequence[GatheredChoice]) -> dict[str, Any]:
        """See Shape."""
        entries: list[dict[str, Any]] = []
        for index, choice in enumerate(choices):
            logprobs = self._of_prompt(index) if self._wants_logprobs and self._texts else None
            if self._wants_logprobs:
                new = self._logprobs[index].add(choice.ids, choice.logprobs)
                logprobs = {name: logprobs[name] + part for name, part in new.items()} if logprobs else new
            entry: dict[str, Any] = {
                "index": index,
                "text": self._echo(index) + "".join(choice.text),
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
            }
            if self._head.with_ids:
                entry |= {"token_ids": choice.ids, "prompt_token_ids": self._prompt(index)}
            entries.append(entry)
        return self._fields | {"choices": entries, "usage": usage(self._prepared)}

    def opening(self) -> bytes:
        """See Shape. Only clients that want ids get a part before the first text."""
        if not self._head.with_ids:
            return b""
        return b"".join(
            self._event(
                self._part(index, "", more=f',"token_ids":[],"prompt_token_ids":{compact(self._prompt(index))}')
            )
            for index in range(self._prepared.completion.num_choices)
        )

    def delta(self, delta: Delta) -> bytes:
        """See Shape. The first delta of a choice brings the echo, once the prompt's log-probabilities are known."""
        echo = self._begin(delta.choice) if self._texts and delta.choice not in self._begun else b""
        if not self._shows(delta):
            return echo
        logprobs = "null"
        if self._wants_logprobs and delta.ids:
            logprobs = compact(self._logprobs[delta.choice].add(delta.ids, delta.logprobs))
        more = f',"token_ids":{compact(delta.ids)}' if self._head.with_ids else ""
        return echo + self._event(self._part(delta.choice, delta.text, logprobs, delta.finish_reason, more))

    def _begin(self, choice: int) -> bytes:
        self._begun.add(choice)
        logprobs = compact(self._of_prompt(choice)) if self._wants_logprobs else "null"
        more = ',"token_ids":[]' if self._head.with_ids else ""
        return self._event(self._part(choice, self._echo(choice), logprobs, more=more))

    def _part(
        self, index: int, text: str, logprobs: str = "null", finish_reason: str | None = None, more: str = ""
    ) -> str:
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        return f'{{"index":{index},"text":{compact(text)},"logprobs":{logprobs},"finish_reason":{reason}{more}}}'

    def _echo(self, choice: int) -> str:
        return self._texts[self._prepared.completion.prompt_of(choice)] if self._texts else ""

    def _prompt(self, choice: int) -> tuple[int, ...]:
        return self._prepared.completion.requests[self._prepared.completion.prompt_of(choice)].prompt

    def _of_prompt(self, choice: int) -> dict[str, Any]:
        scored = self._prepared.counts.prompt_logprobs[self._prepared.completion.prompt_of(choice)]
        part = self._logprobs[choice].add(self._prompt(choice), [None, *scored])
        self._logprobs[choice].move_to(len(self._echo(choice)))
        return part


def _call_piece(piece: CallDelta) -> dict[str, Any]:
    if not piece.name:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}
