"""An imagined cluster: named devices, a named model and one kind of link become a ring and its limits. PURE."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import DeviceModel, adjusted, named_device
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.ids import NodeId
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.planner.placement import Need, NodeRoom, Placed, place, place_by_plan
from edgepipe.planner.ring import RingModel, RingStage
from edgepipe.scheduler import SchedulerLimits
from edgepipe.units import LinkShape, format_bytes

_BYTES_PER_VALUE = 2  # bf16, of weights, of KV and on links
_HEADROOM_BYTES = 600 << 20  # what a node leaves free on a GPU: workspaces, a desktop's compositor
_KV_SHARE = 0.9  # of what is free beside the weights
_LEAST_KV_TOKENS = 512  # that every stage must be able to keep for a placement to count


@dataclass(frozen=True, slots=True, kw_only=True)
class ImaginedCluster:
    """What somebody would like to know about."""

    devices: Sequence[str]  # keys of the device table
    config: ModelConfig
    link: LinkShape  # between any two devices
    adjustments: Mapping[str, str] = field(default_factory=dict[str, str])  # of all devices: {"jitter": "0.05"}
    plan: str = ""  # "a:0-15,b:16-31": layers by hand; devices are named a, b, c, ...
    context_length: int = 0  # tokens; 0: the model's
    kv_tokens: int = 0  # 0: what fits
    block_size: int = 16
    max_running: int = 256
    turn_s: float = 0.001  # sampling, one message to the engine, its step of scheduling
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Imagined:
    """Ready to be simulated."""

    ring: RingModel
    limits: SchedulerLimits
    row_bytes: int  # of one token's activations on a link
    tile_edges: tuple[int, ...]  # tokens above which a step takes clearly longer somewhere
    link_cap_tokens: int | None = None  # what the slowest link uploads while the slowest device computes a decode step


def imagine(cluster: ImaginedCluster) -> Imagined:
    """Place the model as nodes would. Raises NoFeasiblePlacement, PlanInvalid, ConfigInvalid."""
    devices = {
        name: adjusted(named_device(key), cluster.adjustments)
        for name, key in zip(_names(len(cluster.devices)), cluster.devices, strict=True)
    }
    placed = _place(cluster, devices)
    parts = [(str(one.node_id), one.part, CostModel(cluster.config, devices[str(one.node_id)])) for one in placed]
    row_bytes = cluster.config.hidden_size * _BYTES_PER_VALUE
    keys = dict(zip(devices, cluster.devices, strict=True))
    stages = [
        RingStage(
            name=f"{name} {keys[name]} {part.layers}",
            step_s=cost.slice_cost(part).step_s,
            link=cluster.link if not part.head else LinkShape(one_way_s=cluster.link.one_way_s if part.index else 0.0),
            token_bytes=0 if part.head else row_bytes,
            jitter=devices[name].jitter,
            first_layer=part.layers.start,
        )
        for name, part, cost in parts
    ]
    return Imagined(
        ring=RingModel(stages=stages, turn_s=cluster.turn_s, seed=cluster.seed),
        limits=_limits(cluster, devices, parts),
        row_bytes=row_bytes,
        tile_edges=tuple(sorted({first - 1 for one in devices.values() for first, _ in one.tile_steps})),
        link_cap_tokens=_link_cap_tokens(stages),
    )


def _link_cap_tokens(stages: Sequence[RingStage]) -> int | None:
    step_s = max(stage.step_s(StepWork.of_rows([0], [1], logit_rows=1)) for stage in stages)
    token_s = max((stage.link.upload_s(stage.token_bytes) for stage in stages[:-1]), default=0.0)
    return int(step_s / token_s) if token_s else None


def _names(count: int) -> list[str]:
    """a, b, ..., z, aa, ab, ..."""
    letters = string.ascii_lowercase
    return [letters[i] if i < 26 else letters[i // 26 - 1] + letters[i % 26] for i in range(count)]


def _place(cluster: ImaginedCluster, devices: Mapping[str, DeviceModel]) -> Sequence[Placed]:
    rooms = [
        NodeRoom(
            node_id=NodeId(name),
            name=name,
            free_bytes=_free_bytes(device),
            bytes_per_weight=_BYTES_PER_VALUE,
            bytes_per_kv=_BYTES_PER_VALUE,
        )
        for name, device in devices.items()
    ]
    need = Need(config=cluster.config, kv_tokens=min(_LEAST_KV_TOKENS, _context(cluster)))
    if cluster.plan:
        return place_by_plan(need, rooms, cluster.plan)
    return place(need, rooms, num_nodes=len(rooms))


def _limits(
    cluster: ImaginedCluster, devices: Mapping[str, DeviceModel], parts: Sequence[tuple[str, Slice, CostModel]]
) -> SchedulerLimits:
    """One number of blocks for all stages: what the smallest can hold."""
    room = min(
        (_free_bytes(devices[name]) - cost.weight_bytes([part])) * _KV_SHARE / cost.kv_bytes_per_token([part])
        for name, part, cost in parts
    )
    tokens = min(room, cluster.kv_tokens) if cluster.kv_tokens else room
    num_blocks = int(tokens) // cluster.block_size
    if num_blocks < 1:
        raise NoFeasiblePlacement(
            "no room is left for a KV cache",
            fact=f"the smallest device has {format_bytes(min(_free_bytes(one) for one in devices.values()))}",
            next_step="name more devices, larger ones, or a smaller model",
        )
    return SchedulerLimits(
        num_blocks=num_blocks,
        block_size=cluster.block_size,
        context_length=_context(cluster),
        micro_batches=len(parts),
        max_running=cluster.max_running,
    )


def _context(cluster: ImaginedCluster) -> int:
    whole = cluster.config.context_length
    return min(cluster.context_length, whole) if cluster.context_length else whole


def _free_bytes(device: DeviceModel) -> int:
    return device.memory_bytes - min(_HEADROOM_BYTES, device.memory_bytes // 10)
