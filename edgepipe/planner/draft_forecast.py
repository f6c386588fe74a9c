"""What a draft model would bring to one chat on a plan, by the rule with which engines choose windows. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.planner.cluster import Cluster
from edgepipe.planner.forecast import Ring
from edgepipe.planner.plan import Plan
from edgepipe.scheduler.drafting import Drafting

RIGHT = 0.7
"""Assumed share of drafts that are right. Texts differ: quotes have more, new prose may have half as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftForecast:
    """A draft model beside the head, and one chat that uses it."""

    machine: str  # name of the machine that holds it
    num_bytes: int  # its memory there, KV included
    draft_s: float  # time of one draft
    right: float  # assumed share of drafts that are right
    count: int  # drafts of a turn that give most; 0: none would pay
    factor: float  # tokens per second over those without drafts
    tokens_per_s: float


def draft_forecast(found: Plan, cluster: Cluster) -> DraftForecast | None:
    """Forecast one chat with the plan's draft model; None without one."""
    need = found.demand.weights.draft
    if need is None:
        return None
    ring = Ring(found.demand, found.placed, {machine.node_id: machine for machine in cluster.machines}, cluster.links)
    machine = next(stage.machine for stage in found.stages if stage.part.head)
    draft_s = machine.speed.token_s(need.config, need.weights, context_tokens=found.demand.read_tokens)
    drafting = Drafting(lambda rows: ring.of(1, rows).turn_s, lambda: draft_s)
    count, factor = drafting.forecast(RIGHT)
    return DraftForecast(
        machine=machine.name,
        num_bytes=machine.room.sizes(found.demand.config, found.demand.weights).draft_model,
        draft_s=draft_s,
        right=RIGHT,
        count=count,
        factor=factor,
        tokens_per_s=found.single.tokens_per_s * factor,
    )
