"""The passes of a draft: the known tokens first, then one guess after another. PURE.

The layer that predicts one token more takes the model's output at a position, and the token behind it. The first pass
does so for known tokens; each later pass takes the layer's own output and the guess of the pass before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import DraftStep, Step, StepRow
from edgepipe.ids import StepId


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPass:
    """One pass of the layer. B rows."""

    step: Step  # ``logit_rows`` are the last token of each row
    kept: npt.NDArray[np.int64]  # [B] rows of the pass before that go on; in the first pass all


def draft_passes(draft: DraftStep) -> Sequence[DraftPass]:
    """Return the passes in order: as many as the deepest row guesses tokens."""
    going = [*range(len(draft.rows))]
    first = [(row.position, len(row.next_ids)) for row in draft.rows]
    passes = [_pass(draft, going, first, going)]
    for depth in range(1, max((row.depth for row in draft.rows), default=0)):
        before, going = going, [index for index in going if draft.rows[index].depth > depth]
        spans = [(draft.rows[index].end - 1 + depth, 1) for index in going]
        passes.append(_pass(draft, going, spans, [before.index(index) for index in going]))
    return passes


def guesses_of(draft: DraftStep, found: Sequence[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int32]]:
    """Return each row's guesses from those of each pass [B]."""
    guesses: list[list[int]] = [[] for _ in draft.rows]
    for depth, ids in enumerate(found):
        going = (own for own, row in zip(guesses, draft.rows, strict=True) if row.depth > depth)
        for own, token in zip(going, ids.tolist(), strict=True):
            own.append(token)
    return [np.array(own, np.int32) for own in guesses]


def _pass(draft: DraftStep, going: Sequence[int], spans: Sequence[tuple[int, int]], kept: Sequence[int]) -> DraftPass:
    """``spans``: position and number of tokens of each row that is ``going``."""
    rows = tuple(
        StepRow(sequence=draft.rows[index].sequence, position=position, num_tokens=count, runs=draft.rows[index].runs)
        for index, (position, count) in zip(going, spans, strict=True)
    )
    ends = np.cumsum([count for _, count in spans])
    step = Step(step=StepId(0), slice_index=draft.slice_index, rows=rows, logit_rows=(ends - 1).astype(np.int32))
    return DraftPass(step=step, kept=np.array(kept, np.int64))
