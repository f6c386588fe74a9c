"""The child process that reads large bodies: ``python -m edgepipe.gateway.body_child``.

Python's parsers hold the interpreter's lock: in the gateway itself 8 MB of JSON would hold up every stream for a fifth
of a second, in a thread, too. A question (``edgepipe.model.frames``) is a line of JSON, ``{"kind", "context"}``, and
the body; the answer is a byte and what ``pack`` makes of the checked body, or the problem with it as JSON.
"""

from __future__ import annotations

import importlib
import json
import signal
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any, cast

from edgepipe.gateway.body import parse_json_object
from edgepipe.gateway.context import check_length
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.schema import BodyT, Checked, CompletionBody, DetokenizeBody, validate
from edgepipe.model.frames import read_frame, write_frame

GOOD, BAD = b"+", b"-"
_COUNT = struct.Struct(">I")


def kind_name(kind: type[Checked]) -> str:
    """By which the child finds the type."""
    return f"{kind.__module__}:{kind.__qualname__}"


def pack(body: Checked) -> tuple[bytes, ...]:
    """A checked body in little time to read: its JSON, and token ids as 32-bit numbers behind it."""
    lists: Sequence[list[int]] = ()
    if isinstance(body, CompletionBody):
        lists = [prompt for prompt in body.prompt if isinstance(prompt, list)]
        empty = [[0] if isinstance(prompt, list) else prompt for prompt in body.prompt]
        body = body.model_copy(update={"prompt": empty})
    elif isinstance(body, DetokenizeBody):
        lists = [body.tokens]
        body = body.model_copy(update={"tokens": []})
    text = body.model_dump_json(exclude_unset=True).encode()
    parts = [_COUNT.pack(len(text)), text]
    for ids in lists:
        parts += [_COUNT.pack(len(ids)), array("I", ids).tobytes()]
    return tuple(parts)


def unpack(kind: type[BodyT], data: memoryview) -> BodyT:
    """The body that was packed."""
    text, at = _block(data, 0, 1)
    body = kind.model_validate_json(bytes(text))
    lists: list[list[int]] = []
    while at < len(data):
        block, at = _block(data, at, array("I").itemsize)
        lists.append(array("I", bytes(block)).tolist())
    if isinstance(body, CompletionBody):
        found = iter(lists)
        prompts = [next(found) if isinstance(prompt, list) else prompt for prompt in body.prompt]
        return body.model_copy(update={"prompt": prompts})
    if isinstance(body, DetokenizeBody):
        return body.model_copy(update={"tokens": lists[0]})
    return body


def _block(data: memoryview, at: int, item_size: int) -> tuple[memoryview, int]:
    (count,) = _COUNT.unpack_from(data, at)
    end = at + _COUNT.size + count * item_size
    return data[at + _COUNT.size : end], end


def answer(question: bytes) -> tuple[bytes, ...]:
    """To one question; whatever is wrong with the body is in it."""
    head, _, body = question.partition(b"\n")
    asked = cast("dict[str, Any]", json.loads(head))
    module, _, name = asked["kind"].partition(":")
    kind = cast("type[Checked]", getattr(importlib.import_module(module), name))
    try:
        checked = validate(kind, parse_json_object(body))
        _check_length(checked, asked["context"])
    except HttpProblem as problem:
        fields = {name: getattr(problem, name) for name in ("status", "message", "code", "param")}
        return BAD, json.dumps(fields).encode()
    return GOOD, *pack(checked)


def _check_length(body: Checked, context_length: int) -> None:
    """More ids than any model takes need not be carried over. Raises HttpProblem."""
    if not isinstance(body, CompletionBody) or not context_length:
        return
    for prompt in body.prompt:
        if isinstance(prompt, list):
            check_length(len(prompt), context_length, param="prompt")


def main() -> None:
    """Answer until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    source, target = sys.stdin.buffer, sys.stdout.buffer
    write_frame(target, b"ready")
    while (question := read_frame(source)) is not None:
        write_frame(target, b"".join(answer(question)))


if __name__ == "__main__":
    main()
