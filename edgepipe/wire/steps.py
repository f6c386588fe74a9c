"""Convert a scheduled step for the stages: columns to columns, because it runs between every two steps."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe.backend.types import RowState
from edgepipe.scheduler import ScheduledStep
from edgepipe.wire.v1 import common_pb2, stage_pb2


def step_to_wire(
    step: ScheduledStep,
    *,
    epoch: common_pb2.Epoch,
    last_slice: int,
    with_token_ids: bool,
) -> stage_pb2.Plan:
    """Convert a step for one stage."""
    plan = stage_pb2.Plan(
        epoch=epoch,
        step=step.step,
        last_slice=last_slice,
        sequence=step.sequences,
        position=step.positions,
        num_tokens=step.num_tokens,
        sample=step.samples,
        after=step.after or 0,
        home=step.home,
        lot=step.lot,
        assumed=step.assumed,
    )
    if with_token_ids and step.after is None:
        plan.token_ids.extend(step.token_ids)
    if step.block_rows:
        plan.block_row.extend(step.block_rows)
        plan.block_start.extend(step.block_starts)
        plan.block_count.extend(step.block_counts)
    if step.drafts:
        plan.draft.extend(step.drafts)
    if step.states:
        _add_states(plan, step.states)
    if step.keys:
        plan.key_class.extend([key.number for key in step.keys])
        plan.key_place.extend([key.place for key in step.keys])
        plan.keys = b"".join([key.key for key in step.keys])
    if step.registers or step.frees or step.windows or step.moves or step.copies:
        _add_changes(plan, step)
    return plan


def _add_states(plan: stage_pb2.Plan, states: Sequence[RowState]) -> None:
    plan.state_read.extend([0 if state.read is None else 1 + state.read for state in states])
    plan.state_row.extend([row for row, state in enumerate(states) for _ in state.writes])
    plan.state_after.extend([write.after for state in states for write in state.writes])
    plan.state_slot.extend([write.slot for state in states for write in state.writes])


def _add_changes(plan: stage_pb2.Plan, step: ScheduledStep) -> None:
    """Add what few steps have: sequences that begin or end, blocks of windows, copies."""
    plan.registers.extend(step.registers)
    plan.frees.extend(step.frees)
    for blocks in step.windows:
        plan.windows.add(row=blocks.rows, place=blocks.places, start=blocks.starts, count=blocks.counts)
    plan.move_class.extend([move.number for move in step.moves])
    plan.move_place.extend([move.place for move in step.moves])
    plan.move_kept.extend([move.kept for move in step.moves])
    plan.move_out.extend([move.out for move in step.moves])
    plan.move_keys = b"".join([move.key for move in step.moves])
    for copy in step.copies:
        plan.copies.add(source=copy.source, target=copy.target)
