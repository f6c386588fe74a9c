"""Finds misspelt fields (PURE): unknown names that differ from a known one by case, by dashes, or by one letter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache

_MOST_NAMES = 64  # unknown ones that are looked at in one body
_MOST_CHARS = 40
_SHORT = 5  # letters: shorter names have too many neighbours


def misspelt(given: Iterable[str], known: Collection[str]) -> tuple[str, str] | None:
    """Return the first given name that is meant to be another one, and that one, else None.

    A name is not misspelt if the field that it resembles is given, too.
    """
    names = set(given)
    unknown = [name for name in names if name not in known and 0 < len(name) <= _MOST_CHARS]
    neighbours = _neighbours(frozenset(known))
    for name in sorted(unknown)[:_MOST_NAMES]:
        plain = _plain(name)
        for key in (plain, *(_without_one(plain) if len(plain) >= _SHORT else ())):
            if (meant := neighbours.get(key, name)) not in names:
                return name, meant
    return None


@cache
def _neighbours(known: frozenset[str]) -> Mapping[str, str]:
    """Return the known names by their letters, and by their letters without one."""
    found: dict[str, str] = {}
    for name in sorted(known):
        plain = _plain(name)
        for key in _without_one(plain) if len(plain) > _SHORT else ():
            found.setdefault(key, name)
    return found | {_plain(name): name for name in sorted(known)}


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _without_one(text: str) -> list[str]:
    return [text[:at] + text[at + 1 :] for at in range(len(text))]
