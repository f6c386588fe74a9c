"""Grammars: convert a JSON schema or Lark text to masks of allowed next tokens (llguidance).

The library is imported when the first grammar is made. It drops the GIL while it compiles and while it computes a
mask, and its bounds on work are counted, not timed: what it refuses is refused on every machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgepipe.errors import GrammarNotReady, RequestInvalid, StepFailed
from edgepipe.sampling.number_bounds import TAIL_BYTES, NumberBounds
from edgepipe.sampling.params import GrammarSpec
from edgepipe.sampling.thought_budget import ThoughtBudget, ThoughtMeter, split_budget
from edgepipe.sampling.unique_keys import KeyMeter, QuotedTokens, keys_header, split_keys

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Bitmask = npt.NDArray[np.int32]
"""``[ceil(V / 32)]``: bit ``i`` of word ``w`` tells whether token ``32 * w + i`` is allowed."""

_JSON = "%json"  # begins a schema within a grammar

_COMPACT: Mapping[str, Any] = {"whitespace_flexible": False}
"""Without whitespace: models that write spaces or lines between JSON's parts need a fifth to a half more tokens."""

_SPACED: Mapping[str, Any] = {"whitespace_pattern": "[ ]?"}
"""The calls that models have learnt have spaces, too. A space is mostly a part of the next token, and calls are
short. It is bounded: otherwise a model might emit spaces without end."""


def json_grammar(schema: Mapping[str, Any]) -> GrammarSpec:
    """Make a grammar for one compact JSON value of the schema, unchecked. Raises RequestInvalid if it is too large."""
    return lark_grammar(f"start: {_json_rule(schema, _COMPACT)}\n")


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the schema of a call's arguments in the form of a Lark rule. Its references are relative to itself."""
    return _json_rule(schema, _SPACED)


def _json_rule(schema: Mapping[str, Any], whitespace: Mapping[str, Any]) -> str:
    return f"{_JSON} " + json.dumps({**schema, "x-guidance": whitespace}, ensure_ascii=True)


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


def with_budget(spec: GrammarSpec, budget: ThoughtBudget) -> GrammarSpec:
    """Return the grammar with a budget of reasoning. Raises RequestInvalid if it is too large."""
    return GrammarSpec(budget.header() + spec.text, spec.user)


def with_unique_keys(spec: GrammarSpec, *, opening: str, closing: str) -> GrammarSpec:
    """Return the grammar of a JSON text whose objects have no key twice; the marks are around reasoning before it.

    Raises RequestInvalid if it is too large.
    """
    return GrammarSpec(keys_header(opening=opening, closing=closing) + spec.text, spec.user)


def rule_of(spec: GrammarSpec, name: str) -> str:
    """Return the rules of a grammar from this module, whose start has another name."""
    return name + spec.text.partition("start")[2].rstrip("\n")


def parser_limits() -> LLParserLimits:
    """Return llguidance's limits for every grammar, on trial and on a stage.

    They bound a token's work: with them the costliest masks found take some 20 ms. Building has no such bound
    (``edgepipe.sampling.grammar_trial``). Large lexemes are not computed in advance, since that work and its failure
    depend on the vocabulary, which the trial does not have. The lexer's states take up to 30 MiB of each grammar; a
    grammar that has used them up is built again (``BuiltGrammar``).
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_lexer_fuel=50_000, max_lexer_states=50_000, precompute_large_lexemes=False, verbose_errors=False
    )


def check_grammar(spec: GrammarSpec) -> None:
    """Build what a stage builds, over a vocabulary of single bytes, follow how every output begins, and drop it.

    Takes some ms, up to 0.2 s for the largest ordinary schemas, without end for hostile ones. Raises RequestInvalid
    with the fault.
    """
    matcher = _matcher(_byte_vocabulary().library, spec)
    for _ in range(_FORCED_BYTES):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if len(allowed) != 1 or matcher.is_stopped():
            break
        matcher.consume_token(int(allowed[0]))
    if matcher.is_error():
        raise unusable_schema(_reason(matcher.get_error()))


_FORCED_BYTES = 64  # followed at the beginning of an output, such as an object's brace


@cache
def _byte_vocabulary() -> GrammarTokenizer:
    """Return the smallest vocabulary. The vocabulary's size adds little to the work of building a grammar."""
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    return GrammarTokenizer(tokens, encode=lambda text: list(text.encode()), end_ids=[256], special_ids=[256])


