"""Compare picked candidates with a sort of whole rows, before the kernels are used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import KernelError, LogitEdits, SlowPath
from edgepipe_mlx.kernel_check import KernelCheck, measured_error
from edgepipe_mlx.lent_rows import Lender
from edgepipe_mlx.picks.candidates import NUM_CANDIDATES, pick
from edgepipe_mlx.picks.kernels import MetalPicks, PickKernels, serves

_VOCABULARY = 152_064  # vocabulary of a check without a model
_FLOAT32_SUMS = 2.0**-17  # relative; exponentials have a part in it
_TEMPERATURES = (0.7, 1.3, 1e-5)
_NO_NUMBERS = np.array([0x7FC00000, 0xFFC00000, 0x7FC00001], np.uint32)
_ROWS = len(_TEMPERATURES)

Float32s = npt.NDArray[np.float32]

_CHECK = KernelCheck(
    kernels="that pick candidates",
    slow=SlowPath(
        what="whole rows of logits are sampled on the host",
        cost="16 chats at temperature 0.8, 152,000 tokens: about 4 ms of a core a step (on Linux; no Mac has timed it)",
        reason="",
    ),
)


def checked_picks(vocabulary: int) -> PickKernels | SlowPath:
    """Return kernels that passed their check on the default device, or what the backend lacks without them."""
    if not serves(vocabulary, NUM_CANDIDATES):
        return _CHECK.failed(f"the vocabulary has {vocabulary} tokens")

    def errors(kernels: PickKernels) -> Iterator[tuple[str, float]]:
        for error in pick_error_of_each(kernels, vocabulary):
            yield "the error", error

    return _CHECK.passed(MetalPicks, errors)


def pick_errors() -> Iterator[KernelError]:
    """Return the error with a vocabulary that many models have. MLX compiles the kernels for it."""
    yield measured_error("candidates for sampling", lambda: pick_error_of_each(MetalPicks(), _VOCABULARY))


def pick_error_of_each(kernels: PickKernels, vocabulary: int) -> Iterator[float]:
    """Return errors with each form of the kernels, see ``pick_error``."""
    random = np.random.default_rng(0)
    logits = random.standard_normal((_ROWS, vocabulary), np.float32) * 4
    # Equal logits in all parts of a row, as 0 and as -0; NaN and infinity.
    logits[1] = -np.abs(np.round(logits[1]))
    logits[1, ::3] += 0.0
    odd = random.choice(vocabulary, 9, replace=False)
    logits[2, odd] = [*_NO_NUMBERS.view(np.float32), *[np.inf] * 2, *[-np.inf] * 4]
    for edits in _edits(vocabulary, random):
        yield pick_error(kernels, logits, edits)


def pick_error(kernels: PickKernels, logits: Float32s, edits: LogitEdits) -> float:
    """Return the largest error of totals in units of its bound; infinity where a candidate is another.

    Totals of a row whose highest logit is not finite may be anything.
    """
    picked = pick(kernels, mx.array(logits), edits)
    mx.eval(picked.arrays)
    found, errors = picked.copied(Lender()), [0.0]
    for row, values in enumerate(logits):
        changed, count = _changed(values, edits, row), found.ids.shape[1]
        order, plain = _order(changed)[:count], _order(values)
        top, highest = plain[: edits.num_top], values[plain[0]]
        same = (
            np.array_equal(found.ids[row], order)
            and np.array_equal(found.logits[row], changed[order], equal_nan=True)
            and np.array_equal(found.raw_logits[row], values[order], equal_nan=True)
            and np.array_equal(found.top_ids[row], top)
            and np.array_equal(found.top_logits[row], values[top], equal_nan=True)
            and np.array_equal(found.fetch(row), changed, equal_nan=True)
        )
        if not same:
            return float("inf")
        if np.isfinite(changed[order[0]]):
            total = _total(changed, edits.temperatures[row])
            errors.append(abs(float(found.totals[row]) - total) / (_FLOAT32_SUMS * total))
        if np.isfinite(highest):
            log_total = float(highest) + np.log(_total(values, 1.0))
            bound = _FLOAT32_SUMS * max(1.0, abs(log_total))
            errors.append(abs(float(found.raw_log_totals[row]) - log_total) / bound)
    return float("inf") if np.isnan(errors).any() else max(errors)


def _edits(vocabulary: int, random: np.random.Generator) -> Iterator[LogitEdits]:
    """Return no edits, sparse ones, and masks beside these: of half the tokens, of few, and of all."""
    count = min(100, vocabulary)
    ids = np.concatenate([random.choice(vocabulary, count, replace=False) for _ in range(_ROWS)]).astype(np.int32)
    none = LogitEdits(
        rows=np.zeros(0, np.int32),
        ids=np.zeros(0, np.int32),
        repetition=np.zeros(0, np.float32),
        add=np.zeros(0, np.float32),
        masks=None,
        temperatures=np.array(_TEMPERATURES, np.float32),
        num_top=5,
    )
    sparse = replace(
        none,
        rows=np.repeat(np.arange(_ROWS, dtype=np.int32), count),
        ids=ids,
        repetition=random.choice(np.array([1.0, 1.3], np.float32), len(ids)),
        add=random.choice(np.array([0.0, 6.0, -np.inf], np.float32), len(ids)),
    )
    masks = random.integers(-(2**31), 2**31, (_ROWS, -(-vocabulary // 32)), np.int32)
    masks[1], masks[2] = 0, -1
    masks[1, :4] = 3
    yield from (none, sparse, replace(sparse, masks=masks, num_top=0))


def _changed(values: Float32s, edits: LogitEdits, row: int) -> Float32s:
    """Return a row of logits with its edits."""
    changed, own = values.copy(), edits.rows == row
    ids, repetition = edits.ids[own], edits.repetition[own]
    old = values[ids]
    with np.errstate(invalid="ignore"):  # infinite logits that are banned are no numbers
        changed[ids] = np.where(old > 0, old / repetition, old * repetition) + edits.add[own]
    if edits.masks is not None:
        bits = np.unpackbits(edits.masks[row].view(np.uint8), bitorder="little", count=len(values))
        changed[bits == 0] = -np.inf
    return changed


def _order(values: Float32s) -> npt.NDArray[np.int64]:
    """Return ids by descending values, NaN first, equal ones by ascending id."""
    return np.lexsort((-values, ~np.isnan(values)))


def _total(values: Float32s, temperature: float) -> float:
    with np.errstate(under="ignore"):
        return float(np.exp((values.astype(np.float64) - values.max()) / np.float32(temperature)).sum())
