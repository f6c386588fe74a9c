"""Request bodies: bounded in size, then parsed as JSON more strictly than Python's parser does."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, NoReturn, cast

from starlette.requests import ClientDisconnect, Request

from edgepipe.errors import QueueFull
from edgepipe.gateway.problems import HttpProblem, bad_request, from_error
from edgepipe.gateway.shares import Holding
from edgepipe.plain_words import plain

MAX_BODY_BYTES = 8 << 20  # a prompt of 1 M tokens as text or as ids
MAX_DEPTH = 32  # message parts nest 5 levels, tool schemas about 20
_COPIES = 2  # memory in multiples of a body's size: its bytes, and the text that is read from them
_CLOSE = {"Connection": "close"}  # the gateway reads no more of the body, see ``LingeringTransport``
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: Request, *, memory: Holding, within_s: float, of_any_type: bool = False) -> bytes:
    """Read the whole body. Raises HttpProblem: 415 not plain JSON, 413 too large, 408 too slow, 400 incomplete, 429.

    memory       counts the body before it arrives, or while it arrives if its length is not declared
    of_any_type  accept any Content-Type
    """
    _check_encoding(request.headers.getlist("content-encoding"))
    if not of_any_type:
        _check_content_type(request.headers.get("content-type", ""))
    try:
        async with asyncio.timeout(within_s):
            return await _gather(request.stream(), _declared_bytes(request), memory)
    except TimeoutError as exc:
        raise HttpProblem(
            status=408, message="the body did not arrive in time", code="request_timeout", headers=_CLOSE
        ) from exc
    except ClientDisconnect as exc:
        raise bad_request("the body is incomplete", code="body_incomplete") from exc


def _declared_bytes(request: Request) -> int:
    text = request.headers.get("content-length", "0")
    return int(text) if text.isdigit() else 0


async def _gather(chunks: AsyncIterator[bytes], declared_bytes: int, memory: Holding) -> bytes:
    """Return the chunks as one. Raises HttpProblem for a body that is too large, or has no room in memory."""
    body = bytearray()
    counted_bytes, expected_bytes = 0, declared_bytes
    try:
        while True:
            if expected_bytes > MAX_BODY_BYTES:
                raise _too_large()
            _count(memory, expected_bytes - counted_bytes)
            counted_bytes = expected_bytes
            chunk = await anext(chunks, None)
            if chunk is None:
                return bytes(body)
            body += chunk
            expected_bytes = max(expected_bytes, len(body))
    except HttpProblem:
        body.clear()  # the error refers to this frame until the garbage collector runs
        raise


class _Refused(ValueError):
    """JSON that the API does not take; the text says why."""


def _count(memory: Holding, num_bytes: int) -> None:
    """Count bytes of a body. Raises HttpProblem 429."""
    try:
        memory.take(_COPIES * num_bytes)
    except QueueFull as exc:
        problem = from_error(exc)
        problem.message = f"the body: {problem.message}"
        problem.headers = {**problem.headers, **_CLOSE}
        raise problem from exc


def parse_json_object(body: bytes, *, name: str = "the body", param: str | None = None) -> dict[str, Any]:
    """Parse a JSON object. Raises HttpProblem 400, also for NaN, Infinity, equal keys, lone surrogates, deep nesting.

    ``name`` and ``param`` are for the problem, if the JSON is the text of a field.
    """
    try:
        value: object = json.loads(
            body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
        _check_depth(value, MAX_DEPTH)
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as exc:
        raise bad_request(f"{name} is nested too deeply", param=param, code="invalid_json") from exc
    except UnicodeError as exc:
        raise bad_request(f"{name} is not valid UTF-8 text", param=param, code="invalid_json") from exc
    except ValueError as exc:
        raise bad_request(f"{name} is not valid JSON: {plain(exc)}", param=param, code="invalid_json") from exc
    if not isinstance(value, dict):
        raise bad_request(f"{name} must be a JSON object", param=param, code="invalid_json")
    return cast("dict[str, Any]", value)


def _check_encoding(values: Sequence[str]) -> None:
    given = [word.strip().lower() for value in values for word in value.split(",")]
    if packed := next((word for word in given if word not in ("", "identity")), ""):
        raise HttpProblem(
            status=415,
            message=f"the body has Content-Encoding: {packed[:40]}; send it uncompressed",
            code="unsupported_encoding",
            headers={"Accept-Encoding": "identity", **_CLOSE},
        )


def _check_content_type(value: str) -> None:
    kind = value.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HttpProblem(
            status=415, message="send the body with Content-Type: application/json", code="unsupported_media_type"
        )


def _too_large() -> HttpProblem:
    return HttpProblem(
        status=413,
        message=f"the body is larger than {MAX_BODY_BYTES >> 20} MiB",
        code="request_too_large",
        headers=_CLOSE,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Refused("a key occurs twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"{text[:20]} is too large")
    return value


def _check_depth(value: object, left: int) -> None:
    if isinstance(value, dict):
        items: Any = cast("dict[str, Any]", value).values()
    elif isinstance(value, list):
        items = cast("list[Any]", value)
    else:
        return
    if left == 0:
        raise _Refused(f"it has more than {MAX_DEPTH} levels of nesting")
    for item in items:
        if isinstance(item, (dict, list)):
            _check_depth(cast("object", item), left - 1)
