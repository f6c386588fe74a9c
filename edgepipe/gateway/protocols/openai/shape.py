"""Answers in OpenAI's shapes, whole and as server-sent events. Fields that its schema requires are present, even null.

Events are text templates around the piece that changes, so a token's event costs microseconds. What grows with a
client's numbers is written in pieces (``json_pieces``), and made as it is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from edgepipe.errors import RemoteProtocolError
from edgepipe.gateway.completion_service import PreparedCompletion
from edgepipe.gateway.engine_types import RoutedModel
from edgepipe.gateway.json_pieces import (
    PIECE_CHARS,
    JsonPiece,
    TextParts,
    compact,
    encoded,
    json_parts,
    json_pieces,
    pieces,
)
from edgepipe.gateway.logprobs import Scored, TextLogprobs, chat_logprobs
from edgepipe.gateway.model_facts import ModelFacts
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.shape import GatheredChoice, WholeCall
from edgepipe.gateway.schema import RequestBody
from edgepipe.gateway.text import Delta
from edgepipe.gateway.tool_calls import CallDelta

DONE = b"data: [DONE]\n\n"


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
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
    }


def model_card(served: RoutedModel, facts: ModelFacts) -> dict[str, Any]:
    """Describe a model for ``/v1/models``."""
    return {
        "id": served.name,
        "object": "model",
        "created": int(facts.modified_s),
        "owned_by": "edgepipe",
        "max_model_len": served.context_length,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Fields that every part of an answer repeats, and the parts that the client asked for."""

    response_id: str
    created_s: int
    fingerprint: str
    service_tier: str | None
    with_ids: bool  # return_token_ids
    with_usage: bool  # the last event has the usage
    with_running_usage: bool  # every event has the usage so far
    with_details: bool  # the last event names the machines that computed the answer

    @classmethod
    def of(
        cls,
        body: RequestBody,
        prepared: PreparedCompletion,
        *,
        response_id: str,
        created_s: int,
        with_details: bool = False,
    ) -> Head:
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
            with_details=with_details,
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

    def pause(self) -> bytes:
        """See Shape."""
        return b""

    def ending(self) -> bytes:
        """See Shape."""
        parts = f',"usage":{compact(usage(self._prepared))}' if self._head.with_usage else ""
        if self._head.with_details:
            parts += f',"edgepipe":{compact(self._prepared.details())}'
        return (event(f"{self._prefix}]{parts}}}") if parts else b"") + DONE

    def error(self, problem: HttpProblem) -> bytes:
        """See Shape."""
        return event(compact(problem.body()))

    def _event(self, choice: str) -> bytes:
        return event(f"{self._prefix}{choice}]{self._running_usage()}}}")

    def _large_event(self, choice: Iterable[str], more: Iterable[str] = ()) -> Iterator[bytes]:
        """Yield an event in pieces. ``choice`` and ``more`` are parts of JSON that together may be long."""

        def parts() -> Iterator[str]:
            yield f"data: {self._prefix}"
            yield from choice
            yield f"]{self._running_usage()}"
            yield from more
            yield "}\n\n"

        return (piece.data for piece in pieces(parts()))

    def _running_usage(self) -> str:
        return f',"usage":{compact(usage(self._prepared))}' if self._head.with_running_usage else self._null_usage

    def _shows(self, delta: Delta) -> bool:
        ids = delta.ids and (self._head.with_ids or self._wants_logprobs)
        return bool(delta.text or delta.reasoning or delta.calls or ids or delta.finish_reason is not None)


