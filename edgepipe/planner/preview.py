"""A plan as data, for the command line's drawing, ``--json`` and the wizard. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgepipe.errors import NoFeasiblePlacement
from edgepipe.planner.cluster import Cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand
from edgepipe.planner.draft_forecast import DraftForecast, draft_forecast
from edgepipe.planner.forecast import Hop, PromptForecast, Ring
from edgepipe.planner.plan import Plan, PlannedStage, plan
from edgepipe.planner.profiles import ESTIMATED, MEASURED, Links, Machine
from edgepipe.planner.shortage import Shortage
from edgepipe.planner.what_if import Alternative, alternatives, helps
from edgepipe.scheduler.pacing import DEFAULT_ITL_GOAL, parse_itl_goal
from edgepipe.spec.expert_places import AUTO
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.layout import slice_parameters
from edgepipe.spec.memory_classes import AUTO_TIER_PARTS, most_within, state_slots
from edgepipe.units import format_bytes
from edgepipe.weights.mixes import named_model
from edgepipe.weights.resident import WIDE, slice_bytes

LONG_PROMPT_TOKENS = 16384
"""A document, or what a coding agent sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompt:
    """A long prompt on a plan's ring."""

    alone: PromptForecast
    beside: PromptForecast  # prompt beside as many chats as ``Plan.many``, within the default ITL goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A plan with the plans that it is compared to."""

    model: str
    plan: Plan
    long_prompt: LongPrompt | None = None  # None: the context or the KV room is too short
    alternatives: tuple[Alternative, ...] = ()
    helps: tuple[Alternative, ...] = ()
    drafts: DraftForecast | None = None  # None: the plan counts nothing that drafts
    changed: Plan | None = None  # the same cluster with ``--what-if``
    changes: str = ""
    note: str = ""  # note on a wish that changes nothing, for people
    without: str = ""  # why the model does not fit without the changes; ``plan`` then includes them


def preview(demand: Demand, cluster: Cluster, constraints: Constraints, *, compare: bool = True) -> Preview:
    """Make a plan and compare it with others. Raises the errors of ``plan``."""
    found = plan(demand, cluster.machines, cluster.links, constraints)
    wanted = constraints.experts_in_ram
    idle = wanted not in ("", AUTO) and not any(stage.ram_bytes for stage in found.stages)
    return Preview(
        model=cluster.model,
        plan=found,
        long_prompt=_long_prompt(found, cluster),
        drafts=draft_forecast(found, cluster),
        note="no experts in RAM: every device holds its layers" if idle else "",
        alternatives=tuple(alternatives(demand, cluster, found, constraints)) if compare else (),
        helps=tuple(helps(demand, cluster, found, constraints)) if compare and not constraints.layers else (),
    )


def _long_prompt(found: Plan, cluster: Cluster) -> LongPrompt | None:
    if min(found.demand.config.context_length, found.kv_tokens) <= LONG_PROMPT_TOKENS:
        return None
    machines = {machine.node_id: machine for machine in cluster.machines}
    ring = Ring(found.demand, found.placed, machines, cluster.links)
    goal_s = parse_itl_goal(DEFAULT_ITL_GOAL)
    return LongPrompt(
        alone=ring.prompt(LONG_PROMPT_TOKENS),
        beside=ring.prompt(LONG_PROMPT_TOKENS, beside=found.many, goal_s=goal_s),
    )


def preview_as_dict(shown: Preview) -> dict[str, Any]:
    """Convert a preview to plain values; seconds, bytes and tokens as numbers."""
    return {
        "model": shown.model,
        "note": shown.note,
        **plan_as_dict(shown.plan),
        "long_prompt": None
        if shown.long_prompt is None
        else {"alone": asdict(shown.long_prompt.alone), "beside_many_chats": asdict(shown.long_prompt.beside)},
        "drafts": None if shown.drafts is None else asdict(shown.drafts),
        "alternatives": [
            {"what": option.what, "why_not": option.why_not, **_rates(option.plan)} for option in shown.alternatives
        ],
        "helps": [
            {"what": option.what, "gain": round(option.gain_over(shown.plan), 4), **_rates(option.plan)}
            for option in shown.helps
        ],
        "what_if": None if shown.changed is None else {"changes": shown.changes, **plan_as_dict(shown.changed)},
        "fits_only_with": {"changes": shown.changes, "without": shown.without} if shown.without else None,
    }


