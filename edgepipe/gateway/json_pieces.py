"""Writes JSON in pieces: each takes a bounded amount of work, whatever the size of the answer. No I/O.

A piece takes some milliseconds, so an event loop that runs others between two pieces serves them without a pause.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

PIECE_CHARS = 16 << 10  # size of one piece; scores with alternatives cost most per character: some 3 ms per piece
_LEAST_CHARS = 256  # each part of a piece counts as at least so many, so that many small ones fill a piece, too
_TEXT_CHARS = 16 << 10  # a longer text is written in several parts
_SLICE_ITEMS = 256  # numbers and short texts that are written at once
_SHORT_CHARS = 64


@dataclass(frozen=True, slots=True)
class ArrayParts:
    """An array that is made as it is written, a bounded number of items at a time."""

    parts: Iterable[Sequence[object]]


@dataclass(frozen=True, slots=True)
class TextParts:
    """A text that is joined as it is written."""

    parts: Iterable[str]


@dataclass(frozen=True, slots=True)
class JsonPiece:
    """Some bytes of an answer."""

    data: bytes
    more: bool  # further pieces follow


def compact(value: object) -> str:
    """Write small JSON at once, without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def encoded(text: str) -> bytes:
    """Encode JSON. Halves of surrogate pairs, which UTF-8 lacks, become JSON's escapes again."""
    return text.encode(errors="backslashreplace")


def json_pieces(value: object) -> Iterator[JsonPiece]:
    """Write JSON without spaces. ``value`` may contain ArrayParts and TextParts."""
    return pieces(json_parts(value))


def pieces(parts: Iterable[str]) -> Iterator[JsonPiece]:
    """Join parts to pieces of about PIECE_CHARS; the last one may be empty."""
    held, size = list[str](), 0
    for part in parts:
        held.append(part)
        size += max(len(part), _LEAST_CHARS)
        if size >= PIECE_CHARS:
            yield JsonPiece(encoded("".join(held)), more=True)
            held, size = [], 0
    yield JsonPiece(encoded("".join(held)), more=False)


def json_parts(value: object) -> Iterator[str]:
    """Yield JSON in parts that each take a bounded amount of work."""
    if isinstance(value, str) and len(value) > _TEXT_CHARS:
        yield from _text([value])
    elif isinstance(value, TextParts):
        yield from _text(value.parts)
    elif isinstance(value, dict):
        yield from _object(cast("dict[str, Any]", value))
    elif isinstance(value, ArrayParts):
        yield from _array(value.parts)
    elif isinstance(value, (list, tuple)):
        yield from _items(cast("Sequence[object]", value))
    else:
        yield compact(value)


def _text(parts: Iterable[str]) -> Iterator[str]:
    yield '"'
    for part in parts:
        for start in range(0, len(part), _TEXT_CHARS):
            yield compact(part[start : start + _TEXT_CHARS])[1:-1]
    yield '"'


def _object(value: dict[str, Any]) -> Iterator[str]:
    between = "{"
    for key, member in value.items():
        yield f"{between}{compact(key)}:"
        yield from json_parts(member)
        between = ","
    yield "}" if value else "{}"


def _array(parts: Iterable[Sequence[object]]) -> Iterator[str]:
    yield "["
    between = ""
    for part in parts:
        yield between + compact(part)[1:-1] if part else ""
        between = between or ("," if part else "")
    yield "]"


def _items(value: Sequence[object]) -> Iterator[str]:
    yield "["
    for start in range(0, len(value), _SLICE_ITEMS):
        part = value[start : start + _SLICE_ITEMS]
        if start:
            yield ","
        if all(map(_is_short, part)):
            yield compact(part)[1:-1]
            continue
        for place, item in enumerate(part):
            if place:
                yield ","
            yield from json_parts(item)
    yield "]"


def _is_short(value: object) -> bool:
    return value is None or isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= _SHORT_CHARS)
