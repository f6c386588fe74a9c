"""Sequences of all kinds of sampling, for backends whose devices pick candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgepipe.sampling import SamplingParams, SequenceSampler
from edgepipe.sampling.grammar import BuiltGrammar, GrammarTokenizer, json_grammar
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.emulated_folder import EOS_TOKEN_ID, byte_level_tokenizer

CANDIDATES = 256
VOCABULARY = 3 * CANDIDATES
_FULL = SamplingParams(
    temperature=0.8,
    top_p=0.95,
    min_p=0.01,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    repetition_penalty=1.3,
    logit_bias=((5, 4.0), (9, -100.0)),
    logprobs=True,
    top_logprobs=4,
)
KINDS = [
    SamplingParams(temperature=0.0, min_tokens=50),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=20.0),  # so flat that most draws fall beyond the candidates
    SamplingParams(temperature=1.0, top_k=CANDIDATES + 50),
    _FULL,
    replace(_FULL, grammar=json_grammar({"type": "array", "items": {"type": "integer"}})),
]


def vocabulary() -> GrammarTokenizer:
    """Return the words of ``VOCABULARY``."""
    tokenizer = Tokenizer(byte_level_tokenizer(VOCABULARY))
    return GrammarTokenizer(
        [tokenizer.token_bytes(token) for token in range(VOCABULARY)],
        encode=lambda text: tokenizer.encode(text, add_special=False),
        end_ids=[EOS_TOKEN_ID],
        special_ids=sorted(tokenizer.hidden_ids),
    )


def sequences(words: GrammarTokenizer, prompt: Sequence[int]) -> list[SequenceSampler]:
    """Return a sequence of each kind, with a seed of its own."""
    return [
        SequenceSampler(
            replace(params, seed=index),
            prompt=prompt,
            end_ids=[EOS_TOKEN_ID],
            start_grammar=BuiltGrammar(words, params.grammar).state if params.grammar else None,
        )
        for index, params in enumerate(KINDS)
    ]