DISK_BYTES = 100 * 10**9
"""A plan says what so much of each stage's disk holds: how much is free there is not known before."""


def plan_as_dict(found: Plan) -> dict[str, Any]:
    """Convert a plan to plain values."""
    demand, many = found.demand, found.many
    slots = state_slots(demand.config, found.kv_tokens, most_slots=found.most_slots)
    return {
        "objective": demand.objective.value,
        "concurrency": demand.concurrency,
        "context_tokens": demand.context_tokens,
        "plan": plan_text(found),
        "engine": str(found.engine),
        "stages": [_stage_as_dict(found, index) for index in range(len(found.stages))],
        "links": [_hop_as_dict(found, index, hop) for index, hop in enumerate(found.single.hops)],
        "left_out": [{"node": unused.machine.name, "reason": unused.reason} for unused in found.left_out],
        "experts_in_ram": experts_text(found),
        "kv_tokens": found.kv_tokens,
        "host_kv_tokens": host_kv_tokens(found),
        "disk_kv_tokens": disk_kv_tokens(found, num_bytes=DISK_BYTES),
        "state_slots": slots.num_slots if slots is not None else 0,
        "state_bytes": demand.config.state_bytes(),
        "micro_batches": many.micro_batches,
        "bottleneck": many.bottleneck,
        "token_s": found.single.turn_s,
        "first_token_s": found.prompt.first_token_s,
        "first_token_prompt_tokens": found.prompt.prompt_tokens,
        "gap": found.gap,
        "source": MEASURED if found.measured else ESTIMATED,
        **_rates(found),
    }


