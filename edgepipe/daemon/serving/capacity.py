"""From what nodes tell to what the planner takes, and back."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe.daemon.device.memory import uses_host_memory
from edgepipe.ids import NodeId
from edgepipe.model.facts import ModelConfig
from edgepipe.planner.placement import Need, NodeRoom, Placed
from edgepipe.wire.common import slices_to_wire
from edgepipe.wire.v1 import node_pb2 as pb

_PLACEMENT_KV_TOKENS = 512  # that every stage must hold at the least; more is taken as memory allows


def placement_need(config: ModelConfig, context_length: int) -> Need:
    """What of a model is to be placed."""
    return Need(config=config, kv_tokens=min(_PLACEMENT_KV_TOKENS, context_length or config.context_length))


def rooms_of(node: pb.NodeState, dtype: str, *, own: str = "") -> Sequence[NodeRoom]:
    """What a node's device offers; nothing while it cannot compute.

    ``own`` names a running pipeline that is placed again: what it holds counts as free, and a device that merely starts
    another process is as good as one that has.
    """
    if node.draining:
        return []
    unusable = ("failed",) if own else ("starting", "failed")
    rooms: list[NodeRoom] = []
    for device in [one for one in node.devices if one.state not in unusable][:1]:  # until several join in one slice
        compute = dtype if dtype not in ("", "auto") else device.profile.compute_dtype
        size = 4 if compute == "float32" else 2
        held = sum(one.num_bytes for one in device.reserved if own and one.pipeline_id == own)
        if device.free_bytes + held:
            rooms.append(
                NodeRoom(
                    node_id=NodeId(node.node_id),
                    name=node.name,
                    free_bytes=device.free_bytes + held,
                    bytes_per_weight=size,
                    bytes_per_kv=size,
                    shares_host_memory=uses_host_memory(device.profile),
                )
            )
    return rooms


def stages_of(placed: Sequence[Placed]) -> list[pb.StagePlacement]:
    """One stage per node, in the order in which tokens first reach them."""
    by_node: dict[NodeId, list[Placed]] = {}
    for one in placed:
        by_node.setdefault(one.node_id, []).append(one)
    return [
        pb.StagePlacement(node_id=node_id, slices=slices_to_wire(one.part for one in parts))
        for node_id, parts in by_node.items()
    ]