class ChatShape(_EventShape):
    """``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(self, head: Head, prepared: PreparedCompletion, *, streams: bool) -> None:
        super().__init__(head, prepared, kind="chat.completion.chunk" if streams else "chat.completion")

    def whole(self, choices: Sequence[GatheredChoice]) -> Iterator[JsonPiece]:
        """See Shape."""
        body: dict[str, Any] = self._fields | {
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage(self._prepared),
        }
        if self._head.with_details:
            body["edgepipe"] = self._prepared.details()
        if self._head.with_ids:
            body["prompt_token_ids"] = self._prepared.completion.requests[0].prompt
        return json_pieces(body)

    def opening(self) -> Iterator[bytes]:
        """See Shape. The role comes first, so that a client can show an empty answer while the prompt is computed."""
        ids = self._prepared.completion.requests[0].prompt
        for index in range(self._prepared.completion.num_choices):
            more = _member("prompt_token_ids", ids) if self._head.with_ids and index == 0 else ()
            yield from self._large_event([self._part(index, '{"role":"assistant","content":""}')], more)

    def delta(self, delta: Delta) -> Iterable[bytes]:
        """See Shape."""
        if not self._shows(delta):
            return ()
        parts = [f'"reasoning_content":{compact(delta.reasoning)}'] if delta.reasoning else []
        parts += [f'"content":{compact(delta.text)}'] if delta.text else []
        parts += [f'"tool_calls":{compact([_call_piece(piece) for piece in delta.calls])}'] if delta.calls else []
        fields = ",".join(parts)
        more = f',"token_ids":{compact(delta.ids)}' if self._head.with_ids else ""
        scored = Scored(delta.ids, delta.logprobs)
        logprobs = "".join(json_parts(self._logprobs(scored))) if delta.logprobs else "null"
        return (self._event(self._part(delta.choice, f"{{{fields}}}", logprobs, delta.finish_reason, more)),)

    def _part(
        self, index: int, delta: str, logprobs: str = "null", finish_reason: str | None = None, more: str = ""
    ) -> str:
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        return f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{reason}{more}}}'

    def _choice(self, index: int, choice: GatheredChoice) -> dict[str, Any]:
        calls = [_whole_call(call) for call in choice.whole_calls()]
        content = TextParts(choice.text) if any(choice.text) else (None if calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if any(choice.reasoning):
            message["reasoning_content"] = TextParts(choice.reasoning)
        body: dict[str, Any] = {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": self._logprobs(choice.scored()) if self._wants_logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        return body | ({"token_ids": choice.ids} if self._head.with_ids else {})

    def _logprobs(self, scored: Scored) -> dict[str, Any]:
        return {"content": chat_logprobs(self._prepared.assets, scored), "refusal": None}


class TextShape(_EventShape):
    """``text_completion``, whole and streamed."""

    def __init__(self, head: Head, prepared: PreparedCompletion) -> None:
        super().__init__(head, prepared, kind="text_completion")
        self._texts = prepared.texts  # prompts to echo
        self._logprobs = [
            TextLogprobs(prepared.assets, before=() if self._texts else self._prompt(choice))
            for choice in range(prepared.completion.num_choices)
        ]
        self._begun: set[int] = set()  # choices with a sent echo

    def whole(self, choices: Sequence[GatheredChoice]) -> Iterator[JsonPiece]:
        """See Shape."""
        entries: list[dict[str, Any]] = []
        for index, choice in enumerate(choices):
            echo = self._echo(index)
            logprobs = None
            if self._wants_logprobs:
                of_prompt = [(self._scored_prompt(index), len(echo))] if self._texts else []
                logprobs = self._logprobs[index].whole([*of_prompt, (choice.scored(), None)])
            entry: dict[str, Any] = {
                "index": index,
                "text": TextParts([echo, *choice.text]),
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
            }
            if self._head.with_ids:
                entry |= {"token_ids": choice.ids, "prompt_token_ids": self._prompt(index)}
            entries.append(entry)
        return json_pieces(self._fields | {"choices": entries, "usage": usage(self._prepared)})

    def opening(self) -> Iterator[bytes]:
        """See Shape. Only clients that want ids get a part before the first text."""
        for index in range(self._prepared.completion.num_choices if self._head.with_ids else 0):
            part = self._part(index, "", more=',"token_ids":[]')
            yield from self._large_event(chain((part[:-1],), _member("prompt_token_ids", self._prompt(index)), "}"))

    def delta(self, delta: Delta) -> Iterable[bytes]:
        """See Shape. The first delta of a choice brings the echo, once the prompt's log-probabilities are known."""
        if self._texts and delta.choice not in self._begun:
            self._begun.add(delta.choice)
            return chain(self._echo_events(delta.choice), self._new(delta))
        return self._new(delta)

    def _new(self, delta: Delta) -> Iterator[bytes]:
        if not self._shows(delta):
            return
        logprobs = "null"
        if self._wants_logprobs and delta.ids:
            logprobs = self._written(delta.choice, Scored(delta.ids, delta.logprobs))
        more = f',"token_ids":{compact(delta.ids)}' if self._head.with_ids else ""
        yield self._event(self._part(delta.choice, delta.text, logprobs, delta.finish_reason, more))

    def _echo_events(self, choice: int) -> Iterator[bytes]:
        """Yield the echo: with log-probabilities, a run of tokens and their text in each event."""
        echo, sent = self._echo(choice), 0
        more = ',"token_ids":[]' if self._head.with_ids else ""
        if self._wants_logprobs:
            for run in self._scored_prompt(choice).cut():
                logprobs = self._written(choice, run)
                end = min(self._logprobs[choice].offset, len(echo))
                yield self._event(self._part(choice, echo[sent:end], logprobs, more=more))
                sent = end
            self._logprobs[choice].offset = len(echo)
        while sent < len(echo) or not (sent or self._wants_logprobs):
            end = max(1, min(sent + PIECE_CHARS, len(echo)))
            yield self._event(self._part(choice, echo[sent:end], more=more))
            sent = end

    def _written(self, choice: int, scored: Scored) -> str:
        return "".join(json_parts(self._logprobs[choice].add(scored)))

    def _part(
        self, index: int, text: str, logprobs: str = "null", finish_reason: str | None = None, more: str = ""
    ) -> str:
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        return f'{{"index":{index},"text":{compact(text)},"logprobs":{logprobs},"finish_reason":{reason}{more}}}'

    def _echo(self, choice: int) -> str:
        return self._texts[self._prepared.completion.prompt_of(choice)] if self._texts else ""

    def _prompt(self, choice: int) -> tuple[int, ...]:
        return self._prepared.completion.requests[self._prepared.completion.prompt_of(choice)].prompt

    def _scored_prompt(self, choice: int) -> Scored:
        """Return the choice's prompt with its log-probabilities. Raises RemoteProtocolError if some are missing."""
        prompt = self._prompt(choice)
        scores = self._prepared.counts.prompt_logprobs[self._prepared.completion.prompt_of(choice)]
        if len(scores) != len(prompt) - 1:
            raise RemoteProtocolError(
                "the engine left out log-probabilities of the prompt",
                fact=f"it sent {len(scores)} for {len(prompt) - 1} tokens",
            )
        return Scored(prompt, scores, num_unscored=1)


def _member(name: str, value: object) -> Iterator[str]:
    """Yield a further member of an object in parts."""
    yield f',"{name}":'
    yield from json_parts(value)


def _whole_call(call: WholeCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": TextParts(call.arguments)}
    return {"id": call.call_id, "type": "function", "function": function}


def _call_piece(piece: CallDelta) -> dict[str, Any]:
    if not piece.name:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.call_id, "type": "function", "function": function}
