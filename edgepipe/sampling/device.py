"""Sample where the device keeps the logits: send edits, receive candidates. R rows, E edits, K candidates.

Penalties and bias are sent as a few thousand sparse entries, masks as one bit per token. The device returns the log of
each row's total and its most likely tokens. A whole row is fetched only for a draw beyond them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import LogitEdits, PickedCandidates
from edgepipe.errors import EdgepipeError
from edgepipe.sampling.choice import Candidates, choose
from edgepipe.sampling.logprobs import TokenLogprobs
from edgepipe.sampling.rows import check_highest, choose_from_row, token_logprobs
from edgepipe.sampling.sampler import Sampled, SampleRow
from edgepipe.sampling.sequence import SequenceSampler


def logit_edits(rows: Sequence[SampleRow]) -> LogitEdits:
    """Collect the edits for the device. A failed row gets no edits; sampling reports its error."""
    parts = [_row_edits(row) for row in rows]
    masks = [mask for _, _, _, mask in parts]
    return LogitEdits(
        rows=np.repeat(np.arange(len(rows), dtype=np.int32), [len(ids) for ids, _, _, _ in parts]),
        ids=np.concatenate([ids for ids, _, _, _ in parts]).astype(np.int32),
        repetition=np.concatenate([repetition for _, repetition, _, _ in parts]),
        add=np.concatenate([add for _, _, add, _ in parts]),
        masks=_stack(masks),
        temperatures=np.array([max(row.sampler.params.temperature, 1e-5) for row in rows], np.float32),
        num_top=max(row.sampler.params.top_logprobs for row in rows),
    )


def sample_picked(picked: PickedCandidates, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Sample like ``sample``, from the device's candidates after ``logit_edits`` of the same rows."""
    return [_sample_row(picked, index, row) for index, row in enumerate(rows)]


_Edits = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int32] | None]


def _row_edits(row: SampleRow) -> _Edits:
    """Return tokens, repetition factors, additions and mask of one row."""
    sampler = row.sampler
    try:
        with sampler.lock:
            sampler.begin(row.position)
            mask, banned = sampler.allowed(row.position)
            edits = sampler.edits
            ids, repetition, add = edits.ids.copy(), edits.repetition.copy(), edits.add.copy()
    except EdgepipeError:
        return np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32), None
    if len(banned):
        add[np.isin(ids, banned)] = -np.inf
        new = banned[~np.isin(banned, ids)]
        ids = np.concatenate([ids, new])
        repetition = np.concatenate([repetition, np.ones(len(new), np.float32)])
        add = np.concatenate([add, np.full(len(new), -np.inf, np.float32)])
    return ids, repetition, add, mask


def _stack(masks: Sequence[npt.NDArray[np.int32] | None]) -> npt.NDArray[np.int32] | None:
    """Stack masks to ``[R, W]``; rows without a mask allow every token."""
    words = next((len(mask) for mask in masks if mask is not None), 0)
    if not words:
        return None
    everything = np.full(words, -1, np.int32)
    return np.stack([everything if mask is None else mask for mask in masks])


def _sample_row(picked: PickedCandidates, index: int, row: SampleRow) -> Sampled:
    sampler, params = row.sampler, row.sampler.params
    try:
        with sampler.lock:
            sampler.begin(row.position)
            sampler.allowed(row.position)
            token, raw = _choose(picked, index, sampler, sampler.uniform(row.position))
            sampler.took(token)
    except EdgepipeError as exc:
        return Sampled(0, error=exc)
    return Sampled(token, _logprobs(picked, index, raw, params.top_logprobs) if params.logprobs else None)


def _choose(picked: PickedCandidates, index: int, sampler: SequenceSampler, uniform: float) -> tuple[int, float]:
    """Return the token and its unchanged logit. Raises StepFailed."""
    ids, logits = picked.ids[index].astype(np.int64), picked.logits[index]
    order = np.lexsort((ids, -logits))
    check_highest(logits, int(order[0]))
    order = order[logits[order] > -np.inf]
    complete = len(order) < len(ids)
    candidates = Candidates(ids[order], logits[order], float(picked.totals[index]), complete)
    token = choose(candidates, sampler.params, uniform)
    if token is not None:
        return token, float(picked.raw_logits[index][order][candidates.ids == token][0])
    whole = picked.fetch(index)
    token = choose_from_row(whole, sampler.params, uniform, np.empty_like(whole))
    return token, sampler.edits.original(token, float(whole[token]))


def _logprobs(picked: PickedCandidates, index: int, raw: float, num_top: int) -> TokenLogprobs:
    total = float(picked.raw_log_totals[index])
    top = zip(picked.top_ids[index, :num_top], picked.top_logits[index, :num_top], strict=True)
    return token_logprobs(raw, total, tuple((int(token), min(0.0, float(logit) - total)) for token, logit in top))