def _matcher(library: LLTokenizer, spec: GrammarSpec) -> LLMatcher:
    """Build a grammar's matcher. Raises RequestInvalid with the fault."""
    from llguidance import LLMatcher

    text = _split(spec).text
    matcher = LLMatcher(library, text, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise unusable_schema(_reason(matcher.get_error()))
    return matcher


@dataclass(frozen=True, slots=True)
class _Parts:
    """A grammar's text for the library, and what else binds its outputs."""

    text: str
    marks: tuple[str, str] | None  # around reasoning, if the JSON after it has no key twice
    budget: ThoughtBudget | None


def _split(spec: GrammarSpec) -> _Parts:
    """Return the parts of a grammar. Raises RequestInvalid."""
    try:
        marks, rest = split_keys(spec.text)
        budget, text = split_budget(rest)
        return _Parts(text, marks, budget)
    except (ValueError, RecursionError) as exc:
        raise unusable_schema(str(exc)[:100]) from exc


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

        self.tokens = tokens
        self.encode = encode
        vocabulary = _Vocabulary(tokens, encode=encode, end_ids=end_ids, special_ids=special_ids)
        self.library: LLTokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=list(end_ids))
        self.num_words = -(-len(tokens) // 32)
        self.tokens = vocabulary.tokens

    @cached_property
    def number_bounds(self) -> NumberBounds:
        """Tokens that continue numbers. Made by the first grammar with JSON, in 0.06 s for 150,000 tokens."""
        return NumberBounds(self.tokens)

    @cached_property
    def quoted(self) -> QuotedTokens:
        """Tokens that can end a key. Made by the first grammar that needs them, in 0.1 s for 150,000 tokens."""
        return QuotedTokens(self.tokens)


class BuiltGrammar:
    """A compiled grammar, which the states of all its outputs share.

    Copies of llguidance's matcher share the lexer, whose number of states is limited. So a state may fail because of
    what others have used up; a new grammar of the same text then goes on.
    """

    def __init__(self, tokenizer: GrammarTokenizer, spec: GrammarSpec, *, num_bytes: int = 0) -> None:
        """Compile. ``num_bytes``: memory that it takes, as measured on trial. Raises RequestInvalid with the fault."""
        self.num_bytes = num_bytes
        self.used = False  # an output has grown since it was compiled
        self.spent = False  # a state has failed: build the text again for further sequences
        self._matcher = _matcher(tokenizer.library, spec)
        self.tokenizer = tokenizer
        self.number_bounds = tokenizer.number_bounds if _JSON in spec.text else None
        self._parts = _split(spec)

    def state(self, tokens: Sequence[int] = ()) -> GrammarState:
        """Return the state after these tokens. Raises StepFailed, GrammarNotReady like the state."""
        state = GrammarState(self, self._matcher.deep_copy(), self._parts)
        for token in tokens:
            state.follow(token)
        return state


class GrammarState:
    """State of one output in its grammar: a function of the tokens taken.

    Methods raise StepFailed if the grammar forbids a token or is too complex to follow, and GrammarNotReady if a newly
    built grammar may still follow the output.
    """

    def __init__(self, built: BuiltGrammar, matcher: LLMatcher, parts: _Parts) -> None:
        tokenizer = built.tokenizer
        self._built = built  # alive, and counted, as long as one of its states
        self._matcher = matcher
        self._tail = b""  # end of the output, for the bounds of numbers
        self._budget, self._keys = None, None
        if parts.budget is not None:
            self._budget = ThoughtMeter(parts.budget, token_bytes=tokenizer.tokens, encode=tokenizer.encode)
        if parts.marks is not None:
            opening, closing = parts.marks
            self._keys = KeyMeter(tokenizer.quoted, opening=opening, closing=closing)
        self._mask: Bitmask | None = None  # mask of the current state

    def fork(self) -> GrammarState:
        """Return a copy that goes on with other tokens."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        other._budget = self._budget.fork() if self._budget is not None else None
        other._keys = self._keys.fork() if self._keys is not None else None
        return other

    def take(self, token: int) -> None:
        """Append ``token`` to the output."""
        self.follow(token)
        self._built.used = True

    def follow(self, token: int) -> None:
        """Append a token that the output has already."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return  # complete: tokens after an ignored end are unconstrained
        self._mask = None
        for meter in (self._budget, self._keys):
            if meter is not None:
                meter.take(token)
        self._matcher.consume_token(token)
        self._check()
        if self._built.number_bounds is not None:
            self._tail = (self._tail + self._built.tokenizer.tokens[token])[-TAIL_BYTES:]

    def mask(self) -> Bitmask:
        """Return the allowed next tokens: only end tokens once the output is complete."""
        if self._mask is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
            self._check()
            mask, numbers = bits[: self._built.tokenizer.num_words], self._built.number_bounds
            self._mask = self._bound(mask if numbers is None else numbers.bounded(mask, self._tail))
        return self._mask

    def forced(self) -> Sequence[int]:
        """Return the next tokens as far as the grammar leaves no choice, in the model's usual tokens."""
        if self._matcher.is_stopped():
            return ()
        tokens = self._matcher.compute_ff_tokens()
        self._check()
        return tokens

    def _bound(self, mask: Bitmask) -> Bitmask:
        """Return the mask without keys that an object has, or with only the token that must come.

        A token that must come waits for the end of a character; a mask without any token stays as it was.
        """
        token = self._budget.must_come() if self._budget is not None else None
        if token is not None and mask[token >> 5] >> (token & 31) & 1:
            only = np.zeros_like(mask)
            only[token >> 5] = _bit(token)
            return only
        vetoed = [*self._keys.vetoed()] if self._keys is not None else []
        if not vetoed:
            return mask
        left = mask.copy()
        for token in vetoed:
            left[token >> 5] &= ~_bit(token)
        return left if left.any() else mask

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        self._built.spent = True
        if self._built.used:
            raise GrammarNotReady
        raise StepFailed(
            "the output left its grammar, or the grammar is too complex to follow",
            fact=" ".join(self._matcher.get_error().split())[:300],
            next_step="send the request with a simpler schema",
        )


def _bit(token: int) -> np.int32:
    """Return the bit of a token within its word."""
    place = token & 31
    return np.int32(1 << place if place < 31 else -(1 << 31))


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
