"""Tool calls: the pieces that clients get, and calls as values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of one call in OpenAI's streams: first the id and the name, once; then pieces of the arguments."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""  # JSON text


@dataclass(frozen=True, slots=True)
class Scanned:
    """Content, calls and reasoning in a piece of text."""

    content: str = ""  # text outside calls and reasoning
    calls: tuple[CallDelta, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call of an earlier turn."""

    name: str
    arguments: Mapping[str, Any]


def call_id(request_id: str, choice: int, index: int) -> str:
    """Return the id of a choice's ``index``-th call. It depends on the request only, so a resumed answer keeps it."""
    digest = hashlib.sha256(f"{request_id}/{choice}/{index}".encode()).hexdigest()
    return f"call_{digest[:24]}"


def joined_calls(pieces: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
    """Join the pieces of each call: clients refuse two entries of one index in a delta."""
    found: dict[int, list[CallDelta]] = {}
    for piece in pieces:
        found.setdefault(piece.index, []).append(piece)
    return tuple(replace(parts[0], arguments="".join(part.arguments for part in parts)) for parts in found.values())
