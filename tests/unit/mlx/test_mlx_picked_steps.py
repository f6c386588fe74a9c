"""Whole steps of the MLX backend that pick candidates on the device, beside those that return whole rows of logits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")
pytest.importorskip("torch", reason="torch is not installed")

import mlx.core as mx
from edgepipe_mlx import backend as mlx_backend
from edgepipe_mlx.lent_rows import Lender
from edgepipe_mlx.picks import picking

from edgepipe.backend.types import LogitEdits, SlowPath, Step, StepOutput
from edgepipe.ids import StepId
from edgepipe.sampling import Sampled, SampleRow, SequenceSampler, logit_edits, sample, sample_picked
from edgepipe.spec.facts import LayerRange, make_slices
from tests.support.backends.counted_graphs import counted_backend
from tests.support.backends.host_compiler import COMPILER
from tests.support.backends.metal_kernels import HostKernels
from tests.support.backends.mlx_models import (
    BLOCK_SIZE,
    Chain,
    MemorySource,
    cpu_options,
    random_weights,
    row,
    tiny_config,
)
from tests.support.backends.sampled_kinds import KINDS, VOCABULARY, sequences, vocabulary
from tests.support.backends.steps import make_step, step_row, token_ids
from tests.support.models.counted_layers import counted_model

NOTHING = SlowPath(what="whole rows", cost="time", reason="a compiler's error")
PROMPT = np.random.default_rng(3).integers(0, VOCABULARY, 40).tolist()


def chain(sampling: str) -> Chain:
    config = tiny_config(vocab_size=VOCABULARY)
    options = cpu_options(sampling=sampling, weights="wide")
    return Chain(MemorySource(config, random_weights(config)), options=options)


def decode(model: Chain, position: int, tokens: Sequence[int], edits: LogitEdits | None) -> StepOutput:
    """A token of each sequence, which has a block of its own."""
    step = Step(
        step=StepId(1),
        slice_index=0,
        rows=tuple(row(position, 1, (index, 1), sequence=index + 1) for index in range(len(tokens))),
        logit_rows=np.arange(len(tokens), dtype=np.int32),
    )
    backend = model.plain
    return backend.collect(backend.submit(backend.prepare(step), token_ids(tokens), edits))


def answers(model: Chain, samplers: Sequence[SequenceSampler], num_tokens: int) -> list[Sequence[Sampled]]:
    """Decode and sample as a stage does: edits on the backend's thread, sampling on another one."""
    found: list[Sequence[Sampled]] = []
    tokens = list(range(len(samplers)))
    with ThreadPoolExecutor(max_workers=1) as other:
        for position in range(num_tokens):
            rows = [SampleRow(each, position) for each in samplers]
            output = decode(model, position, tokens, logit_edits(rows) if model.plain.picks_candidates else None)
            if output.candidates is not None:
                found.append(other.submit(sample_picked, output.candidates, rows).result())
            else:
                assert output.logits is not None
                found.append(sample(output.logits, rows))
            assert (output.candidates is not None) == model.plain.picks_candidates
            tokens = [each.token for each in found[-1]]
    model.plain.close()
    return found


def assert_same(found: Sequence[Sequence[Sampled]], expected: Sequence[Sequence[Sampled]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert [each.error for each in ours] == [None] * len(KINDS)
        assert [each.token for each in ours] == [each.token for each in theirs]
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine.logprobs is None) == (other.logprobs is None)
            if mine.logprobs is not None and other.logprobs is not None:
                assert mine.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-3)
                assert [token for token, _ in mine.logprobs.top] == [token for token, _ in other.logprobs.top]


def test_picked_candidates_lead_to_the_tokens_of_whole_rows() -> None:
    words = vocabulary()
    expected = answers(chain("host"), sequences(words, PROMPT), 12)
    assert_same(answers(chain("device"), sequences(words, PROMPT), 12), expected)


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
def test_so_do_those_of_the_kernels_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = vocabulary()
    expected = answers(chain("host"), sequences(words, PROMPT), 3)
    host = HostKernels(tmp_path)
    monkeypatch.setattr(mx.fast, "metal_kernel", host.make)
    monkeypatch.setattr(mlx_backend, "is_cpu", lambda _device: False)
    model = chain("device")
    of_check = host.launches
    assert_same(answers(model, sequences(words, PROMPT), 3), expected)
    assert host.launches - of_check == 3 * 4  # two for candidates, two for the most likely tokens of unchanged logits


def test_without_the_kernels_whole_rows_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_backend, "is_cpu", lambda _device: False)
    monkeypatch.setattr(picking, "checked_picks", lambda _vocabulary: NOTHING)
    model = chain("device").plain
    assert not model.picks_candidates
    assert NOTHING in model.slow_paths(BLOCK_SIZE)


def test_a_stage_without_the_head_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(vocab_size=VOCABULARY)
    model = mlx_backend.MlxBackend(cpu_options(sampling="device", weights="wide"))
    first, _ = make_slices([LayerRange(0, 1), LayerRange(1, config.num_layers)], config.num_layers)
    model.load([first], MemorySource(config, random_weights(config)), lambda _progress: None)
    assert not model.picks_candidates


EDITS = LogitEdits(
    rows=np.zeros(0, np.int32),
    ids=np.zeros(0, np.int32),
    repetition=np.zeros(0, np.float32),
    add=np.zeros(0, np.float32),
    masks=None,
    temperatures=np.ones(16, np.float32),
    num_top=20,
)


@pytest.mark.parametrize("rows", [1, 16])
def test_candidates_take_two_kernels(rows: int) -> None:
    """However many rows there are. The other kernels of the step stay the same."""
    counts: list[int] = []
    for sampling in ("host", "device"):
        with counted_backend(cpu_options(dtype="bfloat16", sampling=sampling)) as model:
            model.load(make_slices([LayerRange(0, 1)], 1), counted_model("Llama", 1, file="Q4_K"), lambda _: None)
            model.allocate_kv(num_blocks=rows, block_size=BLOCK_SIZE)
            step = make_step([step_row(3, 1, (index, 1), sequence=index + 1) for index in range(rows)])
            model.submit(model.prepare(step), token_ids([1] * rows), EDITS)
            counts.append(model.kernels.total())
    assert counts[1] - counts[0] == 2


def test_lent_arrays_come_back_to_the_thread_that_lent_them() -> None:
    mx.set_default_device(mx.Device(mx.cpu))
    lender = Lender()
    array = mx.arange(1 << 20, dtype=mx.float32).reshape(4, -1)
    mx.eval(array)
    before = mx.get_active_memory()
    lent = [lender.lend(array)]
    del array

    def use() -> None:
        assert lent[0].copied(2)[5] == 2 * (1 << 18) + 5
        lent.clear()

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert mx.get_active_memory() == before
    lender.drop_returned()
    assert mx.get_active_memory() <= before - 4 * (1 << 20)
