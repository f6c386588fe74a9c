"""Reads arguments written as Python, ``key="text", other=[1, None])``, and passes them on as JSON.

A scanner with a stack of brackets: it reads each character once, evaluates nothing, and always writes valid JSON.
Strings, escapes and numbers follow sections 2.4.1 to 2.4.6 of the Python language reference.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum, auto

from edgepipe.gateway.formats.named import BracketedArguments
from edgepipe.gateway.tool_call_json import CallNews

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_FURTHER_NUMBER = re.compile(rf"([+-]?)(0|[1-9][0-9]*(?:_[0-9]+)*)?(?:(\.)({_DIGITS})?)?(?:[eE]([+-]?{_DIGITS}))?")
_OTHER_BASE = re.compile(r"[+-]?0(?:[xX](?:_?[0-9a-fA-F])+|[oO](?:_?[0-7])+|[bB](?:_?[01])+)")
_MAX_NUMBER_CHARS = 64  # longest number in a form that JSON lacks; a longer one is text

_BARE = re.compile(r"""[^'"()\[\]{},:=]+""")
_RAW_PREFIX = re.compile(r"(?:.*\W)?(?:r[bf]?|[bf]r)", re.IGNORECASE | re.DOTALL)
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}
_ESCAPE = re.compile(r"\\(?:[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPE_BEGUN = re.compile(r"\\(?:[0-7]{0,2}|x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})")
_SHORT_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""} | {
    char: char for char in "'\"\\"
}


class _Wants(Enum):
    """What may come next in a bracket."""

    KEY = auto()
    MARK = auto()  # the mark between a key and its value
    VALUE = auto()
    END = auto()  # the end of the member


@dataclass(slots=True)
class _Bracket:
    """An open bracket. ``closing``: of its JSON."""

    closing: str
    mark: str = ""  # text between a key and its value; empty: no keys
    wants: _Wants = _Wants.VALUE
    count: int = 0  # members
    dropped: bool = False  # text that is no literal
    merged: bool = False  # ``**{...}``: its members are those of the bracket around it
    unsettled: bool = False  # a tuple or a value in brackets

    def next_member(self) -> None:
        """Expect the next member. Dropped text has none."""
        self.wants = _Wants.END if self.dropped else _Wants.KEY if self.mark else _Wants.VALUE


