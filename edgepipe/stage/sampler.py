"""Sampler threads on the CPU: they turn the last stage's logits into ids while the device computes the next step."""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile

import numpy as np
import numpy.typing as npt

from edgepipe.backend.drafting import NO_DRAFTS, Drafts
from edgepipe.backend.types import PickedCandidates, StepOutput, TokenScores
from edgepipe.clock import Clock
from edgepipe.errors import EdgepipeError
from edgepipe.ids import SequenceId
from edgepipe.sampling import (
    SKIPPED,
    PromptLogprobs,
    Sampled,
    SampleRow,
    SequenceSampler,
    TokenLogprobs,
    sample_picked,
    window_starts,
)
from edgepipe.stage.drafting import DraftWish
from edgepipe.stage.sequences import ScoredPart

logger = logging.getLogger(__name__)

_LEAST_ROWS = 4  # rows that justify another thread: a row takes 0.3 ms, waking a thread 0.05 ms
_MOST_HERE = 8  # rows of a step that a lone sampler thread would not sample sooner than the device's thread


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Sampled tokens of one step."""

    sampled: tuple[tuple[Sampled, ...], ...] = ()  # results of each of the plan's sampling rows
    prompts: tuple[tuple[SequenceId, PromptLogprobs], ...] = ()
    sample_us: int = 0  # time from the first row's start to the last row's end
    drafts: tuple[Drafts, ...] = ()  # for each of the plan's sampling rows; empty: none
    draft_us: int = 0  # time that they took


Sampler = Callable[[npt.NDArray[np.float32], Sequence[SampleRow]], Sequence[Sampled]]
"""``(logits [R, V], rows [R]) -> results [R]``: ``edgepipe.sampling.sample``."""

OnResult = Callable[[StepResult], None]


def default_threads() -> int:
    """Return one thread per two cores, at most four: sampling is memory-bound, and the node needs cores, too."""
    return max(1, min(4, (os.cpu_count() or 2) // 2))


class SamplerPool:
    """Samples several steps at a time and spreads the rows of a step over the threads."""

    def __init__(self, sampler: Sampler, *, num_threads: int, clock: Clock) -> None:
        self._sampler = sampler
        self._clock = clock
        self._num_threads = num_threads
        self._closing = False
        self._threads = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="sampler")

    def is_sooner_here(self, rows: Sequence[SampleRow]) -> bool:
        """Return whether a thread that is there already samples the rows sooner than those that must be woken.

        A grammar's next mask is computed on the sampler's threads, so its rows are sampled there, too.
        """
        most = _MOST_HERE if self._num_threads == 1 else _LEAST_ROWS
        return 0 < len(rows) <= most and all(row.sampler.params.grammar is None for row in rows)

    def put(
        self,
        output: StepOutput,
        rows: tuple[SampleRow, ...],
        wishes: tuple[DraftWish | None, ...],
        scored: tuple[ScoredPart, ...],
        on_result: OnResult,
        on_error: Callable[[Exception], None],
    ) -> None:
        """Sample one step; then call ``on_result`` or ``on_error``. May be called on any thread."""
        bounds = _parts(rows, most=self._num_threads)
        done = partial(self._done, rows, on_result)
        job = _StepJob(self._sampler, output, rows, wishes, scored, len(bounds) - 1, done, on_error, self._clock)
        for start, end in pairwise(bounds):
            self._threads.submit(job.run, start, end)

    def sample_here(
        self,
        output: StepOutput,
        rows: tuple[SampleRow, ...],
        wishes: tuple[DraftWish | None, ...],
        scored: tuple[ScoredPart, ...],
    ) -> StepResult:
        """Sample one step on the calling thread. Raises what the sampler raises."""
        started_s = self._clock.monotonic_s()
        sampled = _sampled(self._sampler, output, rows, 0, len(rows))
        return _result(output, rows, wishes, scored, sampled, started_s=started_s, clock=self._clock)

    def close(self) -> None:
        """Finish the queued steps and end the threads."""
        self._closing = True
        self._threads.shutdown(wait=True)

    def _done(self, rows: tuple[SampleRow, ...], on_result: OnResult, result: StepResult) -> None:
        """Report the result, then queue the computation of the grammars' next masks."""
        on_result(result)
        for row in rows:
            if row.sampler.params.grammar is not None and row.draft is None and not self._closing:
                self._threads.submit(_look_ahead, row.sampler)


class _StepJob:
    """One step, split into parts for several threads. The last part to finish reports."""

    def __init__(
        self,
        sampler: Sampler,
        output: StepOutput,
        rows: tuple[SampleRow, ...],
        wishes: tuple[DraftWish | None, ...],
        scored: tuple[ScoredPart, ...],
        num_parts: int,
        on_result: OnResult,
        on_error: Callable[[Exception], None],
        clock: Clock,
    ) -> None:
        self._sampler = sampler
        self._output = output
        self._rows = rows
        self._wishes = wishes
        self._scored = scored
        self._left = num_parts
        self._on_result = on_result
        self._on_error = on_error
        self._clock = clock
        self._lock = threading.Lock()
        self._started_s: float | None = None
        self._sampled: dict[int, list[Sampled]] = {}  # results by each part's first row
        self._failed = False

    def run(self, start: int, end: int) -> None:
        """Sample the rows ``[start, end)``."""
        with self._lock:
            if self._started_s is None:
                self._started_s = self._clock.monotonic_s()
        try:
            sampled = self._sample(start, end)
        except Exception as exc:
            with self._lock:
                reported, self._failed = self._failed, True
            if not reported:
                self._on_error(exc)
            return
        with self._lock:
            self._sampled[start] = sampled
            self._left -= 1
            last = self._left == 0
        if last:
            self._finish()

    def _sample(self, start: int, end: int) -> list[Sampled]:
        return _sampled(self._sampler, self._output, self._rows, start, end)

    def _finish(self) -> None:
        assert self._started_s is not None
        every = [each for start in sorted(self._sampled) for each in self._sampled[start]]
        try:
            result = _result(
                self._output,
                self._rows,
                self._wishes,
                self._scored,
                every,
                started_s=self._started_s,
                clock=self._clock,
            )
        except Exception as exc:
            self._on_error(exc)
            return
        self._on_result(result)


