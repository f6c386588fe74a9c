"""Token ids to text as they come: never half a character, constant work per token."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _Library


class Detokenizer:
    """Decodes one growing answer. A function of the ids added: replaying them gives the same text."""

    def __init__(self, table: TokenTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True

    def add(self, token: int) -> str:
        """The text that is certain now; may be empty while a character is incomplete. Unknown ids give nothing."""
        if token in self._skipped:
            return ""
        data = self._table(token)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(self._table.stripped_prefix)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left at the end: a replacement character for an incomplete one."""
        return self._decoder.decode(b"", final=True)


class TokenTable:
    """What each token stands for in bytes, by the rules of the tokenizer's decoder."""

    def __init__(self, library: _Library, *, rule: Callable[[str], bytes], stripped_prefix: bytes) -> None:
        self._library = library
        self._rule = rule
        self.stripped_prefix = stripped_prefix  # taken off the start of a text

    def __call__(self, token: int) -> bytes:
        text = self._library.id_to_token(token)
        return b"" if text is None else self._rule(text)


def token_bytes(library: _Library) -> TokenTable:
    """The table for a loaded tokenizer: byte-level, SentencePiece, or plain text where the decoder is another."""
    state: Any = json.loads(library.decoder.__getstate__()) if library.decoder is not None else {}
    kinds = {step.get("type"): step for step in state.get("decoders", [state])}
    if "ByteLevel" in kinds:
        return TokenTable(library, rule=_byte_level_rule(), stripped_prefix=b"")
    if "Metaspace" in kinds:
        strips = kinds["Metaspace"].get("prepend_scheme", "always") != "never"
        return TokenTable(library, rule=_sentence_piece_rule, stripped_prefix=b" " if strips else b"")
    if "ByteFallback" in kinds or "Replace" in kinds:
        return TokenTable(library, rule=_sentence_piece_rule, stripped_prefix=b" " if "Strip" in kinds else b"")
    return TokenTable(library, rule=lambda text: text.encode("utf-8", "replace"), stripped_prefix=b"")


def _byte_level_rule() -> Callable[[str], bytes]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 are moved to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}

    def rule(text: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in text])
        except KeyError:  # an added token stands for its own text
            return text.encode("utf-8", "replace")

    return rule


def _sentence_piece_rule(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass
    return text.replace("▁", " ").encode("utf-8", "replace")
