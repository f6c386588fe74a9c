"""The plan of a step as it travels: the engine's scheduler writes its columns itself, tests begin with a value."""

from __future__ import annotations

from edgepipe.wire.common import epoch_to_wire
from edgepipe.wire.plans import StepPlan
from edgepipe.wire.v1 import stage_pb2


def plan_to_wire(plan: StepPlan, *, with_token_ids: bool) -> stage_pb2.Plan:
    """Convert a plan for one stage; only the stage that embeds gets the token ids."""
    blocks = [(index, run) for index, row in enumerate(plan.rows) for run in row.new_blocks]
    return stage_pb2.Plan(
        epoch=epoch_to_wire(plan.epoch),
        step=plan.step,
        last_slice=plan.last_slice,
        sequence=[row.sequence for row in plan.rows],
        position=[row.position for row in plan.rows],
        num_tokens=[row.num_tokens for row in plan.rows],
        sample=[row.sample for row in plan.rows],
        draft=[row.draft for row in plan.rows],
        block_row=[index for index, _ in blocks],
        block_start=[run.start for _, run in blocks],
        block_count=[run.count for _, run in blocks],
        token_ids=plan.token_ids if with_token_ids else (),
        after=plan.after or 0,
        home=plan.home,
        lot=plan.lot,
        assumed=plan.assumed,
        registers=plan.registers,
        frees=plan.frees,
        copies=[stage_pb2.BlockCopy(source=copy.source, target=copy.target) for copy in plan.copies],
        move_class=[move.number for move in plan.moves],
        move_place=[move.place for move in plan.moves],
        move_kept=[move.kept for move in plan.moves],
        move_out=[move.out for move in plan.moves],
        move_keys=b"".join([move.key for move in plan.moves]),
    )
