"""Logits to token ids. Shape letters: R rows, V vocabulary.

Pure functions on numpy arrays. The heavy parts release the GIL, so the sampler runs on threads beside the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgepipe.errors import StepFailed
from edgepipe.sampling.draws import draw
from edgepipe.sampling.params import SamplingParams

Logits = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int32]

_CHUNK = 512  # probabilities summed as one when looking for a draw's place


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """Whose token a row of logits decides."""

    params: SamplingParams
    choice: int  # 0-based among the request's choices
    position: int  # 0-based among the output tokens


def sample(logits: Logits, rows: Sequence[SampleRow]) -> TokenIds:
    """One token per row; a row's token depends on that row alone, not on its neighbours.

    logits   [R, V] float32; -inf bars a token
    returns  [R] int32

    Greedy rows take the highest logit, the smallest id among equals. Others take the token in whose share of the
    distribution, laid out by ascending id, the row's draw falls. Raises StepFailed if a row has a NaN or an infinite
    maximum; the last stage reports it and the step's requests fail.
    """
    if logits.ndim != 2 or len(logits) != len(rows):
        raise ValueError(f"{len(rows)} rows for logits of shape {list(logits.shape)}")
    best = logits.argmax(axis=1)  # finds NaN, too: numpy ranks it above every number
    highest = logits[np.arange(len(rows)), best]
    _check(logits, highest)
    tokens = best.astype(np.int32)
    for index, row in enumerate(rows):
        if not row.params.greedy:
            uniform = draw(row.params.seed, row.choice, row.position)
            tokens[index] = pick(logits[index], row.params.temperature, uniform)
    return tokens


def pick(logits: Logits, temperature: float, uniform: float) -> int:
    """Inverse of the cumulative distribution at ``uniform`` in [0, 1); ``logits`` [V] with a finite maximum.

    Chunk sums first, then inside one chunk: a running sum over all of V would cost three times as much.
    """
    weights = _weights(logits, temperature)
    upper = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _CHUNK)), dtype=np.float64)
    target = min(uniform * upper[-1], np.nextafter(upper[-1], 0.0))  # the product may be rounded up to the whole
    chunk = _first_above(upper, target)
    start = chunk * _CHUNK
    inside = np.cumsum(weights[start : start + _CHUNK], dtype=np.float64)
    before = upper[chunk - 1] if chunk else 0.0
    place = _first_above(inside, target - before)
    if place == len(inside):  # the chunk's sum was rounded up beyond its parts: the last token with a share has it
        place = int(np.flatnonzero(weights[start : start + _CHUNK])[-1])
    return start + place


def _first_above(cumulative: npt.NDArray[np.float64], target: float) -> int:
    """Index of the first value above ``target``; the length if there is none."""
    return int(cumulative.searchsorted(np.float64(target), side="right"))


def _weights(logits: Logits, temperature: float) -> npt.NDArray[np.float32]:
    """``[V]`` shares before normalisation, the largest 1; barred and hopeless tokens have exactly 0."""
    with np.errstate(over="ignore", under="ignore"):
        weights = logits - logits.max()
        weights /= np.float32(temperature)
        np.exp(weights, out=weights)
    return weights


def _check(logits: Logits, highest: npt.NDArray[np.float32]) -> None:
    bad = np.flatnonzero(~np.isfinite(highest))
    if not len(bad):
        return
    row, value = int(bad[0]), float(highest[bad[0]])
    if value == -np.inf:
        raise StepFailed("no token is allowed", fact=f"row {row}: every logit is -inf")
    if value == np.inf:
        raise StepFailed("the model gave infinite logits", fact=f"row {row}", next_step=_DAMAGED)
    num_nan = int(np.isnan(logits[row]).sum())
    raise StepFailed(
        "the model gave logits that are not numbers",
        fact=f"row {row}: {num_nan} of {logits.shape[1]} logits are NaN",
        next_step=_DAMAGED,
    )


_DAMAGED = "the weights are probably damaged or all NaN: remove the model and pull it again"
