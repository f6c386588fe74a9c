"""A modelled cluster: builds a ring and its limits from named devices, a model and one kind of link. PURE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import DeviceModel, adjusted, named_device
from edgepipe.backend.types import DEFAULT_BLOCK_SIZE
from edgepipe.errors import NoFeasiblePlacement, PlanInvalid
from edgepipe.planner.cluster import known_cluster
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.hosts import HOST_S
from edgepipe.planner.placement import Placed
from edgepipe.planner.plan import plan
from edgepipe.scheduler import SchedulerLimits
from edgepipe.simulation.ring import RingModel, RingStage
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.kv_forms import block_tokens
from edgepipe.spec.memory_classes import MOST_TOKENS, memory_classes
from edgepipe.units import LinkShape, format_bytes
from edgepipe.weights.weight_table import FLOATS, WeightTable

_BYTES_PER_VALUE = 2  # bf16, on links
_KV_SHARE = 0.9  # share of the memory that the weights leave free
_CONVERSATION_TOKENS = 4096  # a long chat; the placement reserves room for it
_READ_TOKENS = 1024  # tokens that a draft attends to


@dataclass(frozen=True, slots=True, kw_only=True)
class ImaginedCluster:
    """Description of a cluster to simulate."""

    devices: Sequence[str]  # keys of the device table
    config: ModelConfig
    link: LinkShape  # link between any two devices
    weights: WeightTable = FLOATS
    # Settings of all devices: {"jitter": "0.05"}.
    adjustments: Mapping[str, str] = field(default_factory=dict[str, str])
    plan: str = ""  # "a:0-15,b:16-31": placement by hand; devices are named a, b, c, ...
    slices: int = 1  # V, per device; interleaved if more than 1
    context_length: int = 0  # tokens; 0: the model's
    kv_tokens: int = 0  # 0: as many as fit
    kv: str = ""  # form of the KV, see ``ModelConfig.kv_bytes_per_token``; empty: bf16
    block_size: int = DEFAULT_BLOCK_SIZE  # tokens per KV block that the devices prefer
    max_running: int = 256
    host_s: float = HOST_S  # one small message, on each machine
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Imagined:
    """Input of a simulation."""

    ring: RingModel
    limits: SchedulerLimits
    row_bytes: int  # bytes of one token's activations on a link
    plan: str = ""  # the placement: "a:0-15,b:16-31"
    draft_s: float = 0.0  # time of a draft by the model's own layer; 0: it has none


def imagine(cluster: ImaginedCluster) -> Imagined:
    """Place the model with the planner. Raises NoFeasiblePlacement, PlanInvalid, ConfigInvalid."""
    known = known_cluster(
        cluster.devices,
        cluster.config,
        link=cluster.link,
        adjustments=cluster.adjustments,
        weights=cluster.weights,
        kv=cluster.kv,
    )
    known = replace(known, links=replace(known.links, assumed_host_s=cluster.host_s))
    keys = {str(machine.node_id): key for machine, key in zip(known.machines, cluster.devices, strict=True)}
    devices = {name: adjusted(named_device(key), cluster.adjustments) for name, key in keys.items()}
    constraints = Constraints(layers=cluster.plan) if cluster.plan else Constraints(num_nodes=len(devices))
    demand = _demand(cluster)
    found = plan(demand, known.machines, known.links, constraints, explain=False)
    if cluster.slices > 1:
        by_hand = Constraints(layers=_interleaved(found.placed, cluster.slices))
        found = plan(demand, known.machines, known.links, by_hand, explain=False)
    placed = found.placed
    parts = [
        (
            str(stage.node_id),
            stage.part,
            CostModel(cluster.config, devices[str(stage.node_id)], weights=cluster.weights, kv=cluster.kv),
        )
        for stage in placed
    ]
    row_bytes = cluster.config.hidden_size * _BYTES_PER_VALUE
    stages = [
        RingStage(
            name=f"{name} {keys[name]} {part.layers}",
            step_s=_step_s(cost, part, drafts=cluster.config.has_mtp and part.head),
            link=cluster.link if not part.head else LinkShape(one_way_s=cluster.link.one_way_s if part.index else 0.0),
            token_bytes=0 if part.head else row_bytes,
            jitter=devices[name].jitter,
            first_layer=part.layers.start,
            device=name,
            host_s=cluster.host_s,
        )
        for name, part, cost in parts
    ]
    return Imagined(
        ring=RingModel(stages=stages, seed=cluster.seed),
        limits=_limits(cluster, devices, parts, most_slots=found.most_slots),
        row_bytes=row_bytes,
        plan=",".join(f"{stage.node_id}:{stage.part.layers}" for stage in placed),
        draft_s=_draft_s(parts[-1][2], parts[-1][1]) if cluster.config.has_mtp else 0.0,
    )


def _step_s(cost: CostModel, part: Slice, *, drafts: bool) -> Callable[[StepWork], float]:
    """Return the time of steps on a slice. ``drafts``: its last layer predicts one token more.

    Such a layer computes prompts in their steps. Of decodes it runs behind a step, where drafts are wanted.
    """
    whole = cost.slice_cost(part)
    if not drafts:
        return whole.step_s
    if len(part.layers) == 1:
        decodes = cost.mean_cost(0, head=True)
    else:
        decodes = cost.slice_cost(replace(part, layers=LayerRange(part.layers.start, part.layers.end - 1)))
    return lambda work: (decodes if work.tokens == work.logit_rows else whole).step_s(work)


def _draft_s(cost: CostModel, part: Slice) -> float:
    """Return the time of one draft by the last layer of the slice with the head, which needs that head, too."""
    last = LayerRange(part.layers.end - 1, part.layers.end)
    return cost.slice_cost(replace(part, layers=last)).step_s(StepWork.of_rows([_READ_TOKENS], [1], logit_rows=1))


def _interleaved(placed: Sequence[Placed], slices: int) -> str:
    """Split each device's layers into V slices and interleave them. Raises PlanInvalid for too few layers."""
    parts: list[str] = []
    start = 0
    for turn in range(slices):
        for stage in placed:
            whole = len(stage.part.layers)
            count = whole * (turn + 1) // slices - whole * turn // slices
            if not count:
                raise PlanInvalid(
                    f"{whole} layers cannot be split into {slices} slices",
                    fact=f"device {stage.node_id} has no more layers of this model",
                    next_step="ask for fewer slices",
                )
            parts.append(f"{stage.node_id}:{start}-{start + count - 1}")
            start += count
    return ",".join(parts)


