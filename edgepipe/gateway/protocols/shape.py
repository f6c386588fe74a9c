"""The form of answers: a protocol that every API implements, and an unstreamed answer's choices."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from edgepipe.gateway.json_pieces import JsonPiece
from edgepipe.gateway.logprobs import Scored
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.text import Delta
from edgepipe.gateway.tool_calls import CallDelta
from edgepipe.sampling import LogprobLog

_MAX_NESTING = 100  # deepest nesting of a call's arguments that every JSON reader takes


class Shape(Protocol):
    """Form of one endpoint's answers."""

    media_type: str  # a stream's media type

    def whole(self, choices: Sequence[GatheredChoice]) -> Iterator[JsonPiece]:
        """Yield the body of an unstreamed answer."""
        ...

    def opening(self) -> Iterator[bytes]:
        """Yield the start of a stream, before the first delta, in pieces."""
        ...

    def delta(self, delta: Delta) -> Iterable[bytes]:
        """Yield the part of a stream for a delta, in pieces; none if the client would see no change.

        The last piece of an event, and no other, ends with a line break.
        """
        ...

    def pause(self) -> bytes:
        """Return an event that tells clients in a long pause that the answer goes on; empty if comments suffice."""
        ...

    def ending(self) -> bytes:
        """Return the end of a stream without an error."""
        ...

    def error(self, problem: HttpProblem) -> bytes:
        """Return the end of a stream with an error."""
        ...


@dataclass(slots=True)
class GatheredChoice:
    """A choice of an unstreamed answer."""

    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    ids: list[int] = field(default_factory=list[int])
    logprobs: LogprobLog = field(default_factory=LogprobLog)
    calls: list[CallDelta] = field(default_factory=list[CallDelta])
    finish_reason: str = ""
    stopped_by: str = ""  # the stop string that ended it

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.text.append(delta.text)
        self.reasoning.append(delta.reasoning)
        self.ids.extend(delta.ids)
        self.logprobs.extend(delta.logprobs)
        self.calls.extend(delta.calls)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stopped_by = delta.stopped_by or self.stopped_by

    def scored(self) -> Scored:
        """Return the tokens with their log-probabilities."""
        return Scored(self.ids, self.logprobs)

    def whole_calls(self) -> list[WholeCall]:
        """Return the tool calls; each with the pieces of its arguments."""
        found: dict[int, WholeCall] = {}
        for piece in self.calls:
            call = found.setdefault(piece.index, WholeCall(call_id=piece.call_id, name=piece.name))
            call.arguments.append(piece.arguments)
        return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeCall:
    """A tool call of an unstreamed answer."""

    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list[str])  # pieces of JSON

    def value(self) -> object:
        """Return the arguments as a value; None if they are incomplete, or too deep to be written again."""
        try:
            value: object = json.loads("".join(self.arguments))
        except (ValueError, RecursionError):
            return None
        return None if _is_deep(value) else value


def _is_deep(value: object) -> bool:
    """Return whether arrays and objects are nested further than what is sure to be written and read as JSON."""
    level = [value]
    for _ in range(_MAX_NESTING):
        level = [part for each in level for part in _parts(each)]
    return bool(level)


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()
