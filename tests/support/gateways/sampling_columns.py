"""Sample in columns ``[V, B]``, the alternative layout (SiPipe, section 5.1, "Column-Wise CPU Sampling via Metadata
Reuse"): one dense buffer per penalty beside the transposed logits. A new token changes one entry of each buffer.

It costs a transposition and an access to every penalty of every token; ``docs/experiments.md`` has both times.
Shape letters: B columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgepipe.errors import EdgepipeError
from edgepipe.sampling.choice import Candidates, choose
from edgepipe.sampling.rows import Logits, ban, check_highest, choose_from_row, raw_logprobs, token_logprobs
from edgepipe.sampling.sampler import Sampled, SampleRow
from edgepipe.sampling.sequence import SequenceSampler

_DEPTH = 8.0  # units of temperature below the highest logit to search before a whole column


class ColumnSampler:
    """Samples one recurring micro-batch. A column belongs to a sequence until another replaces it.

    Use one instance per micro-batch, and from one thread at a time.
    """

    def __init__(self, *, vocab_size: int, batch: int) -> None:
        shape = (vocab_size, batch)
        self._logits, self._scratch = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self._add, self._repetition = np.zeros(shape, np.float32), np.ones(shape, np.float32)
        self._owners: list[SequenceSampler | None] = [None] * batch
        self._positions = [0] * batch

    def __call__(self, logits: Logits, rows: Sequence[SampleRow]) -> list[Sampled]:
        """Sample like ``edgepipe.sampling.sample``; at most ``batch`` rows."""
        results: list[Sampled | None] = [None] * len(rows)
        scores: list[tuple[float, tuple[tuple[int, float], ...]] | None] = [None] * len(rows)
        for column, row in enumerate(rows):
            try:
                with row.sampler.lock:
                    row.sampler.begin(row.position)
                    self._own(column, row)
                if row.sampler.params.logprobs:
                    scores[column] = raw_logprobs(
                        logits[column], row.sampler.params.top_logprobs, np.empty(len(self._add), np.float32)
                    )
            except EdgepipeError as exc:
                results[column] = Sampled(0, error=exc)
        changed = self._change(logits)
        tokens = self._choose(changed, rows, results)
        for column, row in enumerate(rows):
            if results[column] is None:
                results[column] = self._finish(
                    column, row, tokens[column], float(logits[column, tokens[column]]), scores[column]
                )
        return [result for result in results if result is not None]

    def _own(self, column: int, row: SampleRow) -> None:
        """Set the column's penalties to the sequence's at its current position."""
        edits = row.sampler.edits
        if self._owners[column] is row.sampler and self._positions[column] == row.position:
            return
        self._add[:, column], self._repetition[:, column] = 0.0, 1.0
        self._add[edits.ids, column], self._repetition[edits.ids, column] = edits.add, edits.repetition
        self._owners[column] = row.sampler

    def _change(self, logits: Logits) -> Logits:
        """Return the logits ``[V, B]``: transposed, with penalties and bias."""
        count = len(logits)
        changed, repetition = self._logits[:, :count], self._repetition[:, :count]
        np.copyto(changed, logits.T)
        positive = changed > 0
        np.divide(changed, repetition, out=changed, where=positive)
        np.multiply(changed, repetition, out=changed, where=~positive)
        changed += self._add[:, :count]
        return changed

    def _choose(self, changed: Logits, rows: Sequence[SampleRow], results: list[Sampled | None]) -> list[int]:
        for column, row in enumerate(rows):
            if results[column] is None:
                self._bar(changed, column, row, results)
        best = changed.argmax(axis=0)
        highest = changed[best, np.arange(len(rows))]
        temperatures = np.array([max(row.sampler.params.temperature, 1e-5) for row in rows], np.float32)
        totals, within = self._weigh(changed, highest, temperatures)
        tokens: list[int] = []
        for column, row in enumerate(rows):
            try:
                check_highest(changed[:, column], int(best[column]))
                candidates = _ranked(changed, within, column, float(totals[column]))
                token = self._token(changed, column, row, candidates)
            except EdgepipeError as exc:
                results[column] = results[column] or Sampled(0, error=exc)
                token = 0
            tokens.append(token)
        return tokens

    def _bar(self, changed: Logits, column: int, row: SampleRow, results: list[Sampled | None]) -> None:
        try:
            with row.sampler.lock:
                mask, tokens = row.sampler.allowed(row.position)
        except EdgepipeError as exc:
            results[column] = Sampled(0, error=exc)
            return
        if mask is not None or len(tokens):
            own = np.ascontiguousarray(changed[:, column])
            ban(own, mask, tokens)
            changed[:, column] = own

    def _weigh(
        self, changed: Logits, highest: npt.NDArray[np.float32], temperatures: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.float32], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Return each column's total, and (token, column) of the logits near its highest, by ascending token."""
        scratch = self._scratch[:, : changed.shape[1]]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            np.subtract(changed, highest, out=scratch)
            scratch /= temperatures
            tokens, columns = np.nonzero(scratch >= -_DEPTH)
            np.exp(scratch, out=scratch)
        return scratch.sum(axis=0), (tokens, columns)

    def _token(self, changed: Logits, column: int, row: SampleRow, candidates: Candidates) -> int:
        params, uniform = row.sampler.params, row.sampler.uniform(row.position)
        token = choose(candidates, params, uniform)
        if token is not None:
            return token
        own = np.ascontiguousarray(changed[:, column])
        return choose_from_row(own, params, uniform, np.empty_like(own))

    def _finish(
        self,
        column: int,
        row: SampleRow,
        token: int,
        raw: float,
        scores: tuple[float, tuple[tuple[int, float], ...]] | None,
    ) -> Sampled:
        sampler = row.sampler
        try:
            with sampler.lock:
                sampler.took(token)
        except EdgepipeError as exc:
            return Sampled(0, error=exc)
        repetition, add = sampler.edits.entry(token)
        self._repetition[token, column], self._add[token, column] = repetition, add
        self._positions[column] = row.position + 1
        return Sampled(token, token_logprobs(raw, *scores) if scores is not None else None)


def _ranked(
    changed: Logits, within: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]], column: int, total: float
) -> Candidates:
    ids = within[0][within[1] == column]
    logits = changed[ids, column]
    order = np.argsort(-logits, kind="stable")
    return Candidates(ids[order], logits[order], total, False)
