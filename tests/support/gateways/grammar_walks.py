"""Random outputs of grammars, in the style of models."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import GrammarTokenizer, parser_limits

WORDS = ("a", "Rome", "x=1", "  ", "é", "漢字", "😀", "'", "]", "}}", "{", "<b>", "</", ")", "%", ", ", ": ")
QUOTED = ('\\"', "\\n", "\\\\", "\\t")  # within JSON's strings
LINES = ('"', "\n", "\n\n", "\\n")  # line breaks in bare text
_INDEX = rb'(?:functions\.[a-z_-]+:|"tool_call_id": ")([0-9]?)$'  # the place of a call
_PYTHON = re.compile(r"\w\(\w+=")
_TEXT_BYTES = 60  # with so many possible bytes, a text goes on


def byte_vocabulary() -> GrammarTokenizer:
    """Return a vocabulary of bytes and an end."""
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    return GrammarTokenizer(tokens, encode=lambda text: list(text.encode()), end_ids=[256], special_ids=[256])


class Walk:
    """A random output of a grammar, in the style of models: JSON with a space after commas and colons."""

    def __init__(
        self,
        vocabulary: GrammarTokenizer,
        spec: GrammarSpec,
        rng: random.Random,
        *,
        sample: str,
        marks: Sequence[str],
        lines: bool,
    ) -> None:
        """
        sample  outputs of the model, whose spaces and quotes this one imitates
        marks   words that texts may have, besides
        lines   the model breaks lines within a call
        """
        self._lines = lines
        self._sample = sample.encode()
        self._words = (*WORDS, *marks) if _PYTHON.search(sample) else (*WORDS, *marks, *LINES)
        self._matcher = LLMatcher(vocabulary.library, spec.text, log_level=0, limits=parser_limits())
        assert not self._matcher.is_error(), self._matcher.get_error()
        self._rng = rng
        lazy = re.findall(r'\[lazy\]: ANYTHING ("(?:[^"\\]|\\.)*")', spec.text)
        self._closings = ['"', "'", *map(json.loads, lazy)]
        self._text = bytearray()

    def run(self, start: str = "", *, most: int = 3000) -> str | None:
        """Return an output that begins with ``start``, or None if it gets too long."""
        if start:
            self._take(start)
        while len(self._text) < most:
            allowed = _allowed(self._matcher)
            if 256 in allowed and (len(allowed) == 1 or self._rng.random() < 0.6):
                return self._text.decode()
            allowed.discard(256)
            if not self._step(allowed):
                return None
        return None

    def _step(self, allowed: set[int]) -> bool:
        if len(allowed) > _TEXT_BYTES:
            if self._rng.random() < 0.4 and (closing := next(filter(self._ends, self._closings), "")):
                return self._take(closing)
            words = [text for text in (*self._words, *QUOTED) if self._fits(text)]
            return self._take(self._rng.choice(words)) if words else False
        return bool(allowed) and self._take(bytes([self._sign(allowed)]))

    def _sign(self, allowed: set[int]) -> int:
        """Choose a character outside texts."""
        if index := re.search(_INDEX, bytes(self._text)):
            number = len(re.findall(_INDEX[:-1], self._text)) - 1
            return ord(str(number)) if not index[1] else min(allowed - set(b"0123456789"))
        shown, space, line = self._as_in_sample(), ord(" "), ord("\n")
        if shown in allowed and chr(shown) in " \n\"'" and not (shown == line and ord("}") in allowed):
            return shown
        if self._lines and line in allowed and not {space, shown, ord("}")} & allowed:
            if not self._text.endswith(b"\n"):
                return line
        if space in allowed and self._text.endswith((b",", b":")):
            return space
        bare = allowed - set(b" \t\n\v\f\r") or allowed
        if ord("T") in bare and b"True" in self._sample:
            bare = bare - set(b"tfn") or bare
        if self._text.endswith(b'""'):  # no text between three quotes
            bare = bare - set(b'"') or bare
        digits = {sign for sign in bare if chr(sign).isdigit()}
        if digits and re.search(rb"[0-9]{3}$", self._text):
            bare = bare - digits or bare
        plain = bare - set(b"eE.+-")
        return self._rng.choice(sorted(plain or bare))

    def _as_in_sample(self) -> int:
        """Return what follows the end of the text in the sample, -1 if it is not in it."""
        for size in (12, 8, 5, 3):
            tail = bytes(self._text[-size:])
            place = self._sample.find(tail) + len(tail)
            if tail and len(tail) <= place < len(self._sample):
                return self._sample[place]
        return -1

    def _ends(self, text: str) -> bool:
        """Return whether a text fits, and ends the text of which it is a part."""
        if not self._fits(text):
            return False
        ahead = self._matcher.deep_copy()
        ahead.consume_tokens(list(text.encode()))
        return len(_allowed(ahead)) <= _TEXT_BYTES

    def _fits(self, text: str) -> bool:
        data = list(text.encode())
        return self._matcher.validate_tokens(data) == len(data)

    def _take(self, text: str | bytes) -> bool:
        data = text.encode() if isinstance(text, str) else text
        self._text += data
        return self._matcher.consume_tokens(list(data))


def _allowed(matcher: LLMatcher) -> set[int]:
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return set(map(int, np.flatnonzero(np.unpackbits(mask, bitorder="little"))))
