"""A scheduled step on its way to the stages: columns to columns, since this runs between every two steps."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe.scheduler import ScheduledStep
from edgepipe.wire.plans import Registration, registration_to_wire
from edgepipe.wire.v1 import common_pb2, stage_pb2


def step_to_wire(
    step: ScheduledStep,
    *,
    epoch: common_pb2.Epoch,
    last_slice: int,
    registrations: Sequence[Registration],
    with_token_ids: bool,
    with_sampling: bool,
) -> stage_pb2.ControlMessage:
    """A step for one stage; one registration per ``step.registers``.

    Only the stage that embeds gets the token ids, and only the one with the head how to sample.
    """
    return stage_pb2.ControlMessage(
        plan=stage_pb2.Plan(
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
            token_ids=step.token_ids if with_token_ids else (),
            registers=[registration_to_wire(each, with_sampling=with_sampling) for each in registrations],
            frees=step.frees,
            copies=[stage_pb2.BlockCopy(source=copy.source, target=copy.target) for copy in step.copies],
        )
    )
