"""Grammars: convert a JSON schema or Lark text to masks of allowed next tokens (llguidance).

The library is imported when the first grammar is made. It drops the GIL while it compiles and while it computes a
mask, and its bounds on work are counted, not timed: what it refuses is refused on every machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgepipe.errors import RequestInvalid, StepFailed
from edgepipe.sampling.params import GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Bitmask = npt.NDArray[np.int32]
"""``[ceil(V / 32)]``: bit ``i`` of word ``w`` tells whether token ``32 * w + i`` is allowed."""

WHITESPACE = r"[ ]?|\n[ ]{0,16}"
"""Whitespace allowed between JSON's parts. It is bounded: otherwise a model might emit spaces without end."""


def json_grammar(schema: Mapping[str, Any]) -> GrammarSpec:
    """Make a grammar for one JSON value of the schema, unchecked. Raises RequestInvalid if it is too large."""
    return lark_grammar(f"start: {json_rule(schema)}\n")


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the schema in the form of a Lark rule. Its references are relative to itself."""
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}, ensure_ascii=True)


def choice_grammar(texts: Sequence[str]) -> GrammarSpec:
    """Make a grammar for one of the texts, unchecked. Raises RequestInvalid if they are too large."""
    return lark_grammar(f"start: {' | '.join(map(json.dumps, texts))}\n")


def regex_grammar(pattern: str) -> GrammarSpec:
    """Make a grammar for a full match of the pattern, unchecked. Raises RequestInvalid if it is too large."""
    slashed = _REGEX_PART.sub(lambda part: _SLASHED.get(part[0], part[0]), pattern)
    return lark_grammar(f"start: /{slashed}/\n")


_REGEX_PART = re.compile(r"\\?.", re.DOTALL)  # a character, or an escaped one
_SLASHED = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
"""Escapes for characters that would end a pattern, or its line, in a Lark grammar."""


def lark_grammar(text: str) -> GrammarSpec:
    """Make a grammar from text in llguidance's Lark dialect, unchecked. Raises RequestInvalid if it is too large."""
    return GrammarSpec("%llguidance {}\n" + text)


def rule_of(spec: GrammarSpec, name: str) -> str:
    """Return the rules of a grammar from this module, whose start has another name."""
    return name + spec.text.partition("start")[2].rstrip("\n")


def check_grammar(spec: GrammarSpec) -> None:
    """Compile the grammar and throw it away: some ms, up to a second for the largest, without end for hostile patterns.

    Raises RequestInvalid with the fault.
    """
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(spec.text)
    if failed:
        raise unusable_schema(_reason(messages[0]))


def unusable_schema(fact: str) -> RequestInvalid:
    """Make the error of a schema that the library refuses."""
    return RequestInvalid(
        "this schema cannot constrain the output",
        fact=fact,
        next_step="change the schema; docs/usage.md lists what is supported",
    )


def _reason(message: str) -> str:
    """Return the library's message without positions in a text that the user never saw."""
    first = message.strip().splitlines()[0]
    return first.rpartition("failed to compile JSON schema: ")[2][:300]


class GrammarTokenizer:
    """A model's vocabulary for grammars. Built once per stage; takes about 0.5 s for 150,000 tokens."""

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        encode: Callable[[str], list[int]],
        end_ids: Sequence[int],
        special_ids: Sequence[int],
    ) -> None:
        """
        tokens       [V] bytes of each id; empty for ids without text
        encode       the model's tokenizer, so that forced text uses the model's usual tokens
        end_ids      at least one; allowed only where the output may end
        special_ids  never allowed, except end ids
        """
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = _Vocabulary(tokens, encode=encode, end_ids=end_ids, special_ids=special_ids)
        self.library: LLTokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=list(end_ids))
        self.num_words = -(-len(tokens) // 32)


class GrammarState:
    """State of one output in its grammar: a function of the tokens taken."""

    def __init__(self, tokenizer: GrammarTokenizer, spec: GrammarSpec, tokens: Sequence[int] = ()) -> None:
        """Compile, then take the known tokens. Raises StepFailed for an invalid grammar or token."""
        from llguidance import LLMatcher

        self._matcher: LLMatcher = LLMatcher(tokenizer.library, spec.text, log_level=0)
        self._num_words = tokenizer.num_words
        self._check()
        for token in tokens:
            self.take(token)

    def take(self, token: int) -> None:
        """Append ``token`` to the output. Raises StepFailed if the grammar forbids it."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return  # complete: tokens after an ignored end are unconstrained
        self._matcher.consume_token(token)
        self._check()

    def mask(self) -> Bitmask:
        """Return the allowed next tokens: only end tokens once the output is complete. Raises StepFailed."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        self._check()
        return bits[: self._num_words]

    def _check(self) -> None:
        if self._matcher.is_error():
            raise StepFailed(
                "the output left its grammar, or the grammar is too complex to follow",
                fact=" ".join(self._matcher.get_error().split())[:300],
                next_step="send the request with a simpler schema",
            )


class _Vocabulary:
    """Vocabulary in the form that llguidance's wrapper expects."""

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        encode: Callable[[str], list[int]],
        end_ids: Sequence[int],
        special_ids: Sequence[int],
    ) -> None:
        self._encode = encode
        self.tokens = list(tokens)
        self.eos_token_id = end_ids[0]
        self.special_token_ids = sorted({*special_ids, *end_ids})

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode text that a grammar forces. The wrapper tries bytes once and uses text after the TypeError."""
        if isinstance(text, bytes):
            raise TypeError("only text can be encoded")
        return self._encode(text)
