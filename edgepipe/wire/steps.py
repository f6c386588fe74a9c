"""Convert a scheduled step for the stages: columns to columns, because it runs between every two steps."""

from __future__ import annotations

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
    return stage_pb2.Plan(
        epoch=epoch,
        step=step.step,
        last_slice=last_slice,
        sequence=step.sequences,
        position=step.positions,
        num_tokens=step.num_tokens,
        sample=step.samples,
        block_row=step.block_rows,
        block_start=step.block_starts,
        block_count=step.block_counts,
        token_ids=step.token_ids if with_token_ids and step.after is None else (),
        after=step.after or 0,
        home=step.home,
        registers=step.registers,
        frees=step.frees,
        windows=[
            stage_pb2.WindowBlocks(row=blocks.rows, place=blocks.places, start=blocks.starts, count=blocks.counts)
            for blocks in step.windows
        ],
        state_read=[0 if state.read is None else 1 + state.read for state in step.states],
        draft=step.drafts,
        state_row=[row for row, state in enumerate(step.states) for _ in state.writes],
        state_after=[write.after for state in step.states for write in state.writes],
        state_slot=[write.slot for state in step.states for write in state.writes],
        move_class=[move.number for move in step.moves],
        move_place=[move.place for move in step.moves],
        move_kept=[move.kept for move in step.moves],
        move_out=[move.out for move in step.moves],
        copies=[stage_pb2.BlockCopy(source=copy.source, target=copy.target) for copy in step.copies],
    )
