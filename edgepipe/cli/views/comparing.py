"""``--compare KEY=a,b,c``: the same run with one setting changed, side by side."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgepipe.errors import ConfigInvalid

_MOST_RUNS = 16  # columns that a person can compare
_DURATION = re.compile(r"\s*\d+(?:\.\d+)?\s*(?:us|ms|s)\s*", flags=re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One run of a comparison: its label and its changes."""

    label: str  # "policy=throttled"; "" without a comparison
    changes: Mapping[str, str]


def read_comparisons(texts: Sequence[str], *, keys: Sequence[str]) -> tuple[Variant, ...]:
    """Return one variant per value, or per combination of values for several keys. Raises ConfigInvalid.

    Commas separate values; semicolons separate values that hold commas. A duration belongs to the link before it:
    ``link=ideal,1gbit,1ms`` are two links.
    """
    axes = [_read(text, keys) for text in texts]
    if len({key for key, _ in axes}) != len(axes):
        raise ConfigInvalid("a setting is compared twice", next_step="name all its values in one --compare")
    variants = [
        Variant(
            label=" ".join(f"{key}={value}" for key, value in combination),
            changes=dict(combination),
        )
        for combination in itertools.product(*([(key, value) for value in values] for key, values in axes))
    ]
    if len(variants) > _MOST_RUNS:
        raise ConfigInvalid(
            f"{len(variants)} runs are too many to compare", fact=f"at most {_MOST_RUNS}", next_step="name fewer values"
        )
    return tuple(variants)


def _read(text: str, keys: Sequence[str]) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or key not in keys:
        raise ConfigInvalid(
            f"--compare cannot take '{text}'",
            fact=f"settings that can: {', '.join(keys)}",
            next_step="write it like --compare policy=throttled,sarathi",
        )
    found = [value.strip() for value in _split(key, values)]
    if not all(found):
        raise ConfigInvalid(f"'{text}' has an empty value", next_step=f"write it like --compare {key}=A,B")
    return key, list(dict.fromkeys(found))


def _split(key: str, values: str) -> list[str]:
    if ";" in values:
        return values.split(";")
    parts = values.split(",")
    if key != "link":
        return parts
    links: list[str] = []
    for part in parts:
        if links and _DURATION.fullmatch(part):
            links[-1] += f",{part}"
        else:
            links.append(part)
    return links
