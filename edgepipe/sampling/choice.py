"""Choose one token from the most likely ones, by the same rule for candidates from a device or a whole row.

Shape letter: K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgepipe.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most likely tokens of one row, after penalties, bias and masks."""

    ids: npt.NDArray[np.int64]  # [K], at least one
    logits: npt.NDArray[np.float32]  # [K] descending; equal logits by ascending id
    total: float  # sum of exp((logit - highest) / temperature) over the whole row; not used with top-k
    complete: bool  # all other tokens have zero probability


def choose(candidates: Candidates, params: SamplingParams, uniform: float) -> int | None:
    """Return the token whose share of the distribution contains the draw; None if more candidates are needed.

    uniform  [0, 1)

    The distribution is ordered from the most to the least likely token, so a draw seldom needs many candidates. Top-k
    applies first, then top-p of the rest, then min-p.
    """
    if params.greedy:
        return int(candidates.ids[0])
    count, complete, total = len(candidates.ids), candidates.complete, candidates.total
    if params.top_k:
        if count < params.top_k and not complete:
            return None
        count, complete = min(count, params.top_k), True
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((candidates.logits[:count].astype(np.float64) - candidates.logits[0]) / params.temperature)
    reached = np.cumsum(weights)
    if complete:
        total = float(reached[-1])
    if params.top_p < 1:
        last = int(reached.searchsorted(params.top_p * total))
        if last >= count and not complete:
            return None
        count, complete = min(last + 1, count), True
        total = float(reached[count - 1])
    if params.min_p > 0:
        likely = int((weights[:count] >= params.min_p).sum())
        if likely == count and not complete:
            return None
        count, total = likely, float(reached[likely - 1])
        complete = True
    place = int(reached[:count].searchsorted(uniform * total, side="right"))
    if place < count:
        return int(candidates.ids[place])
    return int(candidates.ids[count - 1]) if complete else None  # rounding, or beyond the candidates
