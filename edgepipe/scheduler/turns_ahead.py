"""Steps that are planned before the tokens that they begin with are known. PURE."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from edgepipe.scheduler.draft_windows import DraftWindows
from edgepipe.scheduler.in_flight import InFlight, StepsInFlight
from edgepipe.scheduler.sequence import Phase, Sequence
from edgepipe.scheduler.sequence_pool import SequencePool
from edgepipe.scheduler.step_builder import StepBuilder
from edgepipe.scheduler.tables import BlockTables

_FEW_TURNS = 2  # up to so many steps ahead, the next are planned once none is left; beyond, once one is left
_TURNS_WITHOUT_DRAFTS = 16  # after so many turns without drafts, steps are planned as if none came


class TurnsAhead:
    """Lets the rows of a step in flight go on with the tokens that it samples: they wait for no plan."""

    def __init__(self, pool: SequencePool, tables: BlockTables, steps: StepsInFlight, windows: DraftWindows) -> None:
        self._pool = pool
        self._tables = tables
        self._steps = steps
        self._windows = windows
        self.turns = 1  # steps that are planned ahead of the one that is computed, at most
        self._extends = False  # whether the steps planned ahead are being made as many as may be

    def next(self) -> StepBuilder | None:
        """Return a step behind one in flight, or None.

        Not for a step that lacks some of the decodes, and not while drafts are found: then the rows of the next step
        are chosen once this one has retired.
        """
        if (builder := self._windows.next_in_flight()) is not None:
            return builder
        records = self._steps.records
        ahead = sum([1 for record in records if record.after is not None])
        if not self._may_extend(ahead):
            return None
        for record in records:
            if not record.home or record.followed or record.isolated:
                continue
            rows = [sequence for sequence in record.sampling if sequence.phase is Phase.DECODE]
            if len(rows) != self._pool.num_decodes:
                continue
            going = [sequence for sequence in rows if sequence.scheduled + 1 < sequence.limit]
            if self._windows.drafting is not None and _awaits_drafts(going, ahead):
                continue
            if going and self._reserve_next(going):
                return self._follow(record, going)
        self._extends = False
        return None

    def stop(self) -> None:
        """Plan no further step ahead until few are left."""
        self._extends = False

    def _may_extend(self, ahead: int) -> bool:
        """Return whether a step may be planned behind so many that are planned ahead.

        Once few are left, several are planned together: stages get them in one message.
        """
        if ahead <= (self.turns > _FEW_TURNS):
            self._extends = True
        elif ahead >= self.turns:
            self._extends = False
        return self._extends and ahead < self.turns

    def _reserve_next(self, sequences: Seq[Sequence]) -> bool:
        """Give each sequence room for one token behind those scheduled. Return False where no block is free."""
        full = [each for each in sequences if each.scheduled >= each.room]
        return all(self._tables.grow_ahead(each, kept_blocks=0) for each in full)

    def _follow(self, record: InFlight, sequences: Seq[Sequence]) -> StepBuilder:
        record.followed = True
        builder = StepBuilder(after=record.step, states=self._tables.states)
        beside = self._windows.rows_beside(len(sequences))
        for sequence in sequences:
            wanted = self._windows.wanted(sequence, beside)
            if beside is not None:
                beside = beside.with_window(0, wanted=wanted)
            builder.add_next(sequence, wanted=wanted)
        return builder


def _awaits_drafts(sequences: Seq[Sequence], ahead: int) -> bool:
    """Return whether drafts have come for a sequence, or came of late: a window would wait for all planned steps.

    ``ahead``: steps that are planned ahead so far
    """
    if any(each.drafts.found for each in sequences):
        return True
    return ahead > 0 and any(each.drafts.without < _TURNS_WITHOUT_DRAFTS for each in sequences)