def _demand(cluster: ImaginedCluster) -> Demand:
    """Return a demand of many conversations, since a simulation runs under load."""
    return Demand(
        config=cluster.config,
        weights=cluster.weights,
        objective=Objective.THROUGHPUT,
        context_tokens=min(_CONVERSATION_TOKENS, cluster.config.context_for(cluster.context_length)),
    )


def _limits(
    cluster: ImaginedCluster,
    devices: Mapping[str, DeviceModel],
    parts: Sequence[tuple[str, Slice, CostModel]],
    *,
    most_slots: int,
) -> SchedulerLimits:
    """Use one number of blocks for all stages: the smallest stage's."""
    held = {name: (cost, [part for other, part, _ in parts if other == name]) for name, _, cost in parts}
    classes = memory_classes(cluster.config, cluster.kv)
    block_size = block_tokens(cluster.kv, cluster.block_size)
    num_blocks = min(
        classes.most_blocks(
            block_size * cost.kv_bytes_per_token(slices),
            [
                block_size * cost.kv_bytes_per_token(classes.layers(number, slices))
                for number in range(1, 1 + len(classes.windows))
            ],
            state_bytes=cluster.config.state_bytes(layer for part in slices for layer in part.layers),
            block_size=block_size,
            room_bytes=(devices[name].usable_bytes - cost.weight_bytes(slices)) * _KV_SHARE,
            wanted=-(-((cluster.kv_tokens or MOST_TOKENS) + classes.rest_tokens) // block_size),
            most_slots=most_slots,
        )
        for name, (cost, slices) in held.items()
    )
    if num_blocks < 1:
        raise NoFeasiblePlacement(
            "no room is left for a KV cache",
            fact=f"the smallest device has {format_bytes(min(device.usable_bytes for device in devices.values()))}",
            next_step="name more devices, larger ones, or a smaller model",
        )
    return SchedulerLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        context_length=cluster.config.context_for(cluster.context_length),
        micro_batches=len(held),
        max_running=cluster.max_running,
        windows=classes.pools(num_blocks=num_blocks, block_size=block_size),
        states=classes.states(num_blocks=num_blocks, block_size=block_size, most=most_slots),
        rest_tokens=classes.rest_tokens,
    )
