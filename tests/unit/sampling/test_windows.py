"""Windows of drafts: the tokens are those of sampling one by one, whatever the drafts are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.backend.types import PickedCandidates
from edgepipe.sampling import SKIPPED, Sampled, SampleRow, SamplingParams, SequenceSampler, logit_edits, sample
from edgepipe.sampling.device import sample_picked
from edgepipe.sampling.grammar import BuiltGrammar, GrammarTokenizer, json_grammar, with_unique_keys
from edgepipe.sampling.rows import Logits
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.emulated_folder import EOS_TOKEN_ID, SMALLEST_VOCAB, byte_level_tokenizer
from tests.unit.sampling.test_filters_and_penalties import END_IDS, PARAMS, TOKENS, V

Way = Callable[[Logits, Sequence[SampleRow]], list[Sampled]]


def on_device(logits: Logits, rows: Sequence[SampleRow]) -> list[Sampled]:
    """What a device does: it changes the logits by the edits of all rows, and returns the best four of each."""
    edits, changed = logit_edits(rows), logits.copy()
    old = logits[edits.rows, edits.ids]
    changed[edits.rows, edits.ids] = np.where(old > 0, old / edits.repetition, old * edits.repetition) + edits.add
    if edits.masks is not None:
        allowed = np.unpackbits(edits.masks.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
        changed[allowed == 0] = -np.inf
    best = np.argsort(-changed, axis=1, kind="stable")[:, :4]
    top = np.argsort(-logits, axis=1, kind="stable")[:, : edits.num_top]
    shares = np.exp((changed - changed.max(axis=1, keepdims=True)) / edits.temperatures[:, None])
    picked = PickedCandidates(
        ids=best.astype(np.int32),
        logits=np.take_along_axis(changed, best, 1),
        raw_logits=np.take_along_axis(logits, best, 1),
        totals=shares.sum(axis=1),
        raw_log_totals=np.log(np.exp(logits).sum(axis=1)),
        top_ids=top.astype(np.int32),
        top_logits=np.take_along_axis(logits, top, 1),
        fetch=lambda row: changed[row].copy(),
    )
    return sample_picked(picked, rows)


WAYS: tuple[Way, ...] = (sample, on_device)


def logits_after(tokens: Sequence[int], vocab_size: int = V) -> Logits:
    """Logits that depend on every token."""
    return (np.random.default_rng(list(tokens)).standard_normal(vocab_size) * 3).astype(np.float32)


def one_by_one(sampler: SequenceSampler, known: list[int], count: int, vocab_size: int = V) -> list[Sampled]:
    found: list[Sampled] = []
    tokens = list(known)
    for _ in range(count):
        found += sample(logits_after(tokens, vocab_size)[None], [SampleRow(sampler, len(tokens))])
        tokens.append(found[-1].token)
    return found


def in_windows(
    way: Way, sampler: SequenceSampler, known: list[int], wanted: Sequence[Sampled], draw: random.Random, vocab: int = V
) -> list[Sampled]:
    """The same, with drafts that are mostly right."""
    found: list[Sampled] = []
    while len(found) < len(wanted):
        following = [each.token for each in wanted[len(found) :]]
        drafts = [token if draw.random() < 0.8 else draw.randrange(vocab) for token in following[: draw.randint(0, 5)]]
        tokens = [*known, *[each.token for each in found]]
        rows = [SampleRow(sampler, len(tokens) + at, draft) for at, draft in enumerate([*drafts, None])]
        logits = np.stack([logits_after([*tokens, *drafts[:at]], vocab) for at in range(len(rows))])
        window = way(logits, rows)
        ends = next((at for at, each in enumerate(window) if each is SKIPPED), len(window))
        assert all(each is SKIPPED for each in window[ends:])
        found += window[:ends]
    return found[: len(wanted)]


@pytest.mark.parametrize("way", WAYS, ids=["rows", "candidates"])
@settings(max_examples=150)
@given(params=PARAMS, prompt=TOKENS, generated=TOKENS, seed=st.integers(0, 1000))
def test_windows_give_what_single_rows_give(
    way: Way, params: SamplingParams, prompt: list[int], generated: list[int], seed: int
) -> None:
    here, there = (SequenceSampler(params, prompt=prompt, generated=generated, end_ids=END_IDS) for _ in "ab")
    wanted = one_by_one(here, generated, 10)
    got = in_windows(way, there, generated, wanted, random.Random(seed))
    assert [each.token for each in got] == [each.token for each in wanted]
    for one, other in zip(got, wanted, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}


@pytest.fixture(scope="module")
def built() -> BuiltGrammar:
    tokenizer = Tokenizer(byte_level_tokenizer())
    vocabulary = GrammarTokenizer(
        [tokenizer.token_bytes(token) for token in range(SMALLEST_VOCAB)],
        encode=lambda text: tokenizer.encode(text, add_special=False),
        end_ids=[EOS_TOKEN_ID],
        special_ids=sorted(tokenizer.hidden_ids),
    )
    return BuiltGrammar(vocabulary, with_unique_keys(json_grammar(SCHEMA), opening="", closing=""))


@pytest.mark.parametrize("way", WAYS, ids=["rows", "candidates"])
@pytest.mark.parametrize("seed", range(5))
def test_a_grammar_sees_no_draft_that_was_not_sampled(way: Way, seed: int, built: BuiltGrammar) -> None:
    params = SamplingParams(seed=seed, grammar=json_grammar(SCHEMA), frequency_penalty=0.5)
    here, there = (SequenceSampler(params, start_grammar=built.state) for _ in "ab")
    wanted = one_by_one(here, [], 24, SMALLEST_VOCAB)
    assert all(each.error is None for each in wanted)
    got = in_windows(way, there, [], wanted, random.Random(seed), SMALLEST_VOCAB)
    assert [each.token for each in got] == [each.token for each in wanted]
    assert not built.spent, "a draft that the grammar forbids breaks nothing"


def test_a_grammar_names_the_tokens_that_must_come(built: BuiltGrammar) -> None:
    params = SamplingParams(temperature=0.0, grammar=json_grammar(SCHEMA))
    sampler = SequenceSampler(params, start_grammar=built.state)
    (first,) = sample(logits_after([], SMALLEST_VOCAB)[None], [SampleRow(sampler, 0)])
    tokens = [first.token, *sampler.forced()]
    assert bytes(b for token in tokens for b in built.tokenizer.tokens[token]) == b'{"name":"'


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_window_behind_another_token_than_it_assumes_has_no_tokens(way: Way, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3)
    wanted = [each.token for each in one_by_one(SequenceSampler(params), [], 4)]
    sampler = SequenceSampler(params)

    def window(known: list[int], given: int | None, draft: int) -> list[int]:
        rows = [SampleRow(sampler, len(known), draft, given), SampleRow(sampler, len(known) + 1)]
        logits = np.stack([logits_after(known), logits_after([*known, draft])])
        return [each.token for each in way(logits, rows) if each is not SKIPPED]

    assert window([], None, wanted[0] + 1) == wanted[:1]
    assert window([wanted[0] + 1], wanted[0] + 1, 0) == [], "it assumes another token"
    assert window([wanted[0], 5], 5, 0) == [], "it assumes a token that was not sampled"
    assert window(wanted[:1], wanted[0], wanted[1]) == wanted[1:3]
    assert window(wanted[:2], wanted[1], wanted[2]) == [], "a token later"
    assert window(wanted[:3], wanted[2], 0)[:1] == wanted[3:4]
