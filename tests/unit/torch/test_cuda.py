"""On an NVIDIA GPU: what pages, graphs and two steps in flight compute is what the CPU computes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402
from edgepipe_torch.layers.device import PAGE_TOKENS  # noqa: E402

from edgepipe.backend.types import BackendOptions, LogitEdits, StepRow  # noqa: E402
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights, tiny_config  # noqa: E402
from tests.support.backends.steps import make_step, result_of, run_step, step_row, token_ids  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CONFIGS = {
    "llama": tiny_config(head_dim=16),
    "with a window": tiny_config(head_dim=16, windows=(20,)),
    "with biases, tied": tiny_config(head_dim=16, architecture="qwen2", qkv_bias=True, tied_embeddings=True),
    "with norms": tiny_config(head_dim=16, architecture="qwen3", qk_norm=True, num_kv_heads=4),
}


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


def stages(config: ModelConfig, device: str, *, block_size: int, cuts: Sequence[int] = ()) -> list[TorchBackend]:
    """The model on one backend per part."""
    bounds = [0, *cuts, config.num_layers]
    made: list[TorchBackend] = []
    ranges = [LayerRange(a, b) for a, b in itertools.pairwise(bounds)]
    for part in make_slices(ranges, config.num_layers):
        backend = TorchBackend(BackendOptions(device=device))
        backend.load([part], TinyWeights(config), lambda _progress: None)
        backend.allocate_kv(num_blocks=4096 // block_size * 9, block_size=block_size)
        made.append(backend)
    return made


def through(pipeline: Sequence[TorchBackend], rows: Sequence[StepRow], ids: Any) -> np.ndarray:
    """Logits of every token of a step."""
    data = ids
    for index, backend in enumerate(pipeline):
        data = run_step(backend, make_step(rows, slice_index=index), data)
    return data


def rows_of(count: int, position: int, num_tokens: int, block_size: int) -> list[StepRow]:
    """``count`` sequences of up to 512 tokens, the later half of each before the first."""
    half = 256 // block_size
    return [
        step_row(position, num_tokens, (half * (2 * index + 1), half), (half * 2 * index, half), sequence=index + 1)
        for index in range(count)
    ]


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert float(np.abs(found - expected).max()) < 0.1 * float(np.abs(expected).max())


@pytest.mark.parametrize("block_size", [16, PAGE_TOKENS])
@pytest.mark.parametrize("cuts", [[], [1, 3]], ids=["whole", "three parts"])
def test_batches_of_every_size_decode_as_on_the_cpu(config: ModelConfig, cuts: list[int], block_size: int) -> None:
    """Prompts, then steps of 1 to 70 rows that come back to sizes that were there before, over a page's end."""
    draw = np.random.default_rng(3)
    cpu = stages(config, "cpu", block_size=16)
    gpu = stages(config, "cuda", block_size=block_size, cuts=cuts)
    prompts = draw.integers(0, config.vocab_size, (70, 250)).astype(np.int32)
    for first in range(0, 70, 14):
        some = slice(first, first + 14)
        ids = prompts[some].reshape(-1)
        through(gpu, rows_of(70, 0, 250, block_size)[some], ids)
        through(cpu, rows_of(70, 0, 250, 16)[some], ids)
    lengths = [250] * 70
    for count in (1, 3, 16, 70, 2, 3, 15, 16, 1, 64, 33, 1, 60, 4, 4, 4):
        ids = draw.integers(0, config.vocab_size, count).astype(np.int32)
        rows = [rows_of(70, lengths[index], 1, block_size)[index] for index in range(count)]
        theirs = [rows_of(70, lengths[index], 1, 16)[index] for index in range(count)]
        assert_close(through(gpu, rows, ids), through(cpu, theirs, ids))
        for index in range(count):
            lengths[index] += 1
    for backend in (*gpu, *cpu):
        backend.close()


@pytest.mark.parametrize("tokens", range(60, 77))
def test_a_prompt_of_any_length_after_any_other(tokens: int) -> None:
    """Every way in which a prompt's chunks can lie against the alignment that kernels want."""
    config = CONFIGS["llama"]
    (cpu,), (gpu,) = (stages(config, device, block_size=16) for device in ("cpu", "cuda"))
    ids = np.random.default_rng(tokens).integers(0, config.vocab_size, 2 * tokens + 8).astype(np.int32)
    at = 0
    for count in (tokens, 3, tokens + 5):
        row = step_row(at, count, (0, 12))
        part = ids[at : at + count]
        assert_close(run_step(gpu, make_step([row]), part), run_step(cpu, make_step([row]), part))
        at += count


@pytest.mark.parametrize("block_size", [16, PAGE_TOKENS])
def test_as_many_steps_submitted_at_once_as_are_allowed(config: ModelConfig, block_size: int) -> None:
    (cpu,), (gpu,) = (stages(config, device, block_size=block_size) for device in ("cpu", "cuda"))
    assert gpu.max_submitted == 2
    assert_close(decoded_in_flight(gpu), decoded_in_flight(cpu))


def decoded_in_flight(backend: TorchBackend) -> np.ndarray:
    """Logits of two sequences, a prompt and then single tokens."""
    steps = [(0, 70), *((position, 1) for position in range(70, 90))]
    found: list[np.ndarray] = []
    waiting: list[Any] = []
    for position, count in steps:
        rows = [step_row(position, count, (0, 3), (5, 3)), step_row(position, count, (8, 8), sequence=2)]
        ids = token_ids(range(count), range(position + 1, position + count + 1))
        waiting.append(backend.submit(backend.prepare(make_step(rows)), ids))
        if len(waiting) == backend.max_submitted:
            found.append(np.asarray(backend.collect(waiting.pop(0)).logits))
    found += [np.asarray(backend.collect(ticket).logits) for ticket in waiting]
    return np.concatenate(found)


def test_candidates_of_replayed_steps_are_those_of_their_logits() -> None:
    config = CONFIGS["llama"]
    (gpu,) = stages(config, "cuda", block_size=PAGE_TOKENS)
    run_step(gpu, make_step(rows_of(4, 0, 30, PAGE_TOKENS)), token_ids(range(120)))
    edits = LogitEdits(
        rows=np.array([1], np.int32),
        ids=np.array([7], np.int32),
        repetition=np.ones(1, np.float32),
        add=np.full(1, 100.0, np.float32),
        masks=None,
        temperatures=np.ones(4, np.float32),
        num_top=2,
    )
    for position in range(30, 36):
        step, ids = make_step(rows_of(4, position, 1, PAGE_TOKENS)), token_ids([position] * 4)
        plain = result_of(gpu.collect(gpu.submit(gpu.prepare(step), ids)))
        picked = gpu.collect(gpu.submit(gpu.prepare(step), ids, edits)).candidates
        assert picked is not None
        assert picked.ids[1, 0] == 7
        np.testing.assert_array_equal(picked.top_logits[:, 0], plain.max(1))
        np.testing.assert_array_equal(picked.fetch(0), plain[0])
