"""Sample a step's tokens from its logits. Shape letters: R rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgepipe.errors import EdgepipeError
from edgepipe.sampling.logprobs import TokenLogprobs
from edgepipe.sampling.rows import Logits, ban, choose_from_row, raw_logprobs, token_logprobs
from edgepipe.sampling.sequence import SequenceSampler


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Sampler and output position for a row of logits."""

    sampler: SequenceSampler
    position: int  # 0-based among the output tokens
    # The token at this position that the next row assumes, which belongs to the same sequence; None: no row does.
    draft: int | None = None
    given: int | None = None  # what the sequence's newest token must be, if the row assumes one; None: it is known


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of a row."""

    token: int
    logprobs: TokenLogprobs | None = None  # set if requested
    error: EdgepipeError | None = None  # reason why the sequence ends; ``token`` is then invalid


_NO_SCRATCH: Logits = np.empty(0, np.float32)  # the highest logit of a row is found without
SKIPPED = Sampled(-1)
"""Result of a row whose logits mean nothing: its window has ended before it."""


def sample(logits: Logits, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Sample one token per row; ``SKIPPED`` for a row that assumes another token than was sampled before it.

    logits  [R, V] float32, overwritten; -inf bans a token

    Rows of different sequences are independent. Greedy rows take the highest logit, the smallest id among equals. Other
    rows take the token whose share of the distribution, ordered from the most to the least likely, contains the draw. A
    row with a NaN, an infinite maximum or a failed grammar returns an error.
    """
    if logits.ndim != 2 or len(logits) != len(rows):
        raise ValueError(f"{len(rows)} rows for logits of shape {list(logits.shape)}")
    params = [row.sampler.params for row in rows]
    needs_scratch = any(not each.greedy or each.logprobs for each in params)
    scratch = np.empty(logits.shape[1], np.float32) if needs_scratch else _NO_SCRATCH
    return along_windows(rows, lambda index, row: _sample_row(logits[index], row, scratch))


def along_windows(rows: Sequence[SampleRow], sample_one: Callable[[int, SampleRow], Sampled]) -> list[Sampled]:
    """Sample row after row. A window, which is the rows of one sequence, ends at the first token that is no draft.

    A window whose given token is not its sequence's newest one has no tokens.
    """
    found: list[Sampled] = []
    goes_on = True
    for index, row in enumerate(rows):
        if row.given is not None:
            goes_on = row.sampler.ends_with(row.given, position=row.position - 1)
        one = sample_one(index, row) if goes_on else SKIPPED
        found.append(one)
        goes_on = row.draft is None or (one.error is None and one.token == row.draft)
    return found


def window_starts(rows: Sequence[SampleRow]) -> list[int]:
    """Return the index of each window's first row."""
    return [index for index in range(len(rows)) if not index or rows[index - 1].draft is None]


def _sample_row(logits: Logits, row: SampleRow, scratch: Logits) -> Sampled:
    sampler, params = row.sampler, row.sampler.params
    try:
        with sampler.lock:
            sampler.begin(row.position)
            scores = raw_logprobs(logits, params.top_logprobs, scratch) if params.logprobs else None
            raw = logits.copy() if scores is not None else logits
            sampler.edits.apply(logits)
            ban(logits, *sampler.allowed(row.position))
            uniform = 0.0 if params.greedy else sampler.uniform(row.position)
            token = choose_from_row(logits, params, uniform, scratch)
            sampler.took(token)
    except EdgepipeError as exc:
        return Sampled(0, error=exc)
    return Sampled(token, token_logprobs(float(raw[token]), *scores) if scores is not None else None)