class PythonArguments(BracketedArguments[_Bracket]):
    """Turns the arguments of one call, from its bracket on, into JSON; see ``named.Arguments``."""

    def __init__(self, calls: CallNews) -> None:
        super().__init__(calls)
        self._open.append(_Bracket("}", "=", _Wants.KEY))
        self._json: list[str] = ["{"]  # pieces that are not passed on yet
        self._holes: list[int] = []  # places in all of the JSON, in order, where a tuple may prove to need its "["
        self._said = 0  # pieces of the JSON that were passed on
        self._bare: list[str] = []  # a key, a number or a word
        self._word = ""  # the last characters before this place, unless they have a meaning of their own
        self._key: list[str] = []  # JSON of a key in quotes
        self._quote = ""  # quotes (one or three) that end the current string
        self._raw = False  # backslashes of the string are text
        self._kept: list[str] | None = None  # parts of the string's text; None: the text is dropped
        self._unclosed = False  # the value is a string, and another may continue it

    def feed(self, text: str, start: int) -> tuple[int, bool]:
        """See Arguments."""
        read = super().feed(text, start)
        settled = self._holes[0] - self._said if self._holes else len(self._json)
        if settled:
            self._say("".join(self._json[:settled]))
            del self._json[:settled]
            self._said += settled
        return read

    def _read(self, text: str, at: int) -> int | None:
        """See BracketedArguments."""
        if self._quote:
            return self._string(text, at)
        char = text[at]
        if char in "'\"":
            return self._begin_string(text, at)
        found = _BARE.match(text, at)
        if self._unclosed and not (found and found.group().isspace()):
            self._end_string_value()
        if found:
            self._take_bare(found.group())
            return found.end()
        self._word = ""
        self._sign(char)
        return at + 1

    def _take_bare(self, text: str) -> None:
        self._word = (self._word + text[-3:])[-3:]
        if self._open[-1].wants in (_Wants.KEY, _Wants.VALUE) and (self._bare or not text.isspace()):
            self._bare.append(text)

    def _begin_string(self, text: str, at: int) -> int | None:
        quote = text[at]
        if text[at : at + 3] in (quote, 2 * quote):
            return None
        self._quote = 3 * quote if text.startswith(3 * quote, at) else quote
        self._raw = _RAW_PREFIX.fullmatch(self._word) is not None
        self._word = ""
        self._bare.clear()  # a prefix such as r
        top = self._open[-1]
        if top.dropped or (top.wants == _Wants.END and not self._unclosed):
            self._kept = None
        elif top.wants in (_Wants.KEY, _Wants.MARK):
            self._kept, top.wants = self._key, _Wants.MARK
        else:
            self._kept = self._json
            if not self._unclosed:
                self._begin_value()
                self._json.append('"')
        return at + len(self._quote)

    def _string(self, text: str, at: int) -> int | None:
        """Read a part of a string: plain text, an escape, or a quote that may be the last."""
        quote = self._quote[0]
        if found := _PLAIN[quote].match(text, at):
            self._keep(found.group())
            return found.end()
        if text[at] == "\\":
            return self._escape(text, at)
        if text.startswith(self._quote, at):
            end = at + len(self._quote)
            self._quote = ""
            if self._kept is self._json:
                self._unclosed = True
            return end
        if self._quote.startswith(text[at : at + 3]):  # its end has not arrived
            return None
        self._keep(quote)
        return at + 1

    def _escape(self, text: str, at: int) -> int | None:
        """Read an escape. Python keeps the backslash of an unknown one, and of each in a raw string."""
        found = _ESCAPE.match(text, at)
        if found is None or (not self._raw and _ESCAPE_BEGUN.fullmatch(text, at)):
            return None
        body = found.group()[1:]
        if self._raw:
            self._keep(text[at : at + 2])
            return at + 2
        if body in _SHORT_ESCAPES:
            self._keep(_SHORT_ESCAPES[body])
        elif body[0] in "01234567" or len(body) > 1:
            self._keep_code(int(body, 8) if body[0] in "01234567" else int(body[1:], 16), found.group())
        else:
            self._keep(found.group())
        return found.end()

    def _keep_code(self, number: int, escape: str) -> None:
        """Take a character by its number."""
        if 0xD800 <= number < 0xE000:  # one of the two halves that JSON writes
            if self._kept is not None:
                self._kept.append(f"\\u{number:04x}")
        else:
            self._keep(chr(number) if number <= 0x10FFFF else escape)

    def _keep(self, text: str) -> None:
        if self._kept is not None:
            self._kept.append(json.dumps(text, ensure_ascii=False)[1:-1])

    def _sign(self, char: str) -> None:
        """Take a character outside strings that is no part of a word."""
        top = self._open[-1]
        if char in "([{":
            self._open_bracket(char)
        elif char in ")]}":
            self._close_bracket()
        elif char == ",":
            self._end_member()
            self._settle(top, is_tuple=True)
            top.next_member()
        elif top.mark == char and top.wants in (_Wants.KEY, _Wants.MARK):
            self._end_key()
        elif top.wants in (_Wants.KEY, _Wants.VALUE):
            self._bare.append(char)

    def _open_bracket(self, char: str) -> None:
        top = self._open[-1]
        bare = "".join(self._bare).strip()
        if char == "{" and bare == "**" and top.wants == _Wants.KEY:
            self._bare.clear()
            self._open.append(_Bracket("", ":", _Wants.KEY, count=top.count, merged=True))
        elif top.wants != _Wants.VALUE or bare:
            self._end_bare()
            self._open.append(_Bracket("", wants=_Wants.END, dropped=True))
        elif char == "(":
            self._begin_value()
            self._open.append(_Bracket("]", unsettled=True))
            self._holes.append(self._said + len(self._json))
            self._json.append("")
        else:
            self._begin_value()
            self._open.append(_Bracket("}", ":", _Wants.KEY) if char == "{" else _Bracket("]"))
            self._json.append(char)

    def _close_bracket(self) -> None:
        self._end_member()
        closed = self._open.pop()
        self._settle(closed, is_tuple=closed.count != 1)
        self._json.append(closed.closing)
        if closed.merged:
            self._open[-1].count, self._open[-1].wants = closed.count, _Wants.END
        elif not closed.dropped and self._open:
            self._end_value()

    def _settle(self, bracket: _Bracket, *, is_tuple: bool) -> None:
        """Write the bracket of a tuple where it began. A value in brackets has none."""
        if not bracket.unsettled:
            return
        bracket.unsettled = False
        hole = self._holes.pop()  # brackets within this one are closed
        if is_tuple:
            self._json[hole - self._said] = "["
        else:
            bracket.closing = ""

    def _end_member(self) -> None:
        """Take the end of a member. A key without a value has null, but text without a name is no argument."""
        self._end_bare()
        top = self._open[-1]
        if top.wants == _Wants.MARK and top.mark == ":":
            self._end_key()
        self._key.clear()
        if top.wants == _Wants.VALUE and top.mark:
            self._json.append("null")
        top.wants = _Wants.END

    def _end_key(self) -> None:
        top = self._open[-1]
        bare, self._bare = "".join(self._bare).strip(), []
        key = f'"{"".join(self._key)}"' if top.wants == _Wants.MARK else json.dumps(bare, ensure_ascii=False)
        self._key.clear()
        top.wants = _Wants.KEY
        self._begin_value()
        self._json.append(f"{key}: ")
        top.wants = _Wants.VALUE

    def _end_bare(self) -> None:
        """Take the end of a word. A word where a key must be is no member."""
        word, self._bare = "".join(self._bare).strip(), []
        if not word or self._open[-1].wants != _Wants.VALUE:
            return
        self._begin_value()
        self._json.append(_json_of(word))
        self._end_value()

    def _end_string_value(self) -> None:
        self._json.append('"')
        self._unclosed = False
        self._end_value()

    def _begin_value(self) -> None:
        """Write the comma before a member that is not the first."""
        top = self._open[-1]
        if top.wants == _Wants.KEY or not top.mark:
            if top.count:
                self._json.append(", ")
            top.count += 1

    def _end_value(self) -> None:
        self._open[-1].wants = _Wants.END


def _json_of(word: str) -> str:
    """Return the JSON of a number or of one of the words that are values; of any other word, a string."""
    if _NUMBER.fullmatch(word):
        return word
    if word in _WORDS:
        return _WORDS[word]
    if len(word) <= _MAX_NUMBER_CHARS:
        if _OTHER_BASE.fullmatch(word):
            return str(int(word, 0))
        found = _FURTHER_NUMBER.fullmatch(word)
        if found and (found[2] or found[4]):
            return _decimal(*found.groups(default=""))
    return json.dumps(word, ensure_ascii=False)


def _decimal(sign: str, whole: str, point: str, fraction: str, exponent: str) -> str:
    text = f"{sign.strip('+')}{whole or '0'}" + (f".{fraction or '0'}" if point else "")
    return (text + (f"e{exponent}" if exponent else "")).replace("_", "")
