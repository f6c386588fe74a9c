"""What drafts would bring to one chat on a plan, by the rule with which engines choose windows. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from edgepipe.backend.cost import StepWork
from edgepipe.backend.drafting import MTP_RIGHT, RIGHT
from edgepipe.planner.cluster import Cluster
from edgepipe.planner.forecast import Ring
from edgepipe.planner.plan import Plan
from edgepipe.planner.profiles import Machine
from edgepipe.scheduler.drafting import Drafting
from edgepipe.scheduler.flights import windows_may_fly


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftForecast:
    """What drafts beside the head, and one chat that uses it."""

    source: str  # "model": a draft model; "mtp": the model's own layer
    machine: str  # name of the machine that holds it
    num_bytes: int  # its memory there; with KV for a draft model, whose KV is not the plan's
    draft_s: float  # time of one draft
    right: tuple[float, ...]  # assumed share of right drafts by place, see ``RightByPlace``
    count: int  # drafts of a window that give most; 0: none would pay
    in_flight: int  # windows that follow one another in flight
    factor: float  # tokens per second over those without drafts
    tokens_per_s: float


def draft_forecast(found: Plan, cluster: Cluster) -> DraftForecast | None:
    """Forecast one chat with the plan's draft model, or else with the model's own layer; None without both."""
    demand = found.demand
    if demand.weights.draft is None and not demand.config.has_mtp:
        return None
    source, right = ("mtp", MTP_RIGHT) if demand.weights.draft is None else ("model", RIGHT)
    stage = next(stage for stage in found.stages if stage.part.head)
    sizes = stage.machine.room.sizes(demand.config, demand.weights)
    draft_s = _draft_s(found, stage.machine)
    ring = Ring(demand, found.placed, {machine.node_id: machine for machine in cluster.machines}, cluster.links)
    drafting = Drafting(
        lambda rows: ring.of(1, rows).turn_s,
        lambda: draft_s,
        (lambda rows: ring.of(1, rows).server_s) if source == "model" and _may_fly(found) else None,
    )
    outlook = drafting.forecast(right.by_place)
    return DraftForecast(
        source=source,
        machine=stage.machine.name,
        num_bytes=sizes.draft_model or sizes.of_mtp(stage.part),
        draft_s=draft_s,
        right=right.shares,
        count=outlook.drafts,
        in_flight=outlook.in_flight,
        factor=outlook.factor,
        tokens_per_s=found.single.tokens_per_s * outlook.factor,
    )


def _may_fly(found: Plan) -> bool:
    """Return whether windows of drafts may follow one another in flight on the plan's stages."""
    recurrent = any(layer.recurrent is not None for layer in found.demand.config.layers)
    rest_tokens = max(stage.machine.room.rest_tokens for stage in found.stages)
    return windows_may_fly(recurrent=recurrent, rest_tokens=rest_tokens)


def _draft_s(found: Plan, machine: Machine) -> float:
    """Return the time of one draft on the machine with the head. The model's own layer needs that head, too."""
    demand = found.demand
    if (need := demand.weights.draft) is not None:
        return machine.speed.token_s(need.config, need.weights, context_tokens=demand.read_tokens)
    parts = machine.speed.parts(StepWork.of_rows([demand.read_tokens], [1], logit_rows=1))
    return parts.base_s + float(parts.layer_s[-1]) + parts.head_s
