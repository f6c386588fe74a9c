"""Drives a backend by hand: steps out of a few words, submitted and collected at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import Activations, BlockCopy, BlockRun, Step, StepOutput, StepRow, TokenIds
from edgepipe.ids import SequenceId, StepId


def step_row(position: int, num_tokens: int, *runs: tuple[int, int], sequence: int = 1) -> StepRow:
    """Tokens ``[position, position + num_tokens)`` of a sequence whose table are ``runs`` of (start, count)."""
    table = tuple(BlockRun(start, count) for start, count in runs)
    return StepRow(sequence=SequenceId(sequence), position=position, num_tokens=num_tokens, runs=table)


def make_step(
    rows: Sequence[StepRow],
    *,
    logit_rows: Sequence[int] | None = None,
    copies: Sequence[tuple[int, int]] = (),
    slice_index: int = 0,
    step: int = 1,
) -> Step:
    """A step of these rows. ``logit_rows`` None: every token; ``copies`` are (source, target)."""
    wanted = range(sum(row.num_tokens for row in rows)) if logit_rows is None else logit_rows
    return Step(
        step=StepId(step),
        slice_index=slice_index,
        rows=tuple(rows),
        logit_rows=np.array(wanted, dtype=np.int32),
        copies=tuple(BlockCopy(source, target) for source, target in copies),
    )


def token_ids(*parts: Sequence[int]) -> TokenIds:
    """Token ids of a step's rows, packed."""
    return np.array([token for part in parts for token in part], dtype=np.int32)


def run_step(backend: Backend, step: Step, inputs: TokenIds | Activations) -> Activations:
    """Prepare, submit and collect: ``[T, H]`` activations or ``[R, V]`` logits."""
    return result_of(backend.collect(backend.submit(backend.prepare(step), inputs)))


def result_of(output: StepOutput) -> Activations:
    """The one array that an output holds."""
    result = output.activations if output.logits is None else output.logits
    assert result is not None, "an output holds activations or logits"
    return result
