"""Penalties, bias, filters, grammars and log-probabilities against a plain rebuild from all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from edgepipe.backend.types import LogitEdits, PickedCandidates
from edgepipe.errors import GrammarNotReady, RequestInvalid, StepFailed
from edgepipe.sampling import (
    GrammarSpec,
    SampleRow,
    SamplingParams,
    SequenceSampler,
    StartGrammar,
    draw,
    grammar,
    logit_edits,
    sample,
)
from edgepipe.sampling.device import sample_picked
from edgepipe.sampling.edits import TokenEdits
from edgepipe.sampling.grammar import BuiltGrammar, GrammarState, GrammarTokenizer, json_grammar, regex_grammar
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.emulated_folder import EOS_TOKEN_ID, SMALLEST_VOCAB, byte_level_tokenizer
from tests.support.gateways.sampling_columns import ColumnSampler

V = 61
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    seed=st.integers(0, 2**64 - 1),
    top_k=st.sampled_from([0, 1, 5, 60, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (7, -100.0))]),
    min_tokens=st.sampled_from([0, 4]),
    logprobs=st.booleans(),
    top_logprobs=st.sampled_from([0, 3]),
)
TOKENS = st.lists(st.integers(0, V - 1), max_size=12)
END_IDS = (2, 9)


def logits_for(position: int) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(position).standard_normal(V) * 3).astype(np.float32)


def plain(params: SamplingParams, prompt: list[int], generated: list[int]) -> int:
    """The definition, in float64, everything made anew."""
    logits = logits_for(len(generated)).astype(np.float64)
    for token in set(prompt + generated):
        logits[token] = (
            logits[token] / params.repetition_penalty
            if logits[token] > 0
            else (logits[token] * params.repetition_penalty)
        )
    for token in set(generated):
        logits[token] -= params.frequency_penalty * generated.count(token) + params.presence_penalty
    for token, bias in params.logit_bias:
        logits[token] += bias
    if len(generated) < params.min_tokens:
        logits[list(END_IDS)] = -np.inf
    order = np.argsort(-logits, kind="stable")
    if params.greedy:
        return int(order[0])
    order = order[: params.top_k] if params.top_k else order
    shares = np.exp((logits[order] - logits[order[0]]) / params.temperature)
    if params.top_p < 1:
        kept = int((np.cumsum(shares) / shares.sum() < params.top_p).sum()) + 1
        order, shares = order[:kept], shares[:kept]
    kept = int((shares >= params.min_p * shares[0]).sum())
    shares = np.cumsum(shares[:kept])
    return int(order[int((shares <= draw(params.seed, 0, len(generated)) * shares[-1]).sum())])


@settings(max_examples=300)
@given(params=PARAMS, prompt=TOKENS, generated=TOKENS)
def test_state_kept_from_token_to_token_equals_a_rebuild(
    params: SamplingParams, prompt: list[int], generated: list[int]
) -> None:
    kept = SequenceSampler(params, prompt=prompt, generated=generated, end_ids=END_IDS)
    tokens = list(generated)
    for _ in range(6):
        sampled = sample(logits_for(len(tokens))[None], [SampleRow(kept, len(tokens))])[0]
        assert sampled.error is None
        fresh = SequenceSampler(params, prompt=prompt, generated=tokens, end_ids=END_IDS)
        assert sample(logits_for(len(tokens))[None], [SampleRow(fresh, len(tokens))])[0] == sampled
        assert sampled.token == plain(params, prompt, tokens)
        tokens.append(sampled.token)


def test_penalties_of_many_tokens_are_those_of_few() -> None:
    params = SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=1.5, logit_bias=((3, 5.0), (7, -100.0))
    )
    prompt, generated = list(range(0, 400, 2)), list(range(0, 400, 3)) * 2
    edits = TokenEdits(params, prompt)
    for token in generated:
        edits.took(token)
    logits = (np.random.default_rng(0).standard_normal(400) * 3).astype(np.float32)
    row = logits.copy()
    edits.apply(row)
    for token in range(400):
        few = TokenEdits(params, {token} & set(prompt))
        for _ in range(generated.count(token)):
            few.took(token)
        alone = logits.copy()
        few.apply(alone)
        assert row[token] == alone[token]
        assert edits.original(token, float(row[token])) == pytest.approx(float(logits[token]), abs=1e-4)


@settings(max_examples=100)
@given(
    params=st.lists(PARAMS, min_size=3, max_size=3),
    prompt=TOKENS,
    generated=TOKENS,
    order=st.lists(st.permutations(range(3)), min_size=4, max_size=4),
)
def test_columns_give_what_rows_give_however_batches_change(
    params: list[SamplingParams], prompt: list[int], generated: list[int], order: list[list[int]]
) -> None:
    columns = ColumnSampler(vocab_size=V, batch=3)
    here, there = (
        [SequenceSampler(each, prompt=prompt, generated=generated, end_ids=END_IDS) for each in params] for _ in "ab"
    )
    for step, chosen in enumerate(order):
        position = len(generated) + step
        logits = np.stack([logits_for(position + which) for which in chosen])
        wanted = sample(logits.copy(), [SampleRow(here[which], position) for which in chosen])
        got = columns(logits, [SampleRow(there[which], position) for which in chosen])
        assert [each.token for each in got] == [each.token for each in wanted]


@settings(max_examples=200)
@given(params=PARAMS, prompt=TOKENS, generated=TOKENS, num_candidates=st.sampled_from([1, 4, V]))
def test_a_device_that_returns_candidates_gives_the_same(
    params: SamplingParams, prompt: list[int], generated: list[int], num_candidates: int
) -> None:
    here, there = (SequenceSampler(params, prompt=prompt, generated=generated, end_ids=END_IDS) for _ in range(2))
    tokens = list(generated)
    for _ in range(3):
        wanted = sample(logits_for(len(tokens))[None], [SampleRow(here, len(tokens))])[0]
        row = SampleRow(there, len(tokens))
        picked = pick(logits_for(len(tokens)), logit_edits([row]), num_candidates)
        got = sample_picked(picked, [row])[0]
        assert got.token == wanted.token
        if wanted.logprobs is not None and got.logprobs is not None:
            assert got.logprobs.logprob == pytest.approx(wanted.logprobs.logprob, abs=1e-4)
            assert [token for token, _ in got.logprobs.top] == [token for token, _ in wanted.logprobs.top]
        tokens.append(wanted.token)


def pick(logits: npt.NDArray[np.float32], edits: LogitEdits, count: int) -> PickedCandidates:
    """What a device does, one row."""
    changed = logits.copy()
    old = logits[edits.ids]
    changed[edits.ids] = np.where(old > 0, old / edits.repetition, old * edits.repetition) + edits.add
    best, top = np.argsort(-changed, kind="stable")[:count], np.argsort(-logits, kind="stable")[: edits.num_top]
    return PickedCandidates(
        ids=best[None].astype(np.int32),
        logits=changed[best][None],
        raw_logits=logits[best][None],
        totals=np.exp((changed - changed.max()) / edits.temperatures[0]).sum(keepdims=True),
        raw_log_totals=np.log(np.exp(logits).sum(keepdims=True)),
        top_ids=top[None].astype(np.int32),
        top_logits=logits[top][None],
        fetch=lambda row: changed,
    )


def test_a_lower_position_truncates_and_a_gap_is_an_error() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    sampler = SequenceSampler(params)
    tokens = [sample(logits_for(0)[None], [SampleRow(sampler, position)])[0].token for position in range(5)]
    assert tokens == [plain(params, [], []), *tokens[1:]]
    assert [sample(logits_for(0)[None], [SampleRow(sampler, position)])[0].token for position in (2, 3, 4)] == tokens[
        2:
    ]
    assert isinstance(sample(logits_for(0)[None], [SampleRow(sampler, 9)])[0].error, StepFailed)


def test_choices_of_one_request_differ_and_equal_seeds_do_not() -> None:
    def answer(seed: int, choice: int) -> list[int]:
        sampler = SequenceSampler(SamplingParams(seed=seed, temperature=3.0), choice=choice)
        return [sample(logits_for(0)[None], [SampleRow(sampler, position)])[0].token for position in range(20)]

    assert answer(1, 0) == answer(1, 0)
    assert len({tuple(answer(1, choice)) for choice in range(4)}) == 4


def test_logprobs_are_the_models_own() -> None:
    params = SamplingParams(temperature=0.0, logprobs=True, top_logprobs=2, logit_bias=((5, 100.0),))
    sampled = sample(logits_for(0)[None], [SampleRow(SequenceSampler(params), 0)])[0]
    exact = logits_for(0).astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    assert sampled.token == 5
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(exact[5], abs=1e-5)
    best = np.argsort(-exact)[:2]
    assert [token for token, _ in sampled.logprobs.top] == best.tolist()
    assert [value for _, value in sampled.logprobs.top] == pytest.approx(exact[best], abs=1e-5)


def vocabulary() -> GrammarTokenizer:
    tokenizer = Tokenizer(byte_level_tokenizer())
    return GrammarTokenizer(
        [tokenizer.token_bytes(token) for token in range(SMALLEST_VOCAB)],
        encode=lambda text: tokenizer.encode(text, add_special=False),
        end_ids=[EOS_TOKEN_ID],
        special_ids=sorted(tokenizer.hidden_ids),
    )


WORDS = json_grammar({"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 2, "maxItems": 3})


def start_of(spec: GrammarSpec) -> StartGrammar:
    return lambda tokens: BuiltGrammar(vocabulary(), spec).state(tokens)


def write(sampler: SequenceSampler, *, start: int = 0, count: int = 60) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count and EOS_TOKEN_ID not in tokens:
        noise = np.random.default_rng(start + len(tokens)).standard_normal((1, SMALLEST_VOCAB)).astype(np.float32)
        sampled = sample(noise, [SampleRow(sampler, start + len(tokens))])[0]
        assert sampled.error is None
        tokens.append(sampled.token)
        sampler.look_ahead()
    return tokens


def test_a_grammar_binds_the_output_and_is_rebuilt_from_its_tokens() -> None:
    params, start = SamplingParams(temperature=1.0, seed=3, grammar=WORDS, min_tokens=200), start_of(WORDS)
    whole = write(SequenceSampler(params, end_ids=[EOS_TOKEN_ID], start_grammar=start))
    assert whole[-1] == EOS_TOKEN_ID, "where nothing but the end is left, it comes before min_tokens"
    text = bytes(whole[:-1]).decode()
    assert set(text.strip("[]").replace('"', "").replace(" ", "").replace("\n", "").split(",")) <= {"yes", "no"}
    for cut in (1, 4, len(whole) - 1):
        again = SequenceSampler(params, generated=whole[:cut], end_ids=[EOS_TOKEN_ID], start_grammar=start)
        assert write(again, start=cut) == whole[cut:]


def test_a_grammar_that_cannot_be_followed_fails_its_row_alone() -> None:
    nothing = GrammarSpec("start: nothing")
    good = SequenceSampler(SamplingParams(temperature=0.0))
    bad = SequenceSampler(SamplingParams(temperature=0.0, grammar=nothing), start_grammar=start_of(nothing))
    noise = np.random.default_rng(0).standard_normal((2, SMALLEST_VOCAB)).astype(np.float32)
    first, second = sample(noise, [SampleRow(good, 0), SampleRow(bad, 0)])
    assert first.error is None
    assert isinstance(second.error, RequestInvalid)


def test_a_grammar_that_was_not_ready_for_the_mask_is_not_used_for_the_draw() -> None:
    """A device picks candidates with the step's mask; a grammar that is ready only after that would meet others."""
    late: list[StartGrammar] = []

    def start(tokens: Sequence[int]) -> GrammarState:
        if not late:
            raise GrammarNotReady
        return late[0](tokens)

    sampler = SequenceSampler(SamplingParams(temperature=0.0, grammar=WORDS), start_grammar=start)
    with pytest.raises(GrammarNotReady):
        sampler.begin(0)
    late.append(start_of(WORDS))
    with pytest.raises(GrammarNotReady):
        sampler.begin(0)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": float("nan")},
        {"frequency_penalty": 2.5},
        {"presence_penalty": float("inf")},
        {"repetition_penalty": 0.0},
        {"top_logprobs": 21},
        {"min_tokens": -1},
        {"logit_bias": tuple((token, 1.0) for token in range(301))},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1, 101.0),)},
    ],
)
def test_parameters_that_cannot_be_used(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestInvalid):
        SamplingParams(**fields)


def test_a_grammar_used_up_by_other_outputs_is_not_the_output_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "parser_limits", lambda: LLParserLimits(max_lexer_states=300))
    either = regex_grammar("a{200}x|c{200}y")
    built = BuiltGrammar(vocabulary(), either)
    first, second = built.state(), built.state()
    follow(first, b"a" * 200)
    with pytest.raises(GrammarNotReady):
        follow(second, b"c" * 200)
    assert built.spent
    follow(BuiltGrammar(vocabulary(), either).state(), b"c" * 200 + b"y")


def follow(state: GrammarState, tokens: bytes) -> None:
    for token in tokens:
        assert state.mask()[token >> 5] & (1 << (token & 31))
        state.take(token)


def test_an_output_outside_its_grammar_fails() -> None:
    with pytest.raises(StepFailed, match="left its grammar"):
        BuiltGrammar(vocabulary(), regex_grammar("a{200}x|c{200}y")).state(b"az")
