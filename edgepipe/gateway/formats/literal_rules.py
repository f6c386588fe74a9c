"""Grammars of arguments that a format writes as literals of its own.

A function's JSON schema binds keys, types and enumerations. Lengths and patterns of strings, and bounds of numbers, are
free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from edgepipe.gateway.formats.typed_values import Schema, kinds

_MAX_DEPTH = 8  # nesting up to which a grammar binds objects; deeper ones are free

NUMBER_RULES = (
    r"number: /-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?/",
    r"integer: /-?(0|[1-9][0-9]{0,30})/",
)
"""The rules ``number`` and ``integer``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Literals:
    """How a format writes values: parts of Lark rules."""

    comma: str  # text between members
    key: Callable[[str], str]  # rule of an object's key, up to its value
    fixed: Callable[[object], str]  # rule of one value
    kinds: Mapping[str, str]  # any value of a JSON type; ``object`` stands for any object
    pair: str = "pair"  # any key with any value
    sorts: bool = False  # keys have the alphabet's order, else the schema's

    def object_rule(self, root: Schema, schema: Schema, depth: int = 0) -> str:
        """Return the rule of an object for a schema within ``root``."""
        if not schema.get("properties") and schema.get("additionalProperties", True) is not False:
            return "object"
        return f'"{{" {self.members(root, schema, depth, key=self.key, pair=self.pair)} "}}"'

    def members(self, root: Schema, schema: Schema, depth: int, *, key: Callable[[str], str], pair: str) -> str:
        """Return the rule of an object's members without its brackets. ``key``, ``pair``: see the class."""
        properties = cast("Schema", schema.get("properties") or {})
        required = cast("Sequence[str]", schema.get("required") or ())
        names = sorted(properties, key=str.lower) if self.sorts else list(properties)
        pairs = [(f"{key(name)} {self._value(root, properties[name], depth)}", name in required) for name in names]
        return self._listed(pairs, more=pair if schema.get("additionalProperties", True) is not False else "")

    def _listed(self, pairs: Sequence[tuple[str, bool]], *, more: str) -> str:
        """Return the rule of pairs with commas between them; each pair is required or not. ``more``: any at the end."""
        others = f"({self.comma} {more})*" if more else ""
        if not pairs:
            return f"({more} {others})?" if more else ""
        (first, required), rest = pairs[0], pairs[1:]
        further = "".join(f" ({self.comma} {pair}){'' if needed else '?'}" for pair, needed in rest)
        if required:
            return f"{first}{further} {others}"
        without = self._listed(rest, more=more)
        return f"({first}{further} {others} | {without})" if without else f"({first})?"

    def _value(self, root: Schema, schema: Schema, depth: int) -> str:
        allowed = kinds(root, schema)
        if any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf")) or len(allowed) != 1 or depth > _MAX_DEPTH:
            return self._any_of(allowed)
        (kind,) = allowed
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values:
            return "(" + " | ".join(self.fixed(value) for value in cast("list[object]", values)) + ")"
        if kind == "object":
            return self.object_rule(root, schema, depth + 1)
        items = schema.get("items")
        if kind == "array" and isinstance(items, Mapping):
            item = self._value(root, cast("Schema", items), depth + 1)
            return f'"[" ({item} ({self.comma} {item})*)? "]"'
        return self._any_of(allowed)

    def _any_of(self, allowed: frozenset[str]) -> str:
        return "(" + " | ".join(rule for kind, rule in self.kinds.items() if kind in allowed) + ")"
