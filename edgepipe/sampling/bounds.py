"""Kinds of bounds, and a check of a value's fields against a table of bounds.

A table lists every field of a value. Gateway, engine and tests use the same tables; the tests fail for a field without
a bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBounds:
    """Bounds that depend on the served model."""

    vocab_size: int  # the largest token id is one less
    context_length: int  # tokens of one sequence, prompt and output


class ValueRefusal(NamedTuple):
    """Reason for rejecting a value."""

    field: str
    fact: str  # the value and its bound


class Bound(Protocol):
    """Bound of one field."""

    def fault(self, value: Any, model: ModelBounds | None) -> str:
        """Return the value's fault and the bound; empty for a valid value.

        ``model``: None checks only bounds common to all models.
        """
        ...


@dataclass(frozen=True, slots=True)
class Within:
    """A finite number from ``lowest`` to ``highest``."""

    lowest: float
    highest: float
    above: bool = False  # exclude ``lowest`` itself

    def fault(self, value: Any, model: ModelBounds | None) -> str:
        """See Bound."""
        above_lowest = value > self.lowest if self.above else value >= self.lowest
        if math.isfinite(value) and above_lowest and value <= self.highest:
            return ""
        low = f"above {_number(self.lowest)}" if self.above else f"at least {_number(self.lowest)}"
        return f"{value} was given; it must be {low} and at most {_number(self.highest)}"


@dataclass(frozen=True, slots=True)
class Flag:
    """A boolean."""

    def fault(self, value: Any, model: ModelBounds | None) -> str:
        """See Bound."""
        return "" if isinstance(value, bool) else "it must be true or false"


@dataclass(frozen=True, slots=True)
class Text:
    """Text of bounded size."""

    most_bytes: int  # length in UTF-8

    def fault(self, value: Any, model: ModelBounds | None) -> str:
        """See Bound."""
        size = len(value.encode())
        return f"it has {size} bytes; at most {self.most_bytes} can be used" if size > self.most_bytes else ""


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids of the model's vocabulary, in a collection of any order."""

    most: int | None  # None: the model's context length

    def fault(self, value: Any, model: ModelBounds | None) -> str:
        """See Bound."""
        most = self.most if self.most is not None else None if model is None else model.context_length
        if most is not None and len(value) > most:
            return f"it has {len(value)} token ids; at most {most} can be used"
        return _outside(value, model)


@dataclass(frozen=True, slots=True)
class ManyTokenIds:
    """Several sequences of token ids."""

    most: int
    each: TokenIds

    def fault(self, value: Any, model: ModelBounds | None) -> str:
        """See Bound."""
        if len(value) > self.most:
            return f"it has {len(value)} parts; at most {self.most} can be used"
        return next((fault for ids in value if (fault := self.each.fault(ids, model))), "")


@dataclass(frozen=True, slots=True)
class Biases:
    """Pairs of a token id and a number, with unique ids."""

    most: int
    each: Within

    def fault(self, value: Any, model: ModelBounds | None) -> str:
        """See Bound."""
        ids = [token for token, _ in value]
        if len(ids) > self.most:
            return f"it names {len(ids)} tokens; at most {self.most} can be used"
        if len(set(ids)) != len(ids):
            return "it names a token twice"
        numbers = (self.each.fault(number, model) for _, number in value)
        return _outside(ids, model) or next((fault for fault in numbers if fault), "")


@dataclass(frozen=True, slots=True)
class Optional:
    """None, or a value whose attribute is within ``bound``."""

    attribute: str
    bound: Bound

    def fault(self, value: Any, model: ModelBounds | None) -> str:
        """See Bound."""
        return "" if value is None else self.bound.fault(getattr(value, self.attribute), model)


def refusal(value: object, table: Mapping[str, Bound], model: ModelBounds | None) -> ValueRefusal | None:
    """Return the first field of a value that is out of bounds, or None."""
    for name, bound in table.items():
        if fact := bound.fault(getattr(value, name), model):
            return ValueRefusal(name, fact)
    return None


def _outside(ids: Sequence[int], model: ModelBounds | None) -> str:
    if not ids:
        return ""
    if (lowest := min(ids)) < 0:
        return f"token id {lowest} was given; ids begin at 0"
    if model is not None and (highest := max(ids)) >= model.vocab_size:
        return f"token id {highest} is not in the vocabulary; ids go from 0 to {model.vocab_size - 1}"
    return ""


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
