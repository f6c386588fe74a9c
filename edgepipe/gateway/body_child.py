"""Child process that reads large bodies: ``python -m edgepipe.gateway.body_child``.

Python's parsers hold the interpreter's lock: in the gateway process, 8 MB of JSON would block every stream for a fifth
of a second, also in a thread. A question (``edgepipe.children.frames``) is a line of JSON, ``{"kind", "context"}``, and
the body. The answer is a byte, then the checked body from ``pack``, or its problem as JSON.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any, cast

from edgepipe.children.frames import HEAD, answer_frames, pack_ids, unpack_ids
from edgepipe.gateway.body import parse_json_object
from edgepipe.gateway.context import check_length
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.schema import CompletionBody, DetokenizeBody
from edgepipe.gateway.strict_body import BodyT, StrictBody, validate

GOOD, BAD = b"+", b"-"


def kind_name(kind: type[StrictBody]) -> str:
    """Return the name by which the child finds the type."""
    return f"{kind.__module__}:{kind.__qualname__}"


def id_lists(body: StrictBody) -> Sequence[list[int]]:
    """Return a body's lists of token ids."""
    if isinstance(body, CompletionBody):
        return [prompt for prompt in body.prompt if isinstance(prompt, list)]
    return [body.tokens] if isinstance(body, DetokenizeBody) else ()


def pack(body: StrictBody) -> bytes:
    """Encode a checked body for fast decoding: its JSON, then its token ids (``pack_ids``)."""
    lists = id_lists(body)
    if isinstance(body, CompletionBody):
        empty = [[0] if isinstance(prompt, list) else prompt for prompt in body.prompt]
        body = body.model_copy(update={"prompt": empty})
    elif isinstance(body, DetokenizeBody):
        body = body.model_copy(update={"tokens": []})
    text = body.model_dump_json(exclude_unset=True).encode()
    return b"".join([HEAD.pack(len(text)), text, *map(pack_ids, lists)])


def unpack(kind: type[BodyT], data: memoryview) -> BodyT:
    """Decode a packed body."""
    (size,) = HEAD.unpack_from(data)
    at = HEAD.size + size
    body = kind.model_validate_json(bytes(data[HEAD.size : at]))
    lists: list[list[int]] = []
    while at < len(data):
        ids, at = unpack_ids(data, at)
        lists.append(ids)
    if isinstance(body, CompletionBody):
        found = iter(lists)
        prompts = [next(found) if isinstance(prompt, list) else prompt for prompt in body.prompt]
        return body.model_copy(update={"prompt": prompts})
    if isinstance(body, DetokenizeBody):
        return body.model_copy(update={"tokens": lists[0]})
    return body


def answer(question: bytes) -> bytes:
    """Answer one question; the answer to an invalid body holds its problem."""
    head, _, body = question.partition(b"\n")
    asked = cast("dict[str, Any]", json.loads(head))
    module, _, name = asked["kind"].partition(":")
    kind = cast("type[StrictBody]", getattr(importlib.import_module(module), name))
    try:
        checked = validate(kind, parse_json_object(body))
        _check_length(checked, asked["context"])
    except HttpProblem as problem:
        fields = {name: getattr(problem, name) for name in ("status", "message", "code", "param")}
        return BAD + json.dumps(fields).encode()
    return GOOD + pack(checked)


def _check_length(body: StrictBody, context_length: int) -> None:
    """Refuse more token ids than the context holds, before they are encoded. Raises HttpProblem."""
    if not isinstance(body, CompletionBody) or not context_length:
        return
    for prompt in body.prompt:
        if isinstance(prompt, list):
            check_length(len(prompt), context_length, param="prompt")


if __name__ == "__main__":
    answer_frames(answer)
