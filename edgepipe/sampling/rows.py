"""Sample row by row, the faster layout (docs/experiments.md). V vocabulary.

All heavy operations are numpy's, which drop the GIL. Only candidates within reach of the draw are sorted.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edgepipe.errors import StepFailed
from edgepipe.sampling.choice import Candidates, choose
from edgepipe.sampling.grammar import Bitmask
from edgepipe.sampling.logprobs import TokenLogprobs
from edgepipe.sampling.params import SamplingParams

Logits = npt.NDArray[np.float32]

_DEPTHS = (8.0, 16.0, 32.0, math.inf)
"""Search depths below the highest logit, in units of temperature. 8 covers all but a few thousandths of a language
model's probability; each further search costs the same again."""

_DAMAGED = "the weights are probably damaged or all NaN: remove the model and pull it again"


def ban(row: Logits, mask: Bitmask | None, tokens: npt.NDArray[np.int64]) -> None:
    """Ban, in place, tokens outside a mask and additional tokens."""
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(row)).view(np.bool_)
        np.putmask(row, ~allowed, -np.inf)
    if len(tokens):
        row[tokens] = -np.inf


def choose_from_row(row: Logits, params: SamplingParams, uniform: float, scratch: Logits) -> int:
    """Choose a token of a changed row ``[V]``; overwrites ``scratch`` [V]. Raises StepFailed."""
    best = int(row.argmax())  # argmax also finds NaN, which numpy ranks above every number
    highest = check_highest(row, best)
    if params.greedy:
        return best
    total = 0.0 if params.top_k else exp_total(row, highest, params.temperature, scratch)
    for depth in _DEPTHS:
        candidates = _candidates(row, highest, params, depth=depth, total=total)
        token = choose(candidates, params, uniform) if candidates is not None else None
        if token is not None:
            return token
    raise AssertionError("a complete row has a place for every draw")


def check_highest(row: Logits, best: int) -> float:
    """Return the highest logit. Raises StepFailed if it is not finite."""
    highest = float(row[best])
    if math.isfinite(highest):
        return highest
    if highest == -math.inf:
        raise StepFailed("no token is allowed", fact="every logit is -inf")
    if highest == math.inf:
        raise StepFailed("the model gave infinite logits", next_step=_DAMAGED)
    raise StepFailed(
        "the model gave logits that are not numbers",
        fact=f"{int(np.isnan(row).sum())} of {len(row)} logits are NaN",
        next_step=_DAMAGED,
    )


def exp_total(row: Logits, highest: float, temperature: float, scratch: Logits) -> float:
    """Return the sum of ``exp((logit - highest) / temperature)``; overwrites ``scratch`` [V]."""
    with np.errstate(over="ignore", under="ignore"):
        np.subtract(row, np.float32(highest), out=scratch)
        if temperature != 1:
            scratch /= np.float32(temperature)
        np.exp(scratch, out=scratch)
    return float(scratch.sum())


def raw_logprobs(row: Logits, num_top: int, scratch: Logits) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return an unchanged row's log of the total, and its most likely tokens with their logprobs."""
    highest = check_highest(row, int(row.argmax()))
    log_total = highest + math.log(exp_total(row, highest, 1.0, scratch))
    if not num_top:
        return log_total, ()
    ids = _best(row, highest, 1.0, num_top)[:num_top]
    return log_total, tuple((int(token), min(0.0, float(row[token]) - log_total)) for token in ids)


def token_logprobs(logit: float, log_total: float, top: tuple[tuple[int, float], ...]) -> TokenLogprobs:
    """Return the log-probabilities of a token with that logit, capped at 0 against rounding."""
    return TokenLogprobs(min(0.0, logit - log_total), top)


def _candidates(
    row: Logits, highest: float, params: SamplingParams, *, depth: float, total: float
) -> Candidates | None:
    ids = _within(row, highest, params.temperature * depth)
    if len(ids) < params.top_k and depth < math.inf:
        return None
    logits = row[ids]
    if params.top_k and len(ids) > 2 * params.top_k:
        least = np.partition(logits, -params.top_k)[-params.top_k]
        ids = ids[logits >= least]
        logits = row[ids]
    order = np.argsort(-logits, kind="stable")
    return Candidates(ids[order], logits[order], total, depth == math.inf)


def _best(row: Logits, highest: float, unit: float, count: int) -> npt.NDArray[np.int64]:
    """Return at least the ``count`` most likely tokens, most likely first."""
    ids = np.zeros(0, np.int64)
    for depth in _DEPTHS:
        ids = _within(row, highest, unit * depth)
        if len(ids) >= count:
            break
    return ids[np.argsort(-row[ids], kind="stable")]


def _within(row: Logits, highest: float, distance: float) -> npt.NDArray[np.int64]:
    """Return ids, ascending, of logits at most ``distance`` below the highest, without banned ones."""
    least = highest - distance
    return np.flatnonzero(row > -np.inf if least == -math.inf else row >= np.float32(least))
