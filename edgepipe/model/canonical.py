"""Canonical forms of what gives a model's tokens their meaning. Their digests count in the manifest's hash.

The bytes of ``tokenizer.json`` cannot count: a tokenizer rebuilt from GGUF is written by the ``tokenizers`` library,
and its versions spell one tokenizer differently. So the JSON values count, with three freedoms that change nothing for
any version of the library: the order of an object's keys, fields that are null, and merges as ``"a b"`` (before 0.20)
or as ``["a", "b"]``. The form is made from the file and not from GGUF's metadata, because peers receive the file alone.
It is made without the library, whose version would decide the result otherwise.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import cast

from edgepipe.errors import ModelInvalid
from edgepipe.model.strict_json import parse_json_object

_MAX_TOKENIZER_VALUES = 4_000_000  # 262,144 tokens with 514,906 merges have 1.9 million


def value_digest(value: object) -> str:
    """SHA-256 of a JSON value, whatever the order of keys. Raises ValueError for numbers that JSON does not have."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def tokenizer_digest(path: Path) -> str:
    """SHA-256 of the canonical form of a ``tokenizer.json``. Raises ModelInvalid.

    Takes much memory for a hostile file: call it in a process with limits.
    """
    what = f"'{path.name}'"
    try:
        values = parse_json_object(path.read_bytes(), what=what, max_values=_MAX_TOKENIZER_VALUES)
        return value_digest([_large_parts(values.get("model")), _without_nulls(values)])
    except OSError as exc:
        raise ModelInvalid(f"{what} cannot be read", fact=str(exc)) from exc
    except (ValueError, RecursionError) as exc:
        raise ModelInvalid(f"{what} is no tokenizer that can be used", fact=str(exc)[:200]) from exc


def _large_parts(model: object) -> dict[str, object]:
    """Take vocabulary and merges out of the model: a million values that have no nulls to leave out."""
    if not isinstance(model, dict):
        return {}
    fields = cast("dict[str, object]", model)
    parts = {key: fields.pop(key) for key in ("vocab", "merges") if key in fields}
    merges = parts.get("merges")
    if isinstance(merges, list):
        parts["merges"] = [_pair(merge) for merge in cast("list[object]", merges)]
    return parts


def _pair(merge: object) -> object:
    """A merge as a pair. What the library does not read as one stays as it is, a ``#version`` line among it."""
    if not isinstance(merge, str) or merge.startswith("#version"):
        return merge
    parts = merge.split(" ")
    return parts if len(parts) == 2 else merge


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return {key: _without_nulls(item) for key, item in fields.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[object]", value)]
    return value
