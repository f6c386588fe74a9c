"""Windows of drafts in the schedule: what rows verify, also in flight, and what came of it. PURE.

``drafting.py`` decides which windows pay. Recurrent layers and the context's blocks decide what fits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from edgepipe.backend.drafting import NO_DRAFTS, Drafts
from edgepipe.scheduler.drafting import Drafting, DraftStats, RowsBeside
from edgepipe.scheduler.flights import windows_may_fly
from edgepipe.scheduler.in_flight import InFlight, StepsInFlight
from edgepipe.scheduler.limits import SchedulerLimits
from edgepipe.scheduler.sequence import Phase, Sequence
from edgepipe.scheduler.sequence_pool import SequencePool
from edgepipe.scheduler.step_builder import StepBuilder
from edgepipe.scheduler.tables import BlockTables


class DraftWindows:
    """Gives rows their drafts. Without a ``drafting``, none are wanted."""

    def __init__(self, limits: SchedulerLimits, pool: SequencePool, tables: BlockTables, steps: StepsInFlight) -> None:
        self._limits = limits
        self._pool = pool
        self._tables = tables
        self._steps = steps
        self.drafting: Drafting | None = None

    def stats(self) -> DraftStats:
        """Return the current counts."""
        return self.drafting.stats() if self.drafting is not None else DraftStats()

    # One at a time

    def rows_beside(self, rows: int) -> RowsBeside | None:
        """Return the rows of a step with so many decodes, for its windows; None if none of them would pay."""
        if self.drafting is None:
            return None
        beside = self._beside(rows)
        return beside if self.drafting.may_pay(beside) else None

    def rows_of(self, builder: StepBuilder) -> RowsBeside | None:
        """Return the rows beside the windows of a step; None without any."""
        return self._beside(len(builder.decodes)) if builder.windows else None

    def wanted(self, sequence: Sequence, beside: RowsBeside | None) -> int:
        """Return how many drafts the sequence's next row can use; without ``beside``, none would pay."""
        return 0 if self.drafting is None or beside is None else self.drafting.wanted(sequence.drafts, beside)

    def add_decode(
        self, builder: StepBuilder, sequence: Sequence, beside: RowsBeside, *, promised: int, may_fly: bool
    ) -> RowsBeside:
        """Add a decode, with a window if that pays. Return the rows beside the step's next window.

        promised  free blocks that belong to waiting decodes
        may_fly   whether a run of windows in flight may begin with it
        """
        assert self.drafting is not None
        if self._begin_flight(self.drafting, builder, sequence, beside, may_fly=may_fly):
            return beside
        drafts = self._window(self.drafting, sequence, beside, promised=promised)
        wanted = self.drafting.wanted(sequence.drafts, beside)
        builder.add_decode(sequence, drafts, wanted=wanted)
        return beside.with_window(len(drafts.ids), wanted=wanted)

    def _beside(self, rows: int) -> RowsBeside:
        return RowsBeside(rows=rows, alone=self._pool.num_decodes <= 1)

    def _window(self, drafting: Drafting, sequence: Sequence, beside: RowsBeside, *, promised: int) -> Drafts:
        """Return the drafts that the sequence's next row verifies, as far as its limit, blocks and slots allow."""
        if not sequence.drafts.next.ids:
            sequence.drafts.found = False
            return NO_DRAFTS
        known, states = len(sequence.tokens), self._tables.states
        most = min(sequence.limit - known - 1, self._limits.slack_tokens - 1)
        if states is not None:
            most = min(most, states.most_window_tokens - 1)
        drafts = drafting.window(sequence.drafts, beside, most=most)
        sequence.drafts.found = bool(drafts.ids)
        if known + len(drafts.ids) > sequence.room:
            self._tables.grow_ahead(sequence, kept_blocks=promised + len(self._pool.running))
        room = max(0, sequence.room - known)
        return drafts if len(drafts.ids) <= room else Drafts(drafts.ids[:room], drafts.sources[:room])

    # Windows in flight, see ``flights.py``

    def _begin_flight(
        self, drafting: Drafting, builder: StepBuilder, sequence: Sequence, beside: RowsBeside, *, may_fly: bool
    ) -> bool:
        """Begin a run of windows in flight with the sequence's newest token, if that pays. Return whether it does."""
        own, limits = sequence.drafts, self._limits
        able = sequence.may_fly and not sequence.alone
        able = able and windows_may_fly(recurrent=limits.states is not None, rest_tokens=limits.rest_tokens)
        alone = may_fly and not self._pool.unscheduled_prefill and not builder.decodes
        before, own.flight = own.flight, drafting.flight(own, beside) if able and alone else None
        if own.flight is None:
            if before is not None:
                own.next, own.run_since_s, own.run_tokens = own.chain.take_rest(), None, 0
            return False
        if before is None:
            own.chain.begin(NO_DRAFTS)
        own.next, own.found = NO_DRAFTS, False
        known = len(sequence.tokens)
        most = min(own.flight.lot - 1, sequence.limit - known - 1, limits.slack_tokens - 1)
        drafts = own.chain.unsent(most)
        if drafts.ids and not self._reach(sequence, known + len(drafts.ids)):
            drafts = NO_DRAFTS
        own.chain.sent = len(drafts.ids)
        builder.lot = own.flight.lot
        builder.add_decode(sequence, drafts, wanted=own.flight.drafts)
        return True

    def next_in_flight(self) -> StepBuilder | None:
        """Let the newest window in flight be followed by one that assumes its drafts, as far as drafts have come."""
        records = self._steps.records
        before = records[-1] if records else None
        if before is None or not before.lot or before.void or before.followed:
            return None
        sequence = before.decodes[0]
        own, known = sequence.drafts, len(sequence.tokens)
        if (flight := own.flight) is None or sequence.phase is not Phase.DECODE:
            return None
        if sum([not each.void and each.decodes == before.decodes for each in records]) >= flight.windows:
            return None
        start = known + own.chain.sent
        most = min(sequence.limit - 1, known + self._limits.slack_tokens - 1) - start
        drafts = own.chain.unsent(min(flight.lot, most))
        if not drafts.ids or not self._reach(sequence, start + len(drafts.ids)):
            return None
        before.followed = True
        own.chain.sent += len(drafts.ids)
        builder = StepBuilder(after=before.step, assumed=True, lot=flight.lot)
        builder.add_assumed(sequence, drafts, start=start, wanted=flight.drafts)
        return builder

    def _reach(self, sequence: Sequence, end: int) -> bool:
        """Give a sequence room for its tokens up to the place ``end``. Return False where no block is free."""
        while end > sequence.room:
            if not self._tables.grow_ahead(sequence, kept_blocks=0):
                return False
        return True

    # Results

    def note_windows(self, record: InFlight, ids: Seq[Seq[int]]) -> None:
        """Count which drafts of a step that retires were right, before its tokens are appended."""
        if record.lot:
            self._note_flight(record, ids[0])
        elif record.windows:
            self._note_single(record, ids)

    def note_drafts(self, record: InFlight, ids: Seq[Seq[int]], drafts: Seq[Drafts]) -> None:
        """Keep the drafts behind a step's tokens; where a step follows that was planned ahead, only that some came."""
        if self.drafting is None or record.lot:
            return
        if self._pool.num_decodes == 1 and len(record.decodes) == 1 and not record.chunks:
            own, now_s = record.decodes[0].drafts, self._pool.now_s
            follows = own.newest_turn is not None and own.newest_turn[0] == record.step - 1
            if follows and own.last_source and now_s is not None and own.newest_turn is not None:
                self.drafting.note_single(len(ids[0]), now_s - own.newest_turn[1])
            own.newest_turn = (record.step, now_s) if now_s is not None else None
        sampling = record.sampling
        for sequence, proposed in zip(sampling, drafts or [NO_DRAFTS] * len(sampling), strict=True):
            sequence.drafts.next = NO_DRAFTS if record.followed else proposed
            sequence.drafts.found = bool(proposed.ids)
            sequence.drafts.without = 0 if proposed.ids else sequence.drafts.without + 1

    def _note_single(self, record: InFlight, ids: Seq[Seq[int]]) -> None:
        """Count which drafts were right, and keep the states behind them."""
        for row, drafts in record.windows.items():
            sequence, right = record.decodes[row], max(0, len(ids[row]) - 1)
            if self._tables.states is not None:
                self._tables.states.settle_window(sequence, 1 + right)
            if self.drafting is not None and record.beside is not None and ids[row]:
                self.drafting.note(sequence.drafts, drafts.sources, accepted=right, beside=record.beside)

    def _note_flight(self, record: InFlight, sampled: Seq[int]) -> None:
        """Count the drafts that a window in flight has judged. If its sequence goes another way, void those behind it.

        A window that gave nothing is void itself.
        """
        sequence = record.decodes[0]
        own = sequence.drafts
        sequence.decoded_s, own.newest_turn = 0.0, None  # turns of windows in flight overlap: none is measured
        record.void = record.void or (record.assumed and not sampled)
        if record.void or sequence.phase is Phase.ENDED:
            return
        judged = own.chain.took(record.step, sampled)
        if self.drafting is not None:
            now_s = self._pool.now_s
            self.drafting.note_flight(own, judged, tokens=len(sampled), ahead=record.assumed, now_s=now_s)
        if judged.wrong and sequence.phase is Phase.DECODE:
            sequence.scheduled = len(sequence.tokens)
            for each in self._steps.records:
                if each.assumed and not each.void and each.decodes[0] is sequence:
                    self._steps.void(each)
