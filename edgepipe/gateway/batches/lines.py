"""Lines of a batch's input, and the entries of its output and error files. PURE."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from edgepipe.gateway.batches.records import TokenUsage

MAX_LINE_BYTES = 8 << 20  # the same bound as a request's body by itself
MAX_ID_CHARS = 512
_SKIPPED_BYTES = 1 << 20  # bytes read at once of the rest of a line that is too long
_BOM = b"\xef\xbb\xbf"
_CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")')


@dataclass(frozen=True, slots=True, kw_only=True)
class RawLine:
    """One line of the input that is not empty."""

    number: int  # counted from 1, empty lines included
    data: bytes | None  # bytes without the line break; None: longer than MAX_LINE_BYTES

    @property
    def num_bytes(self) -> int:
        """Size in memory, in bytes."""
        return len(self.data or b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place in an input file, before a line."""

    offset: int = 0  # bytes
    number: int = 1  # number of the line that begins there


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one line: an entry of the output file, or of the error file."""

    number: int
    entry: bytes  # ends with a line break
    succeeded: bool
    usage: TokenUsage = field(default_factory=TokenUsage)


def read_lines(source: BinaryIO, place: Place) -> Iterator[tuple[RawLine | None, Place]]:
    """Yield lines from ``place`` on, each with the place after it; None for an empty line.

    A long line costs no memory beyond MAX_LINE_BYTES.
    """
    source.seek(place.offset)
    number = place.number
    while data := source.readline(MAX_LINE_BYTES + 1):
        is_long = len(data) > MAX_LINE_BYTES and not data.endswith(b"\n")
        end = data
        while is_long and end and not end.endswith(b"\n"):
            end = source.readline(_SKIPPED_BYTES)
        text = (data.removeprefix(_BOM) if number == 1 else data).strip()
        after = Place(offset=source.tell(), number=number + 1)
        yield (RawLine(number=number, data=None if is_long else text) if text else None), after
        number += 1


def line_fault(data: bytes | None, *, endpoint: str) -> str:
    """Say why a line is no request of a batch for ``endpoint``; empty if it is one. The request itself is not read."""
    if data is None:
        return f"it is longer than {MAX_LINE_BYTES >> 20} MiB"
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError):
        return "it is not valid JSON"
    if not isinstance(value, dict):
        return "it is no JSON object"
    line = cast("dict[str, Any]", value)
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        return f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters"
    if line.get("method") != "POST":
        return "method must be POST"
    if line.get("url") == "/v1/embeddings":
        return "edgepipe computes no embeddings"
    if line.get("url") != endpoint:
        return f"url must be {endpoint}, the endpoint of the batch"
    return "" if isinstance(line.get("body"), dict) else "body must be a JSON object"


def custom_id_of(data: bytes | None) -> str | None:
    """Find the ``custom_id`` of a line that may be broken; None if it has none."""
    match = _CUSTOM_ID.search(data) if data is not None else None
    try:
        return None if match is None else str(json.loads(match[1]))[:MAX_ID_CHARS]
    except ValueError:
        return None


def answer_entry(
    *, entry_id: str, custom_id: str | None, status: int, request_id: str, body: bytes, number: int | None = None
) -> bytes:
    """Build the entry of a line that got an answer. ``body``: JSON. ``number``: of the line, for the error file."""
    place = b"" if number is None else f',"line":{number}'.encode()
    head = f'{{"id":{_json(entry_id)},"custom_id":{_json(custom_id)}'.encode()
    response = f',"response":{{"status_code":{status},"request_id":{_json(request_id)},"body":'.encode()
    return b"".join((head, place, response, body, b'},"error":null}\n'))


def error_entry(*, entry_id: str, custom_id: str | None, number: int, code: str, message: str) -> bytes:
    """Build the entry of a line that was not run."""
    error = {"code": code, "message": f"line {number}: {message}"}
    entry = {"id": entry_id, "custom_id": custom_id, "line": number, "response": None, "error": error}
    return f"{_json(entry)}\n".encode(errors="backslashreplace")


def usage_of(entry: bytes) -> TokenUsage:
    """Return the tokens that an entry of the output file counts; none if it has no such counts."""
    try:
        usage: dict[str, Any] = json.loads(entry)["response"]["body"]["usage"]
        of_prompt: dict[str, Any] = usage.get("prompt_tokens_details") or {}
        of_answer: dict[str, Any] = usage.get("completion_tokens_details") or {}
        return TokenUsage(
            prompt=int(usage["prompt_tokens"]),
            cached=int(of_prompt.get("cached_tokens") or 0),
            completion=int(usage["completion_tokens"]),
            reasoning=int(of_answer.get("reasoning_tokens") or 0),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return TokenUsage()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
