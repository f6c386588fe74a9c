"""Typed reads from a foreign mapping (config.json or GGUF metadata). A wrong type or size raises ModelInvalid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from edgepipe.errors import ModelInvalid

_NO_TOKEN = (-1, 0xFFFF_FFFF)  # the same 32 bits, read as a signed or an unsigned number


class Fields:
    """Reads values by key and rejects wrong types and ranges. Absent and null mean the default."""

    def __init__(self, values: Mapping[str, object], *, what: str) -> None:
        self._values = values
        self.what = what  # name of the source in errors

    def fail(self, key: str, fact: str) -> ModelInvalid:
        """Return the error for an unusable value."""
        return ModelInvalid(f"{self.what} cannot be used: '{key}'", fact=fact)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def over(self, defaults: Mapping[str, object]) -> Fields:
        """Return these values, and those of ``defaults`` where they are absent or null."""
        own = {key: value for key, value in self._values.items() if value is not None or key not in defaults}
        return Fields({**defaults, **own}, what=self.what)

    def has(self, key: str) -> bool:
        """Return whether the key is present and not null."""
        return self._values.get(key) is not None

    def raw(self, key: str) -> object:
        """Return the value unchecked, or None."""
        return self._values.get(key)

    def integer(self, key: str, *, low: int, high: int, default: int | None = None) -> int:
        """Return an integer in ``[low, high]``; ``default`` None: the key is required. Raises ModelInvalid."""
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "it is missing")
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.fail(key, f"it is {_show(value)}; an integer from {low} to {high} is needed")
        return value

    def number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        """Return a finite number in ``[low, high]``; ``default`` None: the key is required. Raises ModelInvalid."""
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "it is missing")
            return default
        if type(value) not in (int, float) or not self._finite(value, low, high):
            raise self.fail(key, f"it is {_show(value)}; a number from {low:g} to {high:g} is needed")
        return float(cast("float", value))

    def optional_number(self, key: str, *, low: float, high: float) -> float | None:
        """Return like ``number``; None if the key is absent or null. Raises ModelInvalid."""
        return self.number(key, low=low, high=high) if self.has(key) else None

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean. Raises ModelInvalid."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"it is {_show(value)}; true or false is needed")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        """Return a string; ``default`` None: the key is required. Raises ModelInvalid."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.fail(key, f"it is {_show(value)}; a string is needed")
        return value

    def numbers(self, key: str, *, low: float, high: float, length: int) -> tuple[float, ...]:
        """Return a list of ``length`` finite numbers. Raises ModelInvalid."""
        items = self.items(key)
        if len(items) != length or not all(type(i) in (int, float) and self._finite(i, low, high) for i in items):
            raise self.fail(key, f"{length} numbers from {low:g} to {high:g} are needed, it has {len(items)} items")
        return tuple(float(cast("float", item)) for item in items)

    def items(self, key: str) -> list[object]:
        """Return a list with items of any type; absent: empty. Raises ModelInvalid."""
        value = self._values.get(key)
        if value is None:
            return []
        if hasattr(value, "tolist"):  # an array of a GGUF header; numpy would make every command start slower
            return cast("list[object]", cast("Any", value).tolist())
        if not isinstance(value, list | tuple):
            raise self.fail(key, f"it is {_show(value)}; a list is needed")
        return list(cast("list[object]", value))

    def token_ids(self, key: str, *, vocab_size: int) -> tuple[int, ...]:
        """Return one id or a list of ids below ``vocab_size`` as a tuple. Raises ModelInvalid.

        Absent, or a number that stands for no token: ().
        """
        value = self._values.get(key)
        if type(value) is int and value in _NO_TOKEN:
            return ()
        items = self.items(key) if isinstance(value, list | tuple) else [] if value is None else [value]
        if len(items) > 1024 or not all(type(item) is int and 0 <= item < vocab_size for item in items):
            raise self.fail(key, f"it is {_show(items)}; token ids below {vocab_size} are needed")
        return tuple(cast("list[int]", items))

    @staticmethod
    def _finite(value: object, low: float, high: float) -> bool:
        number = cast("float", value)
        return abs(number) < 1e300 and math.isfinite(number) and low <= number <= high


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
