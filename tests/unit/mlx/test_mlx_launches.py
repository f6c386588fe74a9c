"""Kernels per layer and decode step on Metal, counted from MLX's graph (docs/architecture/backend-mlx.md)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("mlx.core")

from edgepipe.backend.types import RowState, StateWrite, StepRow
from edgepipe.spec.facts import LayerRange, make_slices
from tests.support.backends.counted_graphs import counted_backend
from tests.support.backends.mlx_models import BLOCK_SIZE, cpu_options
from tests.support.backends.steps import make_step, step_row, token_ids
from tests.support.models.counted_layers import LAYERS, counted_model

KERNELS = {
    ("Llama", "Q4_K"): (13, 17),
    ("Llama", "Q4_K_M"): (14, 19),
    ("Qwen3-30B-A3B", "Q4_K"): (21, 26),
    ("Qwen3-30B-A3B", "Q4_K_M"): (22, 28),
    ("Qwen3.6-35B-A3B", "Q4_K"): (29, 35),
    ("Qwen3.6-35B-A3B", "Q4_K_M"): (30, 37),
}
"""For one row, with own kernels of K types and with MLX's alone. The documentation has the same numbers."""


@pytest.mark.parametrize("own", [True, False], ids=["own", "MLX"])
@pytest.mark.parametrize(("layer", "file"), KERNELS, ids="-".join)
def test_kernels_of_a_layer(layer: str, file: str, own: bool) -> None:
    found = kernels_of_a_layer(layer, file=file, own=own)
    assert found.total() == KERNELS[layer, file][0 if own else 1], found


@pytest.mark.parametrize("layer", ["Llama", "Qwen3-30B-A3B"])
def test_kernels_do_not_grow_with_sequences(layer: str) -> None:
    """One sequence attends by a kernel of MLX's, more of them by two of our own."""
    counts = [kernels_of_a_layer(layer, rows=rows).total() for rows in (1, 2, 5, 16)]
    assert counts == [counts[0]] + 3 * [counts[0] + 1]


def test_without_own_kernels_each_further_sequence_attends_by_itself() -> None:
    """Its attention is a kernel, and a result to join; with two the first one's result is joined, too."""
    one, two, three = (kernels_of_a_layer("Llama", rows=rows, own=False).total() for rows in (1, 2, 3))
    assert (two - one, three - two) == (3, 2)


def kernels_of_a_step(layer: str, num_layers: int, *, file: str, rows: int, own: bool) -> Counter[str]:
    states = rows if LAYERS[layer].recurrent is not None else 0
    with counted_backend(cpu_options(dtype="bfloat16"), own=own) as backend:
        whole = make_slices([LayerRange(0, num_layers)], num_layers)
        backend.load(whole, counted_model(layer, num_layers, file=file), lambda _progress: None)
        backend.allocate_kv(num_blocks=rows, block_size=BLOCK_SIZE, state_slots=states)
        step = make_step([_row(index, bool(states)) for index in range(rows)])
        backend.submit(backend.prepare(step), token_ids([1] * rows))
        return backend.kernels


def _row(index: int, has_state: bool) -> StepRow:
    row = step_row(3, 1, (index, 1), sequence=index + 1)
    return replace(row, state=RowState(index, (StateWrite(1, index),))) if has_state else row


def kernels_of_a_layer(layer: str, *, file: str = "Q4_K", rows: int = 1, own: bool = True) -> Counter[str]:
    few, more = (kernels_of_a_step(layer, count, file=file, rows=rows, own=own) for count in (1, 2))
    assert not few - more
    return more - few