def host_kv_tokens(found: Plan) -> int:
    """Return the tokens of idle conversations that ``--kv-ram auto`` keeps in host memory; 0: a stage has none."""
    stages = found.stages
    if not all(stage.machine.room.ram_bytes for stage in stages):
        return 0
    free = [max(0, stage.machine.room.ram_bytes - stage.ram_bytes) // AUTO_TIER_PARTS for stage in stages]
    return min([_idle_tokens(found, stage, each) for stage, each in zip(stages, free, strict=True)], default=0)


def disk_kv_tokens(found: Plan, *, num_bytes: int) -> int:
    """Return the tokens of idle conversations for which ``--kv-disk`` with so many bytes has room."""
    return min([_idle_tokens(found, stage, num_bytes) for stage in found.stages], default=0)


def _idle_tokens(found: Plan, stage: PlannedStage, num_bytes: int) -> int:
    room = replace(stage.machine.room, most_slots=0)
    return most_within(num_bytes, lambda count: room.kv_bytes(found.demand.config, stage.part.layers, count))


def plan_text(found: Plan) -> str:
    """Return the placement in the syntax of ``--plan``."""
    return ",".join(f"{stage.machine.name}:{stage.part.layers}" for stage in found.stages)


def experts_text(found: Plan) -> str:
    """Describe the experts in host memory, their size and the speed with and without; empty if the plan has none."""
    places = [
        f"{stage.machine.room.ram_percent} % of the experts in RAM of {stage.machine.name}, "
        f"{format_bytes(stage.ram_bytes)}"
        for stage in found.stages
        if stage.ram_bytes
    ]
    if not places:
        return ""
    text = f"{'; '.join(places)}: {found.tokens_per_s:.1f} tok/s"
    if (without := found.without_ram) is None:
        return text
    if without.tokens_per_s:
        return f"{text}; without: {without.tokens_per_s:.1f} tok/s"
    short = f"by {format_bytes(without.missing_bytes)}" if without.missing_bytes else "between layers"
    return f"{text}; without: does not fit {short}"


def shortage_as_dict(short: Shortage) -> dict[str, Any]:
    """Convert the arithmetic of a model that does not fit to plain values."""
    return {
        "needed_bytes": short.needed_bytes,
        "weight_bytes": short.weight_bytes,
        "kv_bytes": short.kv_bytes,
        "kv_tokens": short.kv_tokens,
        "free_bytes": short.free_bytes,
        "missing_bytes": short.missing_bytes,
        "machines": [{"node": name, "free_bytes": size} for name, size in short.rooms],
        "helps": [
            {"what": option.what, "gain_bytes": option.gain_bytes, "enough": option.enough} for option in short.helps
        ],
    }


def busy_fraction(found: Plan, index: int) -> float:
    """Return the busy fraction of a slice's device with the requested number of chats."""
    many = found.many
    cycle_s = max(many.micro_batches * many.server_s, many.turn_s)
    return many.micro_batches * many.step_s[index] / cycle_s if cycle_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """A well-known model on a cluster."""

    model: str
    num_parameters: int
    weight_bytes: int  # size on the machine where the weights take most
    plan: Plan | None  # None: the model does not fit


def which_fit(machines_for: Sequence[tuple[str, Sequence[Machine]]], links: Links) -> list[ModelFit]:
    """Return for each model whether it fits and how fast it would be. The machines' speeds depend on the model.

    The models with most parameters come first; those that do not fit come last.
    """
    fits = [_fit(model, machines, links) for model, machines in machines_for]
    return sorted(fits, key=lambda fit: (fit.plan is None, -fit.num_parameters))


def _fit(model: str, machines: Sequence[Machine], links: Links) -> ModelFit:
    config, weights = named_model(model)
    demand = Demand(config=config, weights=weights)
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    sizes = [machine.room.sizes(config, weights).of_slice(whole) for machine in machines]
    try:
        found = plan(demand, machines, links, explain=False)
    except NoFeasiblePlacement:
        found = None
    return ModelFit(
        model=model,
        num_parameters=slice_parameters(config, whole),
        weight_bytes=max(sizes, default=slice_bytes(config, weights, whole, kind=WIDE, dtype="bfloat16")),
        plan=found,
    )


def _rates(found: Plan | None) -> dict[str, Any]:
    if found is None:
        return {"one_chat_tokens_per_s": None, "many_chats_tokens_per_s": None, "many_chats": None}
    return {
        "one_chat_tokens_per_s": round(found.single.tokens_per_s, 3),
        "many_chats_tokens_per_s": round(found.many.tokens_per_s, 3),
        "many_chats": found.many.sequences,
    }


def _stage_as_dict(found: Plan, index: int) -> dict[str, Any]:
    stage: PlannedStage = found.stages[index]
    return {
        "node": stage.machine.name,
        "node_id": str(stage.machine.node_id),
        "device": stage.machine.device,
        "layers": str(stage.part.layers),
        "weight_bytes": stage.weight_bytes,
        "kv_bytes": stage.kv_bytes,
        "ram_percent": stage.machine.room.ram_percent,
        "ram_bytes": stage.ram_bytes,
        "free_bytes": stage.machine.room.free_bytes,
        "step_s": stage.step_s,
        "alone_s": stage.alone_s,
        "busy": round(busy_fraction(found, index), 4),
        "source": stage.machine.speed.source,
        "measured_at": stage.machine.speed.measured_s or None,
        "measured_busy": stage.machine.speed.busy,
    }


def _hop_as_dict(found: Plan, index: int, hop: Hop) -> dict[str, Any]:
    shape = hop.link.shape
    return {
        "from": found.stages[index].machine.name,
        "to": found.stages[index + 1].machine.name,
        "one_way_s": shape.one_way_s,
        "bytes_per_s": None if shape.bytes_per_s == float("inf") else shape.bytes_per_s,
        "upload_s": found.many.hops[index].upload_s,
        "source": MEASURED if hop.link.measured else ESTIMATED,
    }