def _sampled(sampler: Sampler, output: StepOutput, rows: tuple[SampleRow, ...], start: int, end: int) -> list[Sampled]:
    """Sample the rows ``[start, end)``."""
    own = rows[start:end]
    if not own:
        return []
    if output.candidates is not None:
        return sample_picked(_part_of(output.candidates, start, end), own)
    if output.logits is None:
        raise RuntimeError("the head's slice gave neither logits nor candidates")
    return list(sampler(output.logits[start:end], own))


def _result(
    output: StepOutput,
    rows: tuple[SampleRow, ...],
    wishes: tuple[DraftWish | None, ...],
    scored: tuple[ScoredPart, ...],
    every: list[Sampled],
    *,
    started_s: float,
    clock: Clock,
) -> StepResult:
    """Return the result of a step whose rows are sampled, with drafts behind them."""
    bounds = [*window_starts(rows), len(every)] if every else [0]
    sampled = tuple([tuple(_until_skipped(every[start:end])) for start, end in pairwise(bounds)])
    sampled_s = clock.monotonic_s()
    prompts = prompt_logprobs(scored, output.scores)
    drafts = _draft(wishes, sampled)
    late_us = sum(each.late_us for each in drafts)
    return StepResult(
        sampled=sampled,
        prompts=prompts,
        sample_us=int((sampled_s - started_s) * 1e6),
        drafts=drafts if any(each.ids for each in drafts) else (),
        draft_us=max(0, int((clock.monotonic_s() - sampled_s) * 1e6) - late_us) if drafts else 0,
    )


def _parts(rows: Sequence[SampleRow], *, most: int) -> list[int]:
    """Return the bounds of at most ``most`` parts of the rows. A window stays in one part."""
    count = max(1, min(most, len(rows) // _LEAST_ROWS))
    starts = [*window_starts(rows), len(rows)]
    bounds = [starts[bisect_left(starts, len(rows) * part // count)] for part in range(count + 1)]
    return sorted({0, *bounds}) if rows else [0, 0]


def _draft(wishes: Sequence[DraftWish | None], sampled: Sequence[Sequence[Sampled]]) -> tuple[Drafts, ...]:
    """Return the drafts of each row; of a row without a wish, or whose sequence ends with an error, none.

    Where no row can use any, drafters only hear of the tokens: a filled ring has no time for more.
    """
    if not any(wish is not None and (wish.count or wish.lot) for wish in wishes):
        for wish, row in zip(wishes, sampled, strict=bool(wishes)):
            if wish is not None and row[-1].error is None:
                wish.drafter.heard([each.token for each in row])
        return ()
    return tuple(
        [
            NO_DRAFTS
            if wish is None or wish.lot or row[-1].error is not None
            else wish.drafter.propose([each.token for each in row], wish.count)
            for wish, row in zip(wishes, sampled, strict=bool(wishes))
        ]
    )


def _until_skipped(sampled: Sequence[Sampled]) -> Iterable[Sampled]:
    return takewhile(lambda each: each is not SKIPPED, sampled)


def prompt_logprobs(
    parts: Sequence[ScoredPart], scores: TokenScores | None
) -> tuple[tuple[SequenceId, PromptLogprobs], ...]:
    """Convert a device's scores of prompt tokens to each sequence's log-probabilities."""
    if not parts:
        return ()
    if scores is None:
        raise RuntimeError("the head's slice gave no scores")
    own = np.minimum(scores.logits - scores.log_totals, 0.0)
    top = np.minimum(scores.top_logits - scores.log_totals[:, None], 0.0)
    tokens = [
        TokenLogprobs(logprob, tuple(zip(ids, values, strict=True)))
        for logprob, ids, values in zip(own.tolist(), scores.top_ids.tolist(), top.tolist(), strict=True)
    ]
    found: list[tuple[SequenceId, PromptLogprobs]] = []
    start = 0
    for part in parts:
        own_tokens = tuple(tokens[start : start + part.count])
        found.append((part.sequence, PromptLogprobs(position=part.position, tokens=own_tokens)))
        start += part.count
    return tuple(found)


def _part_of(picked: PickedCandidates, start: int, end: int) -> PickedCandidates:
    return PickedCandidates(
        ids=picked.ids[start:end],
        logits=picked.logits[start:end],
        raw_logits=picked.raw_logits[start:end],
        totals=picked.totals[start:end],
        raw_log_totals=picked.raw_log_totals[start:end],
        top_ids=picked.top_ids[start:end],
        top_logits=picked.top_logits[start:end],
        fetch=lambda row: picked.fetch(start + row),
    )


def _look_ahead(sampler: SequenceSampler) -> None:
    """Compute a grammar's next mask. An error recurs when the sequence is sampled, and is reported then."""
    try:
        with sampler.lock:
            sampler.look_ahead()
    except EdgepipeError as exc:
        logger.debug("a grammar cannot be followed: %s", exc)
