"""Reads arguments written as Python, ``key="text", other=[1, None])``, and passes them on as JSON.

A scanner with a stack of brackets: it reads each character once, evaluates nothing, and always writes valid JSON.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum, auto

from edgepipe.gateway.formats.named import BracketedArguments
from edgepipe.gateway.tool_call_json import CallNews

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_STRING_ENDS = {quote: re.compile(rf"[{quote}\\]") for quote in "'\""}
_SHORT_ESCAPES = {**{char: f"\\{char}" for char in 'ntrbf"\\'}, "'": "'", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class _Wants(Enum):
    """What may come next in a bracket."""

    KEY = auto()
    MARK = auto()  # between a key and its value
    VALUE = auto()
    END = auto()  # of the member


@dataclass(slots=True)
class _Bracket:
    """An open bracket. ``closing``: of its JSON; empty: in text that is no literal, and is dropped."""

    closing: str
    mark: str = ""  # between a key and its value; empty: no keys
    wants: _Wants = _Wants.VALUE
    count: int = 0  # members

    def next_member(self) -> None:
        """Expect the next member. Dropped text has none."""
        self.wants = _Wants.KEY if self.mark else _Wants.VALUE if self.closing else _Wants.END


class PythonArguments(BracketedArguments[_Bracket]):
    """Turns the arguments of one call, from its bracket on, into JSON; see ``named.Arguments``."""

    def __init__(self, calls: CallNews) -> None:
        super().__init__(calls)
        self._open.append(_Bracket("}", "=", _Wants.KEY))
        self._bare: list[str] = []  # a key, a number or a word
        self._quote = ""  # that ends the current string
        self._shown = False  # the string is a part of the JSON
        self._escape = ""  # an incomplete escape, from its backslash on
        self._begun = False

    def _read(self, text: str, at: int) -> int:
        """See BracketedArguments."""
        if not self._begun:
            self._say("{")
            self._begun = True
        if self._escape:
            return self._escaped(text, at)
        if self._quote:
            return self._string(text, at)
        self._sign(text[at])
        return at + 1

    def _string(self, text: str, at: int) -> int:
        found = _STRING_ENDS[self._quote].search(text, at)
        end = found.start() if found else len(text)
        self._say_in_string(text[at:end])
        if found is None:
            return end
        if found.group() == "\\":
            self._escape = "\\"
            return end + 1
        self._quote = ""
        if self._shown:
            self._say('"')
            self._end_value()
        return end + 1

    def _say_in_string(self, text: str) -> None:
        if self._shown and text:
            self._say(json.dumps(text, ensure_ascii=False)[1:-1])

    def _escaped(self, text: str, at: int) -> int:
        """Take a character of an escape. Python keeps the backslash of an unknown escape."""
        escape, char = self._escape, text[at]
        if len(escape) == 1 and char in _SHORT_ESCAPES:
            self._escape = ""
            if self._shown:
                self._say(_SHORT_ESCAPES[char])
            return at + 1
        if char in _HEX_DIGITS if len(escape) == 1 else char in "0123456789abcdefABCDEF":
            self._escape += char
            if len(self._escape) == 2 + _HEX_DIGITS[self._escape[1]]:
                self._end_hex()
            return at + 1
        self._say_in_string(escape)
        self._escape = ""
        return at

    def _end_hex(self) -> None:
        escape, self._escape = self._escape, ""
        number = int(escape[2:], 16)
        if 0xD800 <= number < 0xE000:  # one of the two halves that JSON writes
            if self._shown:
                self._say(escape)
        else:
            self._say_in_string(chr(number) if number <= 0x10FFFF else escape)

    def _sign(self, char: str) -> None:
        """Take a character outside strings."""
        top = self._open[-1]
        if char in "'\"":
            self._begin_string(char)
        elif char in "([{":
            self._open_bracket(char)
        elif char in ")]}":
            self._close_bracket()
        elif char == ",":
            self._end_member()
            top.next_member()
        elif top.mark == char and top.wants in (_Wants.KEY, _Wants.MARK):
            self._end_key()
        elif top.wants in (_Wants.KEY, _Wants.VALUE) and (self._bare or not char.isspace()):
            self._bare.append(char)

    def _begin_string(self, quote: str) -> None:
        self._bare.clear()  # a prefix such as r
        top = self._open[-1]
        self._quote = quote
        self._shown = bool(top.closing) and (top.wants == _Wants.VALUE or (top.wants == _Wants.KEY and top.mark == ":"))
        if self._shown:
            self._begin_value()
            self._say('"')

    def _open_bracket(self, char: str) -> None:
        top = self._open[-1]
        if top.wants != _Wants.VALUE or self._bare or not top.closing:
            self._end_bare()
            self._open.append(_Bracket("", wants=_Wants.END))
            return
        self._begin_value()
        self._open.append(_Bracket("}", ":", _Wants.KEY) if char == "{" else _Bracket("]"))
        self._say("{" if char == "{" else "[")

    def _close_bracket(self) -> None:
        self._end_member()
        closed = self._open.pop()
        if closed.closing:
            self._say(closed.closing)
            if self._open:
                self._end_value()

    def _end_member(self) -> None:
        """Take the end of a member; a key without a value has null."""
        self._end_bare()
        top = self._open[-1]
        if top.wants == _Wants.MARK:
            self._say(": null")
        elif top.wants == _Wants.VALUE and top.mark:
            self._say("null")
        top.wants = _Wants.END

    def _end_key(self) -> None:
        top = self._open[-1]
        if top.wants == _Wants.KEY:
            key, self._bare = "".join(self._bare).strip(), []
            self._begin_value()
            self._say(json.dumps(key, ensure_ascii=False))
        self._say(": ")
        top.wants = _Wants.VALUE

    def _end_bare(self) -> None:
        """Take the end of a word. A word where a key must be is no member."""
        word, self._bare = "".join(self._bare).strip(), []
        if not word or self._open[-1].wants != _Wants.VALUE:
            return
        self._begin_value()
        literal = word if _NUMBER.fullmatch(word) else _WORDS.get(word)
        self._say(literal or json.dumps(word, ensure_ascii=False))
        self._end_value()

    def _begin_value(self) -> None:
        """Write the comma before a member that is not the first."""
        top = self._open[-1]
        if top.wants == _Wants.KEY or not top.mark:
            self._say(", " if top.count else "")
            top.count += 1

    def _end_value(self) -> None:
        """Expect what follows a value, or a key in quotes."""
        top = self._open[-1]
        top.wants = _Wants.MARK if top.wants == _Wants.KEY else _Wants.END
