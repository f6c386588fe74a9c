"""Convert token ids to text as they arrive: whole characters only, constant work per token."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from itertools import filterfalse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _Library


_OPEN_BYTES = 3  # longest incomplete character


class Detokenizer:
    """Incremental decoder of one text. The same ids always give the same text, also when replayed.

    The text of ``before`` and the text of the added ids join to the text of all ids, wherever the cut is. A character
    that ``before`` leaves incomplete appears in the text of the added ids.
    """

    def __init__(self, table: TokenTable, skipped: frozenset[int], *, before: Sequence[int] = ()) -> None:
        """Start after the text of ``before``; without it at the start of a text."""
        self._table = table
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._to_strip = table.leading_spaces
        self._pass(before)

    def add(self, token: int) -> str:
        """Add a token and return its text; empty while a character is incomplete. Unknown ids give no text."""
        if token in self._skipped:
            return ""
        data = self._table(token)
        return self._decoder.decode(self._stripped(data) if self._to_strip else data)

    def finish(self) -> str:
        """Return the rest at the end: a replacement character for an incomplete one."""
        return self._decoder.decode(b"", final=True)

    def _stripped(self, data: bytes) -> bytes:
        """Remove leading spaces that the encoding added to the text."""
        kept = data.lstrip(b" ")
        num_spaces = min(len(data) - len(kept), self._to_strip)
        self._to_strip = 0 if kept else self._to_strip - num_spaces
        return data[num_spaces:]

    def _pass(self, before: Sequence[int]) -> None:
        """Advance to the end of ``before``. Reads only a few tokens at both its ends."""
        for token in filterfalse(self._skipped.__contains__, before):
            if not self._to_strip:
                break
            self._stripped(self._table(token))
        end = b""
        for token in filterfalse(self._skipped.__contains__, reversed(before)):
            end = self._table(token) + end
            if len(end) >= _OPEN_BYTES:
                break
        self._decoder.decode(end)


class TokenTable:
    """Bytes of each token, by the rules of the tokenizer's decoder."""

    def __init__(self, library: _Library, *, rule: Callable[[str], bytes], leading_spaces: int = 0) -> None:
        self._library = library
        self._rule = rule
        self.leading_spaces = leading_spaces  # removed from the start of a text

    def __call__(self, token: int) -> bytes:
        text = self._library.id_to_token(token)
        return b"" if text is None else self._rule(text)


def token_bytes(library: _Library) -> TokenTable:
    """Return the table for a loaded tokenizer: byte-level, SentencePiece, or plain text for other decoders."""
    state: Any = json.loads(library.decoder.__getstate__()) if library.decoder is not None else {}
    kinds = {step.get("type"): step for step in state.get("decoders", [state])}
    if "ByteLevel" in kinds:
        return TokenTable(library, rule=_byte_level_rule())
    if "Metaspace" in kinds:
        strips = kinds["Metaspace"].get("prepend_scheme", "always") != "never"
        return TokenTable(library, rule=_sentence_piece_rule, leading_spaces=int(strips))
    if "ByteFallback" in kinds or "Replace" in kinds:
        strip = kinds.get("Strip", {"content": " ", "start": 0})
        return TokenTable(
            library, rule=_sentence_piece_rule, leading_spaces=strip["start"] if strip["content"] == " " else 0
        )
    return TokenTable(library, rule=lambda text: text.encode("utf-8", "replace"))


def _byte_level_rule() -> Callable[[str], bytes]:
    """Return the rule of GPT-2's alphabet: printable Latin-1 bytes map to themselves, the other 68 to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}

    def rule(text: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in text])
        except KeyError:  # an added token represents its own text
            return text.encode("utf-8", "replace")

    return rule


def _sentence_piece_rule(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.replace("▁", " ").encode("utf-8", "replace")
