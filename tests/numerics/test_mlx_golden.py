"""MLX on the demo model, alone and mixed with torch: the reference's tokens, cut wherever the model is cut.

MLX's CPU device is for correctness, not speed (7 tokens/s here), so the usual run takes two short prompts and 8 steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

from edgepipe.backend.loader import create_backend
from edgepipe.backend.types import BackendOptions
from edgepipe.spec.tensors import WeightSource
from tests.support.numerics.golden_ids import Item, assert_forced, assert_greedy, items
from tests.support.numerics.harness import Logits, Pipeline

MAX_PROMPT_TOKENS = 64
USUAL_STEPS = 8
USUAL_ITEMS = ("chat_capital", "raw_once")


def build(names: Sequence[str], weights: WeightSource, *, dtype: str = "float32") -> Pipeline:
    """A chain of these backends on the CPU, with bf16 links. Skips where torch is asked for and missing."""
    if "torch" in names:
        pytest.importorskip("torch", reason="torch is not installed")
    options = BackendOptions(device="cpu", dtype=dtype, threads=1)  # torch's waiting threads would spin beside MLX's
    return Pipeline.build([create_backend(name, options) for name in names], weights)


def decode_along(pipeline: Pipeline, chosen: Sequence[Item], num_steps: int) -> list[Logits]:
    """Per item [num_steps, V]: prompts one by one, then all decode in one micro-batch, fed with the reference's tokens.

    As long as the best token is the reference's this is what free-running decoding computes.
    """
    sequences = [pipeline.add(len(item.prompt_ids) + num_steps) for item in chosen]
    found = [
        [pipeline.step([(sequence, item.prompt_ids)])[0]] for sequence, item in zip(sequences, chosen, strict=True)
    ]
    for index in range(num_steps - 1):
        work = [(sequence, [item.greedy_ids[index]]) for sequence, item in zip(sequences, chosen, strict=True)]
        for rows, logits in zip(found, pipeline.step(work), strict=True):
            rows.append(logits)
    for sequence in sequences:
        pipeline.drop(sequence)
    return [np.stack(rows) for rows in found]


@pytest.mark.parametrize(
    "names",
    [*(pytest.param(["mlx"] * count, marks=pytest.mark.long) for count in (1, 2)), ["mlx", "torch"], ["torch", "mlx"]],
    ids="-".join,
)
def test_the_references_tokens_come_out(names: list[str], demo_weights: WeightSource) -> None:
    chosen = [item for item in items() if item.name in USUAL_ITEMS]
    pipeline = build(names, demo_weights)
    for item, logits in zip(chosen, decode_along(pipeline, chosen, USUAL_STEPS), strict=True):
        assert_greedy([int(row.argmax()) for row in logits], item)
        assert_forced(logits, item)
    pipeline.close()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_stages", "dtype"), [(1, "bfloat16"), (2, "float32"), (3, "bfloat16"), (4, "float32")])
def test_every_short_item_over_alternating_backends(num_stages: int, dtype: str, demo_weights: WeightSource) -> None:
    chosen = [item for item in items() if len(item.prompt_ids) <= MAX_PROMPT_TOKENS]
    pipeline = build([("mlx", "torch")[index % 2] for index in range(num_stages)], demo_weights, dtype=dtype)
    bf16 = dtype == "bfloat16"
    for item, logits in zip(chosen, decode_along(pipeline, chosen, len(chosen[0].gaps)), strict=True):
        assert_forced(logits, item, bf16=bf16)
        if not bf16:
            assert_greedy([int(row.argmax()) for row in logits], item)
    for item in chosen:
        assert_forced(pipeline.forced(item.prompt_ids, item.greedy_ids, chunks=(5, 20)), item, bf16=bf16)
    pipeline.close()
