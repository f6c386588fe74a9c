"""JSON from foreign files: no NaN, Infinity only on request, no duplicate keys, bounded sizes."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any, NoReturn, cast

from edgepipe.errors import ModelInvalid
from edgepipe.plain_words import plain
from edgepipe.units import format_bytes

MAX_VALUES = 2_000_000
"""Headers and manifests have about nine values per tensor. A value takes at least 2 bytes in a file, up to 250 in
memory."""


class _Refused(ValueError):
    """Rejected here although Python's parser accepts it."""


def parse_json_object(
    data: bytes, *, what: str, max_values: int = MAX_VALUES, infinite: bool = False
) -> dict[str, Any]:
    """Parse a JSON object. Raises ModelInvalid; ``what``: name of the file for errors.

    ``infinite``: also read Infinity, which published configs of Mamba-2 contain.
    """
    values = 1 + data.count(b",") + data.count(b"[") + data.count(b"{")  # counted before parsing; an upper bound
    if values > max_values:
        raise ModelInvalid(f"{what} has too many values", fact=f"about {values}, at most {max_values} are read")
    try:
        # The library's parser counts its own depth and raises RecursionError long before the stack ends.
        value: object = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_infinity if infinite else _no_constant
        )
    except (ValueError, RecursionError) as exc:
        raise ModelInvalid(f"{what} is not valid JSON", fact=plain(exc)) from exc
    if not isinstance(value, dict):
        raise ModelInvalid(f"{what} is not a JSON object", fact=f"its top level is a {type(value).__name__}")
    return cast("dict[str, Any]", value)


def read_json_object(path: Path, *, max_bytes: int = 4 << 20, infinite: bool = False) -> dict[str, Any]:
    """Read and parse a JSON object from a file of at most ``max_bytes``. See ``parse_json_object``."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelInvalid(
                f"'{path.name}' is too large", fact=f"{format_bytes(size)}, at most {format_bytes(max_bytes)} are read"
            )
        return parse_json_object(path.read_bytes(), what=f"'{path.name}'", infinite=infinite)
    except OSError as exc:
        raise ModelInvalid(f"'{path.name}' cannot be read", fact=plain(exc)) from exc


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Refused(f"the key '{twice[:80]}' occurs twice")
    return value


def _infinity(name: str) -> float:
    if name == "Infinity":
        return inf
    raise _Refused(f"it contains {name}, which is not a JSON number")


def _no_constant(name: str) -> NoReturn:
    raise _Refused(f"it contains {name}, which is not a JSON number")
