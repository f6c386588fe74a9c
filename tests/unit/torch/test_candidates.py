"""What the device picks of its logits leads to the tokens that whole rows lead to; on the CPU, where it is off."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from edgepipe_torch import TorchBackend
from edgepipe_torch.cpu.transfer import HostTransfer
from edgepipe_torch.layers.candidates import NUM_CANDIDATES, pick

from edgepipe.backend.types import BackendOptions
from edgepipe.errors import ConfigInvalid
from edgepipe.sampling import SampleRow, SamplingParams, SequenceSampler, logit_edits, sample, sample_picked
from edgepipe.sampling.grammar import BuiltGrammar, GrammarTokenizer, json_grammar
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.emulated_folder import EOS_TOKEN_ID, byte_level_tokenizer

V = 3 * NUM_CANDIDATES
FULL = SamplingParams(
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
    SamplingParams(temperature=1.0, top_k=NUM_CANDIDATES + 50),
    FULL,
    replace(FULL, grammar=json_grammar({"type": "array", "items": {"type": "integer"}})),
]


@pytest.fixture(scope="module")
def vocabulary() -> GrammarTokenizer:
    tokenizer = Tokenizer(byte_level_tokenizer(V))
    return GrammarTokenizer(
        [tokenizer.token_bytes(token) for token in range(V)],
        encode=lambda text: tokenizer.encode(text, add_special=False),
        end_ids=[EOS_TOKEN_ID],
        special_ids=sorted(tokenizer.hidden_ids),
    )


def test_candidates_and_whole_rows_choose_the_same(vocabulary: GrammarTokenizer) -> None:
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, V, 40).tolist()

    def sequences() -> list[SequenceSampler]:
        return [
            SequenceSampler(
                replace(params, seed=index),
                prompt=prompt,
                end_ids=[EOS_TOKEN_ID],
                start_grammar=BuiltGrammar(vocabulary, params.grammar).state if params.grammar else None,
            )
            for index, params in enumerate(KINDS)
        ]

    here, there = sequences(), sequences()
    for position in range(25):
        logits = (rng.standard_normal((len(KINDS), V)) * 3).astype(np.float32)
        rows = [SampleRow(each, position) for each in there]
        picked = pick(torch.from_numpy(logits), logit_edits(rows), HostTransfer()).wait()
        got = sample_picked(picked, rows)
        wanted = sample(logits.copy(), [SampleRow(each, position) for each in here])
        assert [each.error for each in got] == [None] * len(KINDS)
        assert [each.token for each in got] == [each.token for each in wanted]
        for mine, other in zip(got, wanted, strict=True):
            if mine.logprobs is not None and other.logprobs is not None:
                assert mine.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-3)
                assert [token for token, _ in mine.logprobs.top] == [token for token, _ in other.logprobs.top]


def test_the_setting_decides_where_candidates_are_picked() -> None:
    assert not TorchBackend(BackendOptions(device="cpu")).picks_candidates
    assert TorchBackend(BackendOptions(device="cpu", settings={"sampling": "device"})).picks_candidates
    with pytest.raises(ConfigInvalid):
        TorchBackend(BackendOptions(device="cpu", settings={"sampling": "moon"}))
