"""A step while it is being put together."""

from __future__ import annotations

from edgepipe.backend.types import BlockCopy
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler.sequence import Sequence
from edgepipe.scheduler.types import ScheduledStep


class Draft:
    """Columns under construction, and the sequences behind the rows.

    With a ``last_slice`` it is for replayed tokens alone, and ends there.
    """

    def __init__(self, *, last_slice: int | None = None) -> None:
        self._last_slice = last_slice
        self.rows: list[tuple[Sequence, int, bool]] = []  # in order, with the tokens then computed, and if it samples
        self.copies: list[BlockCopy] = []
        self._positions: list[int] = []
        self._num_tokens: list[int] = []
        self._token_ids: list[int] = []
        self._block_rows: list[int] = []
        self._block_starts: list[int] = []
        self._block_counts: list[int] = []
        self._registers: list[SequenceId] = []

    @property
    def replays(self) -> bool:
        """Whether only replayed tokens may be in it."""
        return self._last_slice is not None

    def admits(self, sequence: Sequence) -> bool:
        """Whether it may be in one step with those that are in it."""
        if sequence.replays != self.replays:
            return False
        return not self.rows or not (sequence.alone or self.rows[0][0].alone)

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule the next ``num_tokens`` known tokens of a sequence; if they are the last ones, the row samples."""
        start, end = sequence.scheduled, sequence.scheduled + num_tokens
        if not sequence.registered:
            sequence.registered = True
            self._registers.append(sequence.sequence)
        if sequence.new_runs:
            for run in sequence.new_runs:
                self._block_rows.append(len(self.rows))
                self._block_starts.append(run.start)
                self._block_counts.append(run.count)
            self.copies += sequence.new_copies
            sequence.new_runs, sequence.new_copies = (), ()
        self.rows.append((sequence, end, end == len(sequence.tokens)))
        self._positions.append(start)
        self._num_tokens.append(num_tokens)
        self._token_ids += sequence.tokens[start:end]
        sequence.scheduled = end
        sequence.in_flight += 1

    def finish(self, step: StepId, frees: list[SequenceId]) -> ScheduledStep:
        """The step as it goes out."""
        return ScheduledStep(
            step=step,
            sequences=tuple(sequence.sequence for sequence, _, _ in self.rows),
            positions=tuple(self._positions),
            num_tokens=tuple(self._num_tokens),
            samples=tuple(samples for _, _, samples in self.rows),
            token_ids=tuple(self._token_ids),
            block_rows=tuple(self._block_rows),
            block_starts=tuple(self._block_starts),
            block_counts=tuple(self._block_counts),
            registers=tuple(self._registers),
            frees=tuple(frees),
            copies=tuple(self.copies),
            last_slice=self._last_slice,
        )
