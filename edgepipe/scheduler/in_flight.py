"""The scheduler's record of the steps in flight."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.backend.drafting import Drafts
from edgepipe.backend.types import BlockCopy, TierMove
from edgepipe.ids import StepId
from edgepipe.scheduler.drafting import Share
from edgepipe.scheduler.sequence import Sequence


@dataclass(slots=True)
class InFlight:
    """A step that the stages compute."""

    step: StepId
    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int, bool]]  # sequence, its tokens computed after the step, whether the row samples
    copies: list[BlockCopy]
    moves: tuple[TierMove, ...]  # that all stages have performed once it has retired
    num_tokens: int
    num_sampling: int  # rows that sample
    isolated: bool
    after: StepId | None  # a step in flight whose tokens its rows begin with; None once that has retired
    home: bool  # a step may follow it
    windows: dict[int, Drafts]  # by row: drafts behind the token of a decode
    share: Share | None  # of those windows; None without any
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


@dataclass(slots=True)
class StepCounts:
    """Numbers of steps in flight by what they hold."""

    decodes: int = 0  # without those that are planned ahead
    chunks: int = 0
    only_chunks: int = 0

    def add(self, step: InFlight, change: int) -> None:
        """Count a step that is sent (``change`` 1) or retires (-1)."""
        if step.decodes and step.after is None:
            self.decodes += change
        if step.chunks:
            self.chunks += change
            self.only_chunks += 0 if step.decodes else change
