"""One token stream on its way: the scheduler's own record of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from edgepipe.backend.types import BlockRun
from edgepipe.ids import SequenceId
from edgepipe.scheduler.types import EndReason


class Phase(Enum):
    """Where a sequence stands."""

    WAITING = auto()  # for admission, at first or after preemption
    PREFILL = auto()  # admitted, some known tokens not scheduled
    DECODE = auto()  # all known tokens scheduled; ready when no sampling step is in flight
    ENDED = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Tokens, how far they are computed, and the blocks they hold."""

    sequence: SequenceId
    arrival: int  # order of submission: admission goes by it, preemption against it
    tokens: list[int]  # prompt and output
    prompt_tokens: int
    stop_ids: frozenset[int]
    limit: int  # tokens, prompt and output, at which it ends
    limit_reason: EndReason = EndReason.LENGTH
    phase: Phase = Phase.WAITING
    scheduled: int = 0  # tokens [0, scheduled) are computed or in flight; a sampling row in flight: all known ones
    in_flight: int = 0  # steps that touch its blocks
    draining: bool = False  # left, but steps in flight still touch its blocks
    table: list[BlockRun] = field(default_factory=list[BlockRun])
    num_blocks: int = 0  # in the table
    new_runs: tuple[BlockRun, ...] = ()  # of the table, not yet told
    registered: bool = False  # told since its table was last empty

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def unscheduled(self) -> int:
        """Known tokens that no step holds yet."""
        return len(self.tokens) - self.scheduled

    def grow(self, runs: tuple[BlockRun, ...]) -> None:
        """Append blocks to the table; adjoining runs become one."""
        self.new_runs += runs
        for run in runs:
            self.num_blocks += run.count
            last = self.table[-1] if self.table else None
            if last is not None and last.start + last.count == run.start:
                self.table[-1] = BlockRun(last.start, last.count + run.count)
            else:
                self.table.append(run)

    def forget_blocks(self) -> list[BlockRun]:
        """Empty the table and return what it held."""
        table, self.table = self.table, []
        self.num_blocks, self.new_runs, self.registered = 0, (), False
        return table
