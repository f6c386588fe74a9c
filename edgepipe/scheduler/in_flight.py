"""The scheduler's record of the steps in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from edgepipe.backend.drafting import Drafts
from edgepipe.backend.types import BlockCopy, TierMove
from edgepipe.ids import StepId
from edgepipe.scheduler.drafting import RowsBeside
from edgepipe.scheduler.sequence import Sequence


@dataclass(slots=True)
class InFlight:
    """A step that the stages compute."""

    step: StepId
    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int, bool]]  # sequence, its tokens computed after the step, whether the row samples
    copies: list[BlockCopy]
    moves: tuple[TierMove, ...]  # all stages have performed these once the step has retired
    num_sampling: int  # rows that sample
    isolated: bool
    after: StepId | None  # a step in flight whose tokens its rows begin with; None once that has retired
    home: bool  # a step may follow it
    windows: dict[int, Drafts]  # drafts behind the token of a decode, for each row
    beside: RowsBeside | None  # the rows beside those windows; None without any
    followed: bool = False  # a step after this one is planned
    lot: int = 0  # see ``ScheduledStep``
    assumed: bool = False  # see ``ScheduledStep``
    void: bool = False  # its sequence went another way than its first token assumes

    @property
    def sampling(self) -> list[Sequence]:
        """The sequences of the rows that sample."""
        if not self.chunks:
            return self.decodes
        return [*self.decodes, *[sequence for sequence, _, samples in self.chunks if samples]]


class StepsInFlight:
    """The steps in flight, and their numbers by what they hold."""

    def __init__(self) -> None:
        self.records: deque[InFlight] = deque()  # oldest first
        self.decodes = 0  # steps with decodes, without those that are planned ahead
        self.chunks = 0  # steps with prompt tokens
        self.only_chunks = 0  # steps without decodes

    def add(self, record: InFlight) -> None:
        """Add a step that is sent."""
        self.records.append(record)
        self._count(record, 1)

    def take(self, step: StepId, *, num_rows: int) -> InFlight:
        """Remove and return a step that retires with tokens of ``num_rows`` rows.

        A step that was planned to follow it counts from now on. Raises ValueError for a step that is not in flight, and
        for another number of rows.
        """
        records = self.records
        first = bool(records) and records[0].step == step
        place = 0 if first else next((at for at, each in enumerate(records) if each.step == step), None)
        if place is None:
            raise ValueError(f"step {step} is not in flight")
        record = records[place]
        if record.num_sampling != num_rows:
            raise ValueError(f"step {step} samples in {record.num_sampling} rows, tokens of {num_rows} came")
        del records[place]
        self._count(record, -1)
        if record.followed:
            next(each for each in records if each.after == step).after = None
            self.decodes += 1
        return record

    def void(self, record: InFlight) -> None:
        """Let nothing wait for a step whose tokens mean nothing."""
        record.void, record.followed = True, False
        if record.after is None:  # it counts for M no more
            record.after = record.step
            self.decodes -= 1

    def _count(self, record: InFlight, change: int) -> None:
        if record.decodes and record.after is None:
            self.decodes += change
        if record.chunks:
            self.chunks += change
            self.only_chunks += 0 if record.decodes else change
