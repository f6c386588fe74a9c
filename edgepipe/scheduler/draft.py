"""Builder of one step."""

from __future__ import annotations

from edgepipe.backend.types import BlockCopy, RowState
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler.sequence import Sequence
from edgepipe.scheduler.states import StateClass
from edgepipe.scheduler.types import ScheduledStep, WindowBlocks

_MOST_REGISTRATION_BYTES = 1 << 20
"""Registrations in one step: 0.5 s on a link of 20 Mbit/s, a tenth of the shortest step deadline."""


_MOST_TABLE_ENTRIES = 16_384
"""Runs of new blocks and copies in one step: 256 KiB of its plan."""


_NONE = WindowBlocks((), (), (), ())


class Draft:
    """Columns of a step under construction and the sequences of its rows: decodes first, then prompt chunks.

    A draft with a ``last_slice`` holds replayed tokens only and ends after that slice. An ``isolated`` draft has one
    row, of a suspected sequence.
    """

    def __init__(
        self, *, last_slice: int | None = None, isolated: bool = False, states: StateClass | None = None
    ) -> None:
        self._slots = states
        self._last_slice = last_slice
        self.isolated = isolated
        self.decodes: list[Sequence] = []  # rows of one token each; every row samples
        # Sequence, its tokens computed after the step, whether the row samples.
        self.chunks: list[tuple[Sequence, int, bool]] = []
        self.copies: list[BlockCopy] = []
        self._positions: list[int] = []
        self._num_tokens: list[int] = []  # number of tokens of each chunk
        self._token_ids: list[int] = []
        self._block_rows: list[int] = []
        self._block_starts: list[int] = []
        self._block_counts: list[int] = []
        # By windowed class: row, place, first block and number of blocks of each run.
        self._windows: list[list[tuple[int, int, int, int]]] = []
        self._states: list[RowState] = []
        self._registers: list[SequenceId] = []
        self._registration_bytes = 0

    @property
    def replays(self) -> bool:
        """Whether the draft may hold replayed tokens only."""
        return self._last_slice is not None

    @property
    def empty(self) -> bool:
        """Whether the draft has no rows."""
        return not self.decodes and not self.chunks

    def may_begin(self, sequence: Sequence) -> bool:
        """Return whether the sequence's registration still fits into this step. The first registration always does."""
        if sequence.registered or not self._registers:
            return True
        entries = len(self._block_rows) + len(sequence.new_runs) + len(self.copies) + len(sequence.new_copies)
        registration_bytes = self._registration_bytes + sequence.registration_bytes
        return registration_bytes <= _MOST_REGISTRATION_BYTES and entries <= _MOST_TABLE_ENTRIES

    def add_decode(self, sequence: Sequence) -> None:
        """Schedule the newest token. Call before any ``add_chunk``. It runs for every sampled token: keep it fast."""
        tokens = sequence.tokens
        sequence.scheduled = count = len(tokens)
        sequence.in_flight += 1
        self._positions.append(count - 1)
        self._token_ids.append(tokens[-1])
        if sequence.new_runs:  # all tables of a decode grow together, those of windows, too
            self._tell(sequence)
        if self._slots is not None:
            self._states.append(self._slots.plan(sequence, count - 1, count, output=True))
        self.decodes.append(sequence)

    def add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule the next ``num_tokens`` known tokens of a sequence. The row samples if they are the last ones."""
        start, end = sequence.scheduled, sequence.scheduled + num_tokens
        if not sequence.registered:
            sequence.registered = True
            self._registers.append(sequence.sequence)
            self._registration_bytes += sequence.registration_bytes
        self._tell(sequence)
        self.chunks.append((sequence, end, end == len(sequence.tokens)))
        self._positions.append(start)
        self._num_tokens.append(num_tokens)
        self._token_ids += sequence.tokens[start:end]
        if self._slots is not None:
            self._states.append(self._slots.plan(sequence, start, end, output=False))
        sequence.scheduled = end
        sequence.in_flight += 1

    def finish(self, step: StepId, frees: list[SequenceId]) -> ScheduledStep:
        """Return the finished step."""
        num_decodes = len(self.decodes)
        sequences = [sequence.sequence for sequence in self.decodes]
        sequences += [sequence.sequence for sequence, _, _ in self.chunks]
        return ScheduledStep(
            step=step,
            sequences=tuple(sequences),
            positions=tuple(self._positions),
            num_tokens=(1,) * num_decodes + tuple(self._num_tokens),
            samples=(True,) * num_decodes + tuple([samples for _, _, samples in self.chunks]),
            token_ids=tuple(self._token_ids),
            block_rows=tuple(self._block_rows),
            block_starts=tuple(self._block_starts),
            block_counts=tuple(self._block_counts),
            registers=tuple(self._registers),
            frees=tuple(frees),
            copies=tuple(self.copies),
            windows=tuple([WindowBlocks(*zip(*runs, strict=True)) if runs else _NONE for runs in self._windows]),
            states=tuple(self._states),
            last_slice=self._last_slice,
        )

    def _tell(self, sequence: Sequence) -> None:
        """Add the table's changes for the next row."""
        row = len(self.decodes) + len(self.chunks)
        for run in sequence.new_runs:
            self._block_rows.append(row)
            self._block_starts.append(run.start)
            self._block_counts.append(run.count)
        self.copies += sequence.new_copies
        sequence.new_runs, sequence.new_copies = (), ()
        for number, table in enumerate(sequence.windows):
            if number == len(self._windows):
                self._windows.append([])
            place, runs = table.take_new()
            for run in runs:
                self._windows[number].append((row, place, run.start, run.count))
                place += run.count
