"""Checks of a step's plan against the pipeline. PURE."""

from __future__ import annotations

from edgepipe.errors import RemoteProtocolError
from edgepipe.stage.sequences import PlannedRows
from edgepipe.wire.pipelines import PipelineSpec
from edgepipe.wire.plans import StepPlan


def check_plan(plan: StepPlan, rows: PlannedRows, spec: PipelineSpec, *, vocab_size: int) -> None:
    """Raise RemoteProtocolError if the stage cannot compute what the plan says."""
    last = next((part for part in spec.slices if part.index == plan.last_slice), None)
    embeds = any(part.embedding for part in spec.slices)
    problem = ""
    if plan.last_slice >= spec.num_slices:
        problem = f"it ends at slice {plan.last_slice} of {spec.num_slices}"
    elif last is not None and rows.logit_rows and not last.head:
        problem = f"it samples at slice {plan.last_slice}, which has no head"
    elif plan.after is not None and (plan.after >= plan.step or plan.is_bulk):
        problem = f"it has {plan.num_tokens} tokens in {len(plan.rows)} rows and follows step {plan.after}"
    elif (plan.assumed or plan.lot) and (plan.after is not None or plan.is_bulk or plan.home):
        problem = "its rows assume drafts, and it has prompts, or tokens of another step"
    elif plan.rows and embeds and len(plan.token_ids) != (0 if plan.after else plan.num_tokens):
        problem = f"it has {len(plan.token_ids)} token ids for {plan.num_tokens} tokens"
    elif plan.home and (plan.last_slice + 1 < spec.num_slices or not rows.logit_rows):
        problem = "it sends tokens home and samples none"
    elif (highest := max(plan.token_ids, default=0)) >= vocab_size:
        problem = f"it has token id {highest}; ids go from 0 to {vocab_size - 1}"
    elif (plan.copies or plan.moves) and not plan.rows:
        problem = "it copies blocks and has no rows"
    if problem:
        raise RemoteProtocolError(f"the plan of step {plan.step} is invalid: {problem}")
