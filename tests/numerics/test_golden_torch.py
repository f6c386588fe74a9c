"""The torch backend against the reference's outputs for the demo model, on one to four stages."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests.support.numerics.golden_ids import Item, assert_forced, assert_greedy, items
from tests.support.numerics.harness import BF16Weights, Pipeline

torch = pytest.importorskip("torch")

from edgepipe_torch import TorchBackend  # noqa: E402

from edgepipe.backend.drafting import Drafter, Drafts, DraftSource  # noqa: E402
from edgepipe.backend.types import ActivationType, BackendOptions  # noqa: E402
from edgepipe.sampling.lookup import LookupDrafter  # noqa: E402
from edgepipe.stage.draft_child import DraftRunner  # noqa: E402
from edgepipe.testing.tiny_model import TinyWeights, tiny_config  # noqa: E402

ITEMS = items()
BY_LENGTH = sorted(ITEMS, key=lambda item: len(item.prompt_ids))
FREE_STEPS = 16  # three of seven items have a near tie before; the forced rows go on to 64
LONG_FREE_STEPS = 32


def build(weights: BF16Weights, num_stages: int, *, dtype: str = "float32", scattered: bool = False) -> Pipeline:
    """Stages on the CPU with bf16 links."""
    options = BackendOptions(device="cpu", dtype=dtype, activation_type=ActivationType.BF16, threads=1)
    return Pipeline.build([TorchBackend(options) for _ in range(num_stages)], weights, scattered=scattered)


_STAGES = [count if count == 3 else pytest.param(count, marks=pytest.mark.long) for count in (1, 2, 3, 4)]


@pytest.fixture(scope="module", params=_STAGES, ids="{}-stages".format)
def pipeline(request: pytest.FixtureRequest, demo_weights: BF16Weights) -> Iterator[Pipeline]:
    """float32 compute; on three stages the KV lies scattered."""
    made = build(demo_weights, request.param, scattered=request.param == 3)
    yield made
    made.close()


@pytest.mark.parametrize("steps", [FREE_STEPS, pytest.param(LONG_FREE_STEPS, marks=pytest.mark.long)])
def test_free_running_ids_are_the_references_up_to_the_first_near_tie(pipeline: Pipeline, steps: int) -> None:
    """All items decode in one micro-batch: the rows differ in length by up to 645 tokens."""
    found = pipeline.greedy([item.prompt_ids for item in ITEMS], steps)
    for ids, item in zip(found, ITEMS, strict=True):
        assert_greedy(ids, item)


@pytest.mark.parametrize(
    "chosen", [BY_LENGTH[:-1], pytest.param(BY_LENGTH[-1:], marks=pytest.mark.long)], ids=["short", "649 tokens"]
)
def test_top_one_on_the_references_tokens_is_the_references(pipeline: Pipeline, chosen: Sequence[Item]) -> None:
    for item in chosen:
        assert_forced(pipeline.forced(item.prompt_ids, item.greedy_ids), item)


class RandomDrafter:
    """The reference's next tokens, each with a probability of 0.7, else anything."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self._at = 0
        self._random = random.Random(1)

    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        self._at += len(tokens)
        ids = [each if self._random.random() < 0.7 else 7 for each in self._ids[self._at : self._at + count]]
        return Drafts(tuple(ids), (DraftSource.MODEL,) * len(ids))


@pytest.mark.parametrize("drafts", ["lookup", "random"])
def test_windows_of_drafts_give_the_references_ids(pipeline: Pipeline, drafts: str) -> None:
    turns = tokens = 0
    for item in BY_LENGTH[:4]:
        lookup = drafts == "lookup"
        drafter: Drafter = LookupDrafter(item.prompt_ids) if lookup else RandomDrafter(item.greedy_ids)
        ids, steps = pipeline.greedy_windows(item.prompt_ids, min(item.num_decided, 40), drafter)
        assert_greedy(ids, item)
        turns, tokens = turns + steps, tokens + len(ids)
    assert turns < tokens * (0.95 if drafts == "lookup" else 0.6)


class ModelsGuesses:
    """The guesses of a draft model, as its process gives them."""

    def __init__(self, runner: DraftRunner, prompt: Sequence[int]) -> None:
        self._runner = runner
        self._ids = [*prompt]

    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        self._ids += tokens
        _, ids = self._runner.guess(np.array(self._ids, np.int32), count)
        return Drafts(tuple(ids), (DraftSource.MODEL,) * len(ids))


@pytest.mark.parametrize("draft", ["itself", "random"])
def test_a_draft_model_gives_the_references_ids(pipeline: Pipeline, demo_weights: BF16Weights, draft: str) -> None:
    vocab_size = demo_weights.config.vocab_size
    tiny = TinyWeights(tiny_config(num_layers=2, vocab_size=vocab_size, context_length=2048))
    backend = TorchBackend(BackendOptions(device="cpu", dtype="float32", threads=1))
    runner = DraftRunner(backend, demo_weights if draft == "itself" else tiny, vocab_size=vocab_size)
    item = BY_LENGTH[0]
    drafter = ModelsGuesses(runner, item.prompt_ids)
    ids, turns = pipeline.greedy_windows(item.prompt_ids, min(item.num_decided, 20), drafter)
    assert_greedy(ids, item)
    assert (turns < len(ids) * 0.35) == (draft == "itself")
    backend.close()


@pytest.mark.parametrize(
    ("num_stages", "num_items"),
    [(2, 2), *(pytest.param(count, len(ITEMS), marks=pytest.mark.long) for count in (1, 4))],
)
def test_bf16_compute_keeps_the_references_decided_tokens(
    demo_weights: BF16Weights, num_stages: int, num_items: int
) -> None:
    pipeline = build(demo_weights, num_stages, dtype="bfloat16")
    for item in BY_LENGTH[:num_items]:
        assert_forced(pipeline.forced(item.prompt_ids, item.greedy_ids), item, bf16=True)
    pipeline.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("block_size", [16, 256], ids=["gathered", "paged"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_cuda_keeps_the_references_decided_tokens(demo_weights: BF16Weights, num_stages: int, block_size: int) -> None:
    options = BackendOptions(device="cuda", activation_type=ActivationType.BF16)
    backends = [TorchBackend(options) for _ in range(num_stages)]
    pipeline = Pipeline.build(
        backends, demo_weights, num_blocks=4096 // block_size, block_size=block_size, scattered=True
    )
    for item in ITEMS:
        assert_forced(pipeline.forced(item.prompt_ids, item.greedy_ids), item, bf16=True)
    pipeline.close()


@pytest.mark.long
@pytest.mark.parametrize("scattered", [False, True], ids=["runs", "scattered"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_every_dtype_split_and_layout(demo_weights: BF16Weights, num_stages: int, dtype: str, scattered: bool) -> None:
    """Prompts come in uneven chunks, tokens one by one."""
    pipeline = build(demo_weights, num_stages, dtype=dtype, scattered=scattered)
    for item in ITEMS:
        prompt = len(item.prompt_ids)
        chunks = [prompt // 3, prompt - prompt // 3, *[1] * 8]
        logits = pipeline.forced(item.prompt_ids, item.greedy_ids, chunks=chunks)
        assert_forced(logits, item, bf16=dtype == "bfloat16")
    pipeline.close()
