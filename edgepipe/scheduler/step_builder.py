"""Builder of one step."""

from __future__ import annotations

from edgepipe.backend.drafting import NO_DRAFTS, Drafts
from edgepipe.backend.types import BlockCopy, RowState, TierMove
from edgepipe.ids import SequenceId, StepId
from edgepipe.scheduler.place_keys import PlaceKey
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
    row, of a suspected sequence. The rows of a step ``after`` another one begin with the tokens that this one samples,
    or with the drafts that are ``assumed`` to be these tokens.
    """

    def __init__(
        self,
        *,
        last_slice: int | None = None,
        isolated: bool = False,
        after: StepId | None = None,
        assumed: bool = False,
        lot: int = 0,
        states: StateClass | None = None,
    ) -> None:
        self._slots = states
        self.assumed = assumed
        self.lot = lot  # see ``ScheduledStep``
        self._last_slice = last_slice
        self.isolated = isolated
        self.after = after
        self.decodes: list[Sequence] = []  # every row samples after each of its tokens
        self.windows: dict[int, Drafts] = {}  # drafts behind the token of a decode, for each row
        # Sequence, its tokens computed after the step, whether the row samples.
        self.chunks: list[tuple[Sequence, int, bool]] = []
        self.copies: list[BlockCopy] = []
        self._positions: list[int] = []
        self._chunk_tokens: list[int] = []  # number of tokens of each chunk
        self._wanted: dict[int, int] = {}  # most drafts that each row's sequence can use next, if any
        self._token_ids: list[int] = []
        self._block_rows: list[int] = []
        self._block_starts: list[int] = []
        self._block_counts: list[int] = []
        # Each windowed class has a list of runs: row, place, first block and number of blocks.
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
        sequence.scheduled = count = len(tokens)
        sequence.in_flight += 1
        self._positions.append(count - 1)
        self._token_ids.append(tokens[-1])
        if drafts.ids or wanted:
            self._add_drafts(drafts, wanted)
        if sequence.new_runs:  # all tables of a decode grow together, those of windows, too
            self._tell(sequence)
        if self._slots is not None:
            self._add_state(self._slots, sequence, count - 1, 1 + len(drafts.ids))
        self.decodes.append(sequence)

    def add_next(self, sequence: Sequence, *, wanted: int = 0) -> None:
        """Schedule the token that the step ``after`` samples, whose id is not known yet."""
        sequence.scheduled = count = sequence.scheduled + 1
        sequence.in_flight += 1
        self._positions.append(count - 1)
        self._token_ids.append(0)
        if wanted:
            self._add_drafts(NO_DRAFTS, wanted)
        if sequence.new_runs:
            self._tell(sequence)
        if self._slots is not None:
            self._add_state(self._slots, sequence, count - 1, 1)
        self.decodes.append(sequence)

    def add_assumed(self, sequence: Sequence, drafts: Drafts, *, start: int, wanted: int) -> None:
        """Schedule drafts of the tokens from the place ``start`` on, as tokens of a window in flight."""
        sequence.scheduled = start + 1
        sequence.in_flight += 1
        self._positions.append(start)
        self._token_ids.append(drafts.ids[0])
        self._add_drafts(Drafts(drafts.ids[1:], drafts.sources[1:]), wanted)
        if sequence.new_runs:
            self._tell(sequence)
        self.decodes.append(sequence)

    def _add_drafts(self, drafts: Drafts, wanted: int) -> None:
        """Add what follows the next decode's token, and how many drafts its sequence can use after that."""
        row = len(self.decodes)
        if drafts.ids:
            self._token_ids += drafts.ids
            self.windows[row] = drafts
        if wanted:
            self._wanted[row] = wanted

    def _add_state(self, slots: StateClass, sequence: Sequence, start: int, count: int) -> None:
        if count > 1:
            self._states.append(slots.plan_window(sequence, start, count))
        else:
            self._states.append(slots.plan(sequence, start, start + 1, output=True))

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
        self._chunk_tokens.append(num_tokens)
        if wanted:
            self._wanted[len(self.decodes) + len(self.chunks) - 1] = wanted
        self._token_ids += sequence.tokens[start:end]
        if self._slots is not None:
            self._states.append(self._slots.plan(sequence, start, end, output=False))
        sequence.scheduled = end
        sequence.in_flight += 1

    def finish(
        self,
        step: StepId,
        frees: list[SequenceId],
        moves: tuple[TierMove, ...] = (),
        keys: tuple[PlaceKey, ...] = (),
        *,
        home: bool,
    ) -> ScheduledStep:
        """Return the finished step. ``home``: a step may follow it, if it samples."""
        chunks = self.chunks
        sequences = [sequence.sequence for sequence in self.decodes]
        samples: tuple[int, ...] = (1,) * len(sequences)
        if self.windows:
            samples = tuple([1 + len(self.windows.get(row, NO_DRAFTS).ids) for row in range(len(sequences))])
        num_tokens = samples
        if chunks:
            sequences += [sequence.sequence for sequence, _, _ in chunks]
            num_tokens += tuple(self._chunk_tokens)
            samples += tuple([int(samples) for _, _, samples in chunks])
        windows: tuple[WindowBlocks, ...] = ()
        if self._windows:
            windows = tuple([WindowBlocks(*zip(*runs, strict=True)) if runs else _NONE for runs in self._windows])
        wanted = self._wanted
        return ScheduledStep(
            step,
            tuple(sequences),
            tuple(self._positions),
            num_tokens,
            samples,
            tuple(self._token_ids),
            tuple(self._block_rows),
            tuple(self._block_starts),
            tuple(self._block_counts),
            tuple(self._registers),
            tuple(frees),
            tuple(self.copies),
            moves,
            windows,
            tuple(self._states),
            tuple([wanted.get(row, 0) for row in range(len(sequences))]) if wanted else (),
            self._last_slice,
            None if self.assumed else self.after,
            home and any(samples),
            self.lot,
            self.assumed,
            keys,
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
