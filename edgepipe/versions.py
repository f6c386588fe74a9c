"""Order of edgepipe's versions. PURE."""

from __future__ import annotations

import re
from collections.abc import Iterable

_VERSION = re.compile(r"(\d{1,9}(?:\.\d{1,9})*)(?:(a|b|rc|\.dev|\.post)(\d{1,9}))?")
_STAGES = {".dev": 0, "a": 1, "b": 2, "rc": 3, "": 4, ".post": 5}
_Order = tuple[tuple[int, ...], int, int]


def newest(versions: Iterable[str]) -> str:
    """Return the newest version; empty if none can be read. ``0.2.0rc1`` comes before ``0.2.0``."""
    return max(filter(_order, versions), key=_order, default="")


def is_behind(version: str, other: str) -> bool:
    """Return whether ``version`` is older than ``other``. False if one of them cannot be read."""
    mine, its = _order(version), _order(other)
    return bool(mine and its) and mine < its


def are_near(version: str, other: str) -> bool:
    """Return whether the promise of compatibility covers both: their minor versions are at most one apart.

    True if one of them cannot be read.
    """
    mine, its = _release(version), _release(other)
    return not mine or not its or (mine[0] == its[0] and abs(mine[1] - its[1]) <= 1)


def _release(version: str) -> tuple[int, int] | tuple[()]:
    """Return major and minor version."""
    if not (order := _order(version)):
        return ()
    major, minor, *_ = (*order[0], 0)
    return major, minor


def _order(version: str) -> _Order | tuple[()]:
    match = _VERSION.fullmatch(version.partition("+")[0])
    if match is None:
        return ()
    release, stage, number = match.groups(default="")
    numbers = [int(part) for part in release.split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), _STAGES[stage], int(number or 0)
