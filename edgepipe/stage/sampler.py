"""Sampler threads on the CPU: they turn the last stage's logits into ids while the device computes the next step."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import PickedCandidates, StepOutput, TokenScores
from edgepipe.clock import Clock
from edgepipe.errors import EdgepipeError
from edgepipe.ids import SequenceId
from edgepipe.sampling import (
    PromptLogprobs,
    Sampled,
    SampleRow,
    SequenceSampler,
    TokenLogprobs,
    sample_picked,
)
from edgepipe.stage.sequences import ScoredPart

logger = logging.getLogger(__name__)

_LEAST_ROWS = 4  # rows that justify another thread: a row takes 0.3 ms, waking a thread 0.05 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Sampled tokens of one step."""

    sampled: tuple[Sampled, ...] = ()  # one per sampling row
    prompts: tuple[tuple[SequenceId, PromptLogprobs], ...] = ()
    sample_us: int = 0  # time from the first row's start to the last row's end


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

    def put(
        self,
        output: StepOutput,
        rows: tuple[SampleRow, ...],
        scored: tuple[ScoredPart, ...],
        on_result: OnResult,
        on_error: Callable[[Exception], None],
    ) -> None:
        """Sample one step. Calls ``on_result`` or ``on_error`` on a sampler thread. May be called on any thread."""
        count = max(1, min(self._num_threads, len(rows) // _LEAST_ROWS))
        bounds = [len(rows) * part // count for part in range(count + 1)]
        done = partial(self._done, rows, on_result)
        job = _StepJob(self._sampler, output, rows, scored, count, done, on_error, self._clock)
        for start, end in pairwise(bounds):
            self._threads.submit(job.run, start, end)

    def close(self) -> None:
        """Finish the queued steps and end the threads."""
        self._closing = True
        self._threads.shutdown(wait=True)

    def _done(self, rows: tuple[SampleRow, ...], on_result: OnResult, result: StepResult) -> None:
        """Report the result, then queue the computation of the grammars' next masks."""
        on_result(result)
        for row in rows:
            if row.sampler.params.grammar is not None and not self._closing:
                self._threads.submit(_look_ahead, row.sampler)


class _StepJob:
    """One step, split into parts for several threads. The last part to finish reports."""

    def __init__(
        self,
        sampler: Sampler,
        output: StepOutput,
        rows: tuple[SampleRow, ...],
        scored: tuple[ScoredPart, ...],
        num_parts: int,
        on_result: OnResult,
        on_error: Callable[[Exception], None],
        clock: Clock,
    ) -> None:
        self._sampler = sampler
        self._output = output
        self._rows = rows
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
        rows = self._rows[start:end]
        if not rows:
            return []
        if self._output.candidates is not None:
            return sample_picked(_part_of(self._output.candidates, start, end), rows)
        if self._output.logits is None:
            raise RuntimeError("the head's slice gave neither logits nor candidates")
        return list(self._sampler(self._output.logits[start:end], rows))

    def _finish(self) -> None:
        assert self._started_s is not None
        try:
            prompts = prompt_logprobs(self._scored, self._output.scores)
        except Exception as exc:
            self._on_error(exc)
            return
        result = StepResult(
            sampled=tuple(each for start in sorted(self._sampled) for each in self._sampled[start]),
            prompts=prompts,
            sample_us=int((self._clock.monotonic_s() - self._started_s) * 1e6),
        )
        self._on_result(result)


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
