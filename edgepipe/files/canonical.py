"""Canonical forms of the files that define a model's tokens. Their digests are part of the manifest's hash.

The bytes of ``tokenizer.json`` cannot be hashed: the ``tokenizers`` library writes a tokenizer rebuilt from GGUF, and
its versions write it differently. So the JSON values are hashed, without three differences that no version of the
library distinguishes: the order of keys, null fields, and merges as ``"a b"`` (before 0.20) or ``["a", "b"]``. The form
is made from the file, not from GGUF's metadata, because peers receive only the file, and without the library, so that
its version does not matter.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import cast

from edgepipe.errors import ModelInvalid
from edgepipe.files.strict_json import parse_json_object
from edgepipe.plain_words import plain

_MAX_TOKENIZER_VALUES = 4_000_000  # 262,144 tokens with 514,906 merges have 1.9 million


def value_digest(value: object) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of keys. Raises ValueError for non-JSON numbers."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def tokenizer_digest(path: Path) -> str:
    """Return the SHA-256 of the canonical form of a ``tokenizer.json``. Raises ModelInvalid.

    A hostile file can use much memory: call it in a process with limits.
    """
    label = f"'{path.name}'"
    try:
        values = parse_json_object(path.read_bytes(), what=label, max_values=_MAX_TOKENIZER_VALUES)
        return value_digest([_large_parts(values.get("model")), _without_nulls(values)])
    except OSError as exc:
        raise ModelInvalid(f"{label} cannot be read", fact=plain(exc)) from exc
    except (ValueError, RecursionError) as exc:
        raise ModelInvalid(f"{label} is not a usable tokenizer", fact=plain(exc)) from exc


def _large_parts(model: object) -> dict[str, object]:
    """Remove vocabulary and merges from the model and return them: a million values without nulls."""
    if not isinstance(model, dict):
        return {}
    fields = cast("dict[str, object]", model)
    parts = {key: fields.pop(key) for key in ("vocab", "merges") if key in fields}
    merges = parts.get("merges")
    if isinstance(merges, list):
        parts["merges"] = [_pair(merge) for merge in cast("list[object]", merges)]
    return parts


def _pair(merge: object) -> object:
    """Return a merge as a pair. Anything that the library does not read as a merge stays, such as ``#version``."""
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
