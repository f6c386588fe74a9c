"""Builder of one step."""

from __future__ import annotations

from edgepipe.backend.drafting import NO_DRAFTS, Drafts
from edgepipe.backend.types import BlockCopy, RowState, TierMove
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler.sequence import Sequence
from edgepipe.scheduler.states import StateClass
from edgepipe.scheduler.types import ScheduledStep, WindowBlocks

_MOST_REGISTRATION_BYTES = 1 << 20
"""Registrations in one step: 0.5 s on a link of 20 Mbit/s, a tenth of the shortest step deadline."""


_MOST_TABLE_ENTRIES = 16_384
"""Runs of new blocks and copies in one step: 256 KiB of its plan."""


_NONE = WindowBlocks((), (), (), ())


class StepBuilder:
    """Columns of a step under construction and the sequences of its rows: decodes first, then prompt chunks.

    A step with a ``last_slice`` holds replayed tokens only and ends after that slice. An ``isolated`` step has one
    row, of a suspected sequence. The rows of a step ``after`` another one begin with the tokens that this one samples.
    """

    def __init__(
        self,
        *,
        last_slice: int | None = None,
        isolated: bool = False,
        after: StepId | None = None,
        states: StateClass | None = None,
    ) -> None:
        self._slots = states
        self._last_slice = last_slice
        self.isolated = isolated
        self.after = after
        self.decodes: list[Sequence] = []  # every row samples after each of its tokens
        self.windows: dict[int, Drafts] = {}  # by row: drafts behind the token of a decode
        # Sequence, its tokens computed after the step, whether the row samples.
        self.chunks: list[tuple[Sequence, int, bool]] = []
        self.copies: list[BlockCopy] = []
        self._positions: list[int] = []
        self._num_tokens: list[int] = []  # number of tokens of each row
        self._drafts: list[int] = []  # most drafts that each row's sequence can use next
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
        """Whether the step may hold replayed tokens only."""
        return self._last_slice is not None

    @property
    def empty(self) -> bool:
        """Whether the step has no rows."""
        return not self.decodes and not self.chunks

    def may_begin(self, sequence: Sequence) -> bool:
        """Return whether the sequence's registration still fits into this step. The first registration always does."""
        if sequence.registered or not self._registers:
            return True
        entries = len(self._block_rows) + len(sequence.new_runs) + len(self.copies) + len(sequence.new_copies)
        registration_bytes = self._registration_bytes + sequence.registration_bytes
        return registration_bytes <= _MOST_REGISTRATION_BYTES and entries <= _MOST_TABLE_ENTRIES

    def add_decode(self, sequence: Sequence, drafts: Drafts = NO_DRAFTS, *, wanted: int = 0) -> None:
        """Schedule the newest token, and drafts that it assumes to follow. Call before any ``add_chunk``.

        ``wanted``: most drafts that its next row can use. It runs for every sampled token: keep it fast.
        """
        tokens = sequence.tokens
        self._add_tokens(sequence, len(tokens), tokens[-1], drafts, wanted)

    def add_next(self, sequence: Sequence, *, wanted: int = 0) -> None:
        """Schedule the token that the step ``after`` samples, whose id is not known yet."""
        self._add_tokens(sequence, sequence.scheduled + 1, 0, NO_DRAFTS, wanted)

    def _add_tokens(self, sequence: Sequence, count: int, token_id: int, drafts: Drafts, wanted: int) -> None:
        """Schedule token number ``count``, and drafts behind it."""
        sequence.scheduled = count
        sequence.in_flight += 1
        self._positions.append(count - 1)
        self._token_ids.append(token_id)
        self._num_tokens.append(1 + len(drafts.ids))
        if drafts.ids:
            self._token_ids += drafts.ids
            self.windows[len(self.decodes)] = drafts
        self._drafts.append(wanted)
        if sequence.new_runs:  # all tables of a decode grow together, those of windows, too
            self._tell(sequence)
        if self._slots is not None and drafts.ids:
            self._states.append(self._slots.plan_window(sequence, count - 1, 1 + len(drafts.ids)))
        elif self._slots is not None:
            self._states.append(self._slots.plan(sequence, count - 1, count, output=True))
        self.decodes.append(sequence)

    def add_chunk(self, sequence: Sequence, num_tokens: int, *, wanted: int = 0) -> None:
        """Schedule the next ``num_tokens`` known tokens of a sequence. The row samples if they are the last ones.

        ``wanted``: most drafts that its next row can use.
        """
        start, end = sequence.scheduled, sequence.scheduled + num_tokens
        if not sequence.registered:
            sequence.registered = True
            self._registers.append(sequence.sequence)
            self._registration_bytes += sequence.registration_bytes
        self._tell(sequence)
        self.chunks.append((sequence, end, end == len(sequence.tokens)))
        self._positions.append(start)
        self._num_tokens.append(num_tokens)
        self._drafts.append(wanted)
        self._token_ids += sequence.tokens[start:end]
        if self._slots is not None:
            self._states.append(self._slots.plan(sequence, start, end, output=False))
        sequence.scheduled = end
        sequence.in_flight += 1

    def finish(
        self, step: StepId, frees: list[SequenceId], moves: tuple[TierMove, ...] = (), *, home: bool
    ) -> ScheduledStep:
        """Return the finished step. ``home``: a step may follow it, if it samples."""
        samples = [int(samples) for _, _, samples in self.chunks]
        sequences = [sequence.sequence for sequence in self.decodes]
        sequences += [sequence.sequence for sequence, _, _ in self.chunks]
        return ScheduledStep(
            step=step,
            sequences=tuple(sequences),
            positions=tuple(self._positions),
            num_tokens=tuple(self._num_tokens),
            samples=(*self._num_tokens[: len(self.decodes)], *samples),
            token_ids=tuple(self._token_ids),
            block_rows=tuple(self._block_rows),
            block_starts=tuple(self._block_starts),
            block_counts=tuple(self._block_counts),
            registers=tuple(self._registers),
            frees=tuple(frees),
            copies=tuple(self.copies),
            moves=moves,
            windows=tuple([WindowBlocks(*zip(*runs, strict=True)) if runs else _NONE for runs in self._windows]),
            states=tuple(self._states),
            drafts=tuple(self._drafts) if any(self._drafts) else (),
            last_slice=self._last_slice,
            after=self.after,
            home=home and (bool(self.decodes) or any(samples for _, _, samples in self.chunks)),
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
