"""Sample where the device keeps the logits: send edits, receive candidates. R rows, E edits, K candidates.

Penalties and bias are sent as a few thousand sparse entries, masks as one bit per token. The device returns the log of
each row's total and its most likely tokens. A whole row is fetched only for a draw beyond them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import LogitEdits, PickedCandidates
from edgepipe.errors import EdgepipeError
from edgepipe.sampling.choice import Candidates, choose
from edgepipe.sampling.logprobs import TokenLogprobs
from edgepipe.sampling.rows import check_highest, choose_from_row, token_logprobs
from edgepipe.sampling.sampler import Sampled, SampleRow, along_windows, window_starts
from edgepipe.sampling.sequence import SequenceSampler


def logit_edits(rows: Sequence[SampleRow]) -> LogitEdits:
    """Collect the edits for the device. A failed row gets no edits; sampling reports its error.

    Those of a window's later rows assume the drafts before them.
    """
    bounds = [*window_starts(rows), len(rows)]
    parts = [edits for start, end in pairwise(bounds) for edits in _window_edits(rows[start:end])]
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
    return along_windows(rows, lambda index, row: _sample_row(picked, index, row))


_Edits = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int32] | None]


_NONE: _Edits = (np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32), None)


def _window_edits(rows: Sequence[SampleRow]) -> list[_Edits]:
    """Return the edits of one sequence's rows; none from the first on whose draft its grammar forbids."""
    sampler, found = rows[0].sampler, list[_Edits]()
    try:
        with sampler.lock:
            sampler.begin(rows[0].position)
            found.append(_edits(sampler, rows[0].position))
            ahead = sampler.fork() if len(rows) > 1 else sampler
            for before, row in pairwise(rows):
                assert before.draft is not None, "the rows of a window are joined by drafts"
                mask = found[-1][3]
                if mask is not None and not mask[before.draft >> 5] >> (before.draft & 31) & 1:
                    break  # the grammar itself must not see it: it would count as broken
                ahead.took(before.draft)
                found.append(_edits(ahead, row.position))
    except EdgepipeError:
        pass
    return found + [_NONE] * (len(rows) - len(found))


def _edits(sampler: SequenceSampler, position: int) -> _Edits:
    """Return tokens, repetition factors, additions and mask of one row."""
    mask, banned = sampler.allowed(position)
    edits = sampler.edits
    ids, repetition, add = edits.ids.copy(), edits.repetition.copy(), edits.add.copy()
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
    if not np.isnan(logits).any():  # the whole row tells how many there are
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
