"""What the device picks of its logits leads to the tokens that whole rows lead to; on the CPU, where it is off."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from edgepipe_torch import TorchBackend
from edgepipe_torch.cpu.transfer import HostTransfer
from edgepipe_torch.layers.candidates import NUM_CANDIDATES, pick

from edgepipe.backend.types import BackendOptions
from edgepipe.errors import ConfigInvalid
from edgepipe.sampling import SampleRow, SamplingParams, SequenceSampler, logit_edits, sample, sample_picked
from edgepipe.sampling.grammar import GrammarTokenizer
from tests.support.backends.sampled_kinds import CANDIDATES, KINDS, VOCABULARY, sequences, vocabulary


@pytest.fixture(scope="module")
def words() -> GrammarTokenizer:
    return vocabulary()


def test_candidates_and_whole_rows_choose_the_same(words: GrammarTokenizer) -> None:
    assert NUM_CANDIDATES == CANDIDATES
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, VOCABULARY, 40).tolist()
    here, there = sequences(words, prompt), sequences(words, prompt)
    for position in range(25):
        logits = (rng.standard_normal((len(KINDS), VOCABULARY)) * 3).astype(np.float32)
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_logits_that_are_no_numbers_ends_with_the_error_of_a_whole_row(temperature: float) -> None:
    logits = np.linspace(0, 1, 2 * VOCABULARY, dtype=np.float32).reshape(2, -1)
    logits[1, [7, 300]] = np.nan

    def rows() -> list[SampleRow]:
        return [SampleRow(SequenceSampler(SamplingParams(temperature=temperature, seed=1)), 0) for _ in range(2)]

    own = rows()
    got = sample_picked(pick(torch.from_numpy(logits), logit_edits(own), HostTransfer()).wait(), own)
    wanted = sample(logits.copy(), rows())
    assert got[0] == wanted[0]
    assert f"2 of {VOCABULARY} logits are NaN" in str(got[1].error)
    assert str(got[1].error) == str(wanted[1].error)


def test_the_setting_decides_where_candidates_are_picked() -> None:
    assert not TorchBackend(BackendOptions(device="cpu")).picks_candidates
    assert TorchBackend(BackendOptions(device="cpu", settings={"sampling": "device"})).picks_candidates
    with pytest.raises(ConfigInvalid):
        TorchBackend(BackendOptions(device="cpu", settings={"sampling": "moon"}))
