"""Answers in Ollama's shape: whole, and as lines of JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from edgepipe.clock import Clock
from edgepipe.gateway.completion_service import PreparedCompletion
from edgepipe.gateway.json_pieces import JsonPiece, TextParts, json_parts, json_pieces, pieces
from edgepipe.gateway.logprobs import Scored, chat_logprobs
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.shape import GatheredChoice, WholeCall
from edgepipe.gateway.text import Delta
from edgepipe.gateway.tool_calls import CallDelta

_MAX_NESTING = 100  # deepest nesting of a call's arguments that every JSON reader takes


class OllamaShape:
    """Ollama's answers: lines of JSON, the last one with the numbers of the answer. ``piece``: the field with text."""

    media_type = "application/x-ndjson"

    def __init__(self, prepared: PreparedCompletion, clock: Clock, *, chat: bool) -> None:
        self._prepared = prepared
        self._clock = clock
        self._chat = chat
        self._began_s = clock.monotonic_s()
        self._first_s: float | None = None
        self._reason = "stop"
        self._calls: list[CallDelta] = []

    def whole(self, choices: Sequence[GatheredChoice]) -> Iterator[JsonPiece]:
        """See Shape."""
        (choice,) = choices
        self._reason = choice.finish_reason
        calls = _calls_with_objects(choice.whole_calls())
        logprobs = self._logprobs(choice.scored())
        return json_pieces(self._line(choice.text, calls, choice.reasoning) | logprobs | self._numbers())

    def opening(self) -> Iterator[bytes]:
        """See Shape."""
        return iter(())

    def delta(self, delta: Delta) -> Iterable[bytes]:
        """See Shape. The last text comes with all calls, whole."""
        if self._first_s is None:
            self._first_s = self._clock.monotonic_s()
        self._reason = delta.finish_reason or self._reason
        self._calls += delta.calls
        calls: list[dict[str, Any]] = []
        if delta.finish_reason is not None and self._calls:
            calls = _calls_with_objects(GatheredChoice(calls=self._calls).whole_calls())
        logprobs = self._logprobs(Scored(delta.ids, delta.logprobs))
        has_scores = bool(logprobs) and any(map(self._prepared.assets.token_bytes, delta.ids))
        if not (delta.text or delta.reasoning or calls or has_scores):
            return ()
        return line_pieces(self._line([delta.text], calls, [delta.reasoning]) | logprobs | {"done": False})

    def pause(self) -> bytes:
        """See Shape. A line of its own would be a part of the answer."""
        return b""

    def ending(self) -> bytes:
        """See Shape."""
        return b"".join(line_pieces(self._line([], []) | self._numbers()))

    def error(self, problem: HttpProblem) -> bytes:
        """See Shape."""
        return b"".join(line_pieces({"error": problem.message}))

    def _line(self, text: Sequence[str], calls: list[dict[str, Any]], reasoning: Sequence[str] = ()) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._prepared.completion.model,
            "created_at": time_text(self._clock.wall_s()),
        }
        thinking = {"thinking": TextParts(reasoning)} if any(reasoning) else {}
        if not self._chat:
            return body | {"response": TextParts(text)} | thinking
        message: dict[str, Any] = {"role": "assistant", "content": TextParts(text)} | thinking
        if calls:
            message["tool_calls"] = calls
        return body | {"message": message}

    def _logprobs(self, scored: Scored) -> dict[str, Any]:
        if not self._prepared.completion.requests[0].sampling.logprobs:
            return {}
        return {"logprobs": chat_logprobs(self._prepared.assets, scored)}

    def _numbers(self) -> dict[str, Any]:
        now_s = self._clock.monotonic_s()
        first_s = now_s if self._first_s is None else self._first_s
        return {
            "done": True,
            "done_reason": "stop" if self._reason == "tool_calls" else self._reason,
            "total_duration": _ns(now_s - self._began_s),
            "load_duration": 0,
            "prompt_eval_count": self._prepared.completion.num_prompt_tokens,
            "prompt_eval_duration": _ns(first_s - self._began_s),
            "eval_count": self._prepared.counts.completion_tokens,
            "eval_duration": _ns(now_s - first_s),
        }


def _calls_with_objects(calls: Sequence[WholeCall]) -> list[dict[str, Any]]:
    """Convert calls to Ollama's form. It has arguments as an object, so incomplete or too deep ones are dropped."""
    values = [(call.name, call.value()) for call in calls]
    return [{"function": {"name": name, "arguments": value}} for name, value in values if value is not None]


def line_pieces(body: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a line in pieces."""
    return (piece.data for piece in pieces(chain(json_parts(body), ("\n",))))


def time_text(wall_s: float) -> str:
    """Write a time of the wall clock as Ollama does."""
    return datetime.fromtimestamp(wall_s, UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
