"""Random grammars made of what is costly to compile, and the vocabulary to follow them with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import GrammarTokenizer, choice_grammar, json_grammar, lark_grammar, regex_grammar

MULTIPLES = (1, 7, 97, 999, 9999, 65536, 900_000, 999_999, 10**7, 2**31 - 1, 10**9, 0.1, 0.001, 1e-7, 123456.789)
FORMATS = ("date-time", "email", "uuid", "ipv6", "uri", "hostname")
ATOMS = ("a", "[a-z]", ".", r"\d", r"\w", "(?:ab|ba)", "é", "[^x]")


def multiples_in_a_range(count: int, multiple: int) -> dict[str, Any]:
    """A schema of a few bytes for each property that takes seconds to compile."""
    properties = {
        f"a{index}": {
            "type": "integer",
            "multipleOf": multiple + index,
            "minimum": -999_999_999,
            "maximum": 999_999_999,
        }
        for index in range(count)
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def costly_grammar(seed: int) -> GrammarSpec:
    """One grammar of what a request can ask for, and of what only a machine that has turned can send (Lark).

    Raises RequestInvalid for one that is too long to send.
    """
    rng = random.Random(seed)
    kind = rng.randrange(12)
    if kind < 9:
        return json_grammar(_root(rng))
    if kind == 9:
        return regex_grammar(_pattern(rng) + _pattern(rng))
    if kind == 10:
        return choice_grammar([_name(rng) * rng.randint(1, 50) for _ in range(rng.choice([2, 100, 3000]))])
    return lark_grammar(_lark(rng))


def wide_vocabulary(count: int = 20_000) -> GrammarTokenizer:
    """Single bytes, words of random letters, and an end."""
    rng = random.Random(0)
    words = {"".join(rng.choices('abcdefgh 0123456789"{}[]:,.-', k=rng.randint(2, 7))).encode() for _ in range(count)}
    tokens = [bytes([byte]) for byte in range(256)] + sorted(words) + [b""]
    end = len(tokens) - 1
    return GrammarTokenizer(tokens, encode=lambda text: list(text.encode()), end_ids=[end], special_ids=[end])


def _name(rng: random.Random) -> str:
    return "".join(rng.choices("abcdefgh", k=rng.randint(1, 4)))


def _pattern(rng: random.Random, depth: int = 0) -> str:
    kind = rng.randrange(9)
    if depth > 3 or kind == 0:
        return rng.choice(ATOMS)
    inner = _pattern(rng, depth + 1)
    if kind == 1:
        return f"(?:{inner}){{{rng.randint(0, 5)},{rng.choice([30, 300, 1000])}}}"
    if kind in (2, 3):
        return f"(?:{inner}){'*+'[kind - 2]}"
    if kind == 4:
        return f"(?:{inner}|{_pattern(rng, depth + 1)})"
    if kind == 5:
        return f".*{inner}"
    if kind == 6:
        return f".*{rng.choice('abc')}.{{{rng.choice([3, 8, 14, 20, 40])}}}"
    return f"{inner}{'?' if kind == 7 else ''}{_pattern(rng, depth + 1)}"


def _root(rng: random.Random) -> dict[str, Any]:
    names = [f"d{index}" for index in range(rng.randint(0, 4))]
    schema = _schema(rng, 0, names)
    return {**schema, "$defs": {name: _schema(rng, 1, names) for name in names}} if names else schema


def _schema(rng: random.Random, depth: int, names: Sequence[str]) -> dict[str, Any]:
    kind = rng.randrange(12) if depth < 5 else rng.randrange(4)
    if kind == 0:
        return _number(rng)
    if kind == 1:
        return _string(rng)
    if kind == 2:
        return {"enum": [f"{_name(rng)}{index}" for index in range(rng.choice([2, 50, 1000]))]}
    if kind == 3:
        return {"$ref": f"#/$defs/{rng.choice(names)}"} if names else {"type": "boolean"}
    if kind in (4, 5, 6):
        word = "anyOf" if kind == 6 else "allOf"
        return {word: [_schema(rng, depth + 1, names) for _ in range(rng.randint(1, 5))]}
    if kind == 7:
        return _array(rng, depth, names)
    if kind == 8:
        patterns = {_pattern(rng): _schema(rng, depth + 1, names) for _ in range(rng.randint(1, 3))}
        return {"type": "object", "patternProperties": patterns, "additionalProperties": rng.random() < 0.5}
    if kind == 9:
        return {"type": "string", "allOf": [{"pattern": _pattern(rng)} for _ in range(rng.randint(2, 5))]}
    if kind == 10:
        return multiples_in_a_range(rng.choice([1, 3, 10]), int(rng.choice(MULTIPLES)) + 1)
    properties = {f"{_name(rng)}{index}": _schema(rng, depth + 2, names) for index in range(rng.choice([2, 8, 30]))}
    required = list(properties) if rng.random() < 0.5 else []
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _number(rng: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
    if rng.random() < 0.8:
        schema["multipleOf"] = rng.choice(MULTIPLES)
    if rng.random() < 0.8:
        schema["minimum"] = -rng.choice([0, 1, 999, 10**6, 10**9, 10**15, 1e30, 0.123456789])
    if rng.random() < 0.8:
        schema["maximum"] = rng.choice([1, 999, 10**6, 10**9, 10**15, 1e30, 0.987654321])
    return schema


def _string(rng: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.6:
        schema["pattern"] = _pattern(rng)
    if rng.random() < 0.5:
        schema["maxLength"] = rng.choice([1, 10, 1000, 100_000, 10**7])
    if rng.random() < 0.3:
        schema["minLength"] = rng.choice([0, 5, 500, 50_000])
    if rng.random() < 0.2:
        schema["format"] = rng.choice(FORMATS)
    return schema


def _array(rng: random.Random, depth: int, names: Sequence[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": _schema(rng, depth + 1, names)}
    if rng.random() < 0.7:
        schema["maxItems"] = rng.choice([1, 10, 100, 1000, 10_000])
    if rng.random() < 0.5:
        schema["minItems"] = rng.choice([0, 1, 10, 500])
    return schema


def _lark(rng: random.Random) -> str:
    """An ambiguous grammar: rules that call each other and themselves."""
    count = rng.randint(1, 4)
    lines = ["start: " + " ".join(f"r{rng.randrange(count)}" for _ in range(rng.randint(1, 4)))]
    for index in range(count):
        options = [
            " ".join(rng.choice([f"r{rng.randrange(count)}", '"a"', f"T{index}"]) for _ in range(rng.randint(1, 4)))
            for _ in range(rng.randint(1, 4))
        ]
        lines.append(f"r{index}: {' | '.join([*options, f'T{index}'])}")
        lines.append(f"T{index}: /{_pattern(rng)}/")
    return "\n".join(lines) + "\n"
