"""PURE: what a stage knows of every sequence, grown from the deltas in plans. Shape letter: R rows that sample."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from edgepipe.backend.types import BlockRun, StepRow
from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import SequenceId
from edgepipe.sampling import SampleRow
from edgepipe.wire.plans import PlanRow, Registration, StepPlan

Runs = tuple[BlockRun, ...]


@dataclass(slots=True)
class SequenceState:
    """A registered sequence."""

    registration: Registration
    runs: Runs = ()  # block table from token 0; neighbouring runs are merged
    num_blocks: int = 0
    end: int | None = None  # tokens whose KV stands once the newest plan has run; None before its first row


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRows:
    """The rows of one step, ready for a backend and for the sampler."""

    rows: tuple[StepRow, ...]
    logit_rows: list[int] = field(default_factory=list[int])  # [R] packed indices of the tokens that are sampled from
    samples: tuple[SampleRow, ...] = ()  # [R]


class SequenceTable:
    """Applies plans in order. A plan that cannot be is a RemoteProtocolError; the table is of no use afterwards."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._sequences: dict[SequenceId, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def apply(self, plan: StepPlan) -> PlannedRows:
        """Forget, register, append blocks, and give the step's rows. Raises RemoteProtocolError."""
        for sequence in plan.frees:
            if self._sequences.pop(sequence, None) is None:
                raise _bad(plan, f"it frees sequence {sequence}, which is not registered")
        for registration in plan.registers:
            self._sequences[registration.sequence] = SequenceState(registration)
        self._check_copies(plan)
        if len({row.sequence for row in plan.rows}) != len(plan.rows):
            raise _bad(plan, "it has two rows of one sequence")
        states = [self._advance(plan, row) for row in plan.rows]
        return _rows(plan, states)

    def _advance(self, plan: StepPlan, row: PlanRow) -> SequenceState:
        state = self._sequences.get(row.sequence)
        if state is None:
            raise _bad(plan, f"it has a row of sequence {row.sequence}, which is not registered")
        for run in row.new_blocks:
            self._append(plan, state, run)
        self._check_row(plan, row, state)
        state.end = row.position + row.num_tokens
        return state

    def _append(self, plan: StepPlan, state: SequenceState, run: BlockRun) -> None:
        if run.count < 1 or run.start + run.count > self._num_blocks:
            raise _bad(
                plan,
                f"it gives out blocks {run.start}-{run.start + run.count - 1}",
                f"there are {self._num_blocks} blocks",
            )
        last = state.runs[-1] if state.runs else None
        if last is not None and last.start + last.count == run.start:
            state.runs = (*state.runs[:-1], BlockRun(last.start, last.count + run.count))
        else:
            state.runs = (*state.runs, run)
        state.num_blocks += run.count

    def _check_row(self, plan: StepPlan, row: PlanRow, state: SequenceState) -> None:
        end, room = row.position + row.num_tokens, state.num_blocks * self._block_size
        if row.num_tokens < 1:
            raise _bad(plan, f"sequence {row.sequence} has a row without tokens")
        if end > room:
            raise _bad(plan, f"sequence {row.sequence} would have {end} tokens", f"its blocks hold {room}")
        if state.end is not None and row.position > state.end:
            raise _bad(
                plan, f"sequence {row.sequence} goes on at position {row.position}", f"its KV ends at {state.end}"
            )

    def _check_copies(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            if max(copy.source, copy.target) >= self._num_blocks:
                raise _bad(
                    plan, f"it copies block {copy.source} to {copy.target}", f"there are {self._num_blocks} blocks"
                )


def _rows(plan: StepPlan, states: list[SequenceState]) -> PlannedRows:
    rows: list[StepRow] = []
    logit_rows: list[int] = []
    samples: list[SampleRow] = []
    packed = 0
    for row, state in zip(plan.rows, states, strict=True):
        rows.append(StepRow(sequence=row.sequence, position=row.position, num_tokens=row.num_tokens, runs=state.runs))
        packed += row.num_tokens
        if row.sample:
            logit_rows.append(packed - 1)
            samples.append(_sample_row(plan, row, state.registration))
    return PlannedRows(rows=tuple(rows), logit_rows=logit_rows, samples=tuple(samples))


def _sample_row(plan: StepPlan, row: PlanRow, registration: Registration) -> SampleRow:
    position = row.position + row.num_tokens - registration.prompt_tokens
    if position < 0:
        raise _bad(
            plan,
            f"sequence {row.sequence} samples inside its prompt",
            f"the prompt has {registration.prompt_tokens} tokens",
        )
    return SampleRow(params=registration.sampling, choice=registration.choice, position=position)


def packed_indices(logit_rows: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """``[R]`` as backends take it."""
    return np.array(logit_rows, np.int32)


def _bad(plan: StepPlan, what: str, fact: str = "") -> RemoteProtocolError:
    return RemoteProtocolError(f"the plan of step {plan.step} cannot be followed: {what}", fact=fact)
