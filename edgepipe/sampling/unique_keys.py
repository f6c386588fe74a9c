"""Keeps an object of an output's JSON from having a key twice (PURE): no grammar of bounded size can.

A line before a grammar's text asks for it (``HEADER``), and names the marks around reasoning. JSON follows the
reasoning. Keys are compared as they are written, so an escape may hide a repetition.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, cast

from edgepipe.sampling.thoughts import Thoughts

HEADER = "%unique-keys "
_QUOTE, _ESCAPE = ord('"'), ord("\\")
_MAX_MARK_CHARS = 64
_MAX_KEYS = 4096  # keys of one object; each is compared when another key is written. Further keys may repeat


def keys_header(*, opening: str, closing: str) -> str:
    """Return the line before the text of a grammar. The marks are around reasoning, see ``Thoughts``."""
    return f"{HEADER}{json.dumps({'opening': opening, 'closing': closing})}\n"


def split_keys(text: str) -> tuple[tuple[str, str] | None, str]:
    """Return the marks around reasoning and the rest of a grammar's text; None without the line. Raises ValueError."""
    if not text.startswith(HEADER):
        return None, text
    line, _, rest = text.removeprefix(HEADER).partition("\n")
    value: object = json.loads(line)
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else dict[str, Any]()
    marks = [fields.get("opening"), fields.get("closing")]
    if not all(isinstance(mark, str) and len(mark) <= _MAX_MARK_CHARS for mark in marks):
        raise ValueError("the marks of reasoning are malformed")
    return (str(marks[0]), str(marks[1])), rest


class QuotedTokens:
    """Tokens of a vocabulary that can end a key, by what they hold of it."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """``tokens``: [V] bytes of each id."""
        self.tokens = tokens
        ends: defaultdict[bytes, list[int]] = defaultdict(list)  # tokens by their text before the first quote
        wholes: defaultdict[bytes, list[int]] = defaultdict(list)  # tokens by each text between two quotes
        for token, text in enumerate(tokens):
            parts = text.split(b'"')
            if len(parts) > 1:
                ends[parts[0]].append(token)
            for part in set(parts[1:-1]):
                wholes[part].append(token)
        self._ends, self._wholes = ends, wholes

    def ending(self, text: bytes) -> Sequence[int]:
        """Return the tokens with this text before their first quote."""
        return self._ends.get(text, ())

    def holding(self, text: bytes) -> Sequence[int]:
        """Return the tokens with this text between two quotes."""
        return self._wholes.get(text, ())


@dataclass(slots=True)
class _Object:
    """An object that is being written."""

    keys: dict[bytes, None] = field(default_factory=dict[bytes, None])
    expects_key: bool = True


class _Json:
    """Follows a JSON text, byte by byte."""

    def __init__(self) -> None:
        self.stack: list[_Object | None] = []  # None: an array
        self.key: bytes | None = None  # bytes written so far of a key
        self.repeated = False  # an object has a key twice
        self._in_string = False
        self._escaped = False

    @property
    def begun_key(self) -> bytes | None:
        """What is written of a key that the next quote ends; None elsewhere."""
        return None if self._escaped else self.key

    def would_repeat(self, text: bytes) -> bool:
        """Return whether an object would have a key twice after this text."""
        other = self.fork()
        other.repeated = False
        other.take(text)
        return other.repeated

    def fork(self) -> _Json:
        """Return a copy that goes on with another text."""
        other = copy(self)
        other.stack = [
            None if each is None else _Object(keys=dict(each.keys), expects_key=each.expects_key) for each in self.stack
        ]
        return other

    def take(self, text: bytes) -> None:
        """Append to the text."""
        for byte in text:
            if self._in_string:
                self._string(byte)
            else:
                self._between(byte)

    def _string(self, byte: int) -> None:
        if byte == _QUOTE and not self._escaped:
            self._in_string = False
            self._end_key()
            return
        self._escaped = byte == _ESCAPE and not self._escaped
        if self.key is not None:
            self.key += bytes([byte])

    def _end_key(self) -> None:
        top = self.stack[-1] if self.stack else None
        if top is not None and self.key is not None:
            self.repeated = self.repeated or self.key in top.keys
            if len(top.keys) < _MAX_KEYS:
                top.keys[self.key] = None
            top.expects_key = False
        self.key = None

    def _between(self, byte: int) -> None:
        top = self.stack[-1] if self.stack else None
        match chr(byte):
            case '"':
                self._in_string = True
                self.key = b"" if top is not None and top.expects_key else None
            case "{":
                self.stack.append(_Object())
            case "[":
                self.stack.append(None)
            case "}" | "]" if self.stack:
                self.stack.pop()
            case "," if top is not None:
                top.expects_key = True
            case _:
                pass


class KeyMeter:
    """Follows one output's JSON: a function of the tokens taken."""

    def __init__(self, tokens: QuotedTokens, *, opening: str, closing: str) -> None:
        """The marks are around reasoning, see ``Thoughts``."""
        self._tokens = tokens
        self._thoughts = Thoughts(opening=opening, closing=closing)
        self._json = _Json()

    def fork(self) -> KeyMeter:
        """Return a copy that goes on with other tokens."""
        other = copy(self)
        other._thoughts, other._json = copy(self._thoughts), self._json.fork()
        return other

    def take(self, token: int) -> None:
        """Append a token to the output."""
        self._json.take(self._thoughts.take(self._tokens.tokens[token]))

    def vetoed(self) -> Iterator[int]:
        """Yield the tokens after which an object would have a key twice."""
        objects = [each for each in self._json.stack if each is not None]
        begun = self._json.begun_key
        if objects and begun is not None:
            for key in objects[-1].keys:
                if key.startswith(begun):
                    yield from self._tokens.ending(key[len(begun) :])
        wholes = {token for each in objects for key in each.keys for token in self._tokens.holding(key)}
        yield from (token for token in wholes if self._json.would_repeat(self._tokens.tokens[token]))
