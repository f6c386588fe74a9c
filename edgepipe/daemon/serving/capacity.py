"""Conversions between the states that nodes report and the planner's values."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe.daemon.device.memory import uses_host_memory
from edgepipe.ids import NodeId
from edgepipe.model.facts import ModelConfig
from edgepipe.planner.placement import Need, NodeRoom, Placed
from edgepipe.wire.common import slices_to_wire
from edgepipe.wire.v1 import node_pb2 as pb

_PLACEMENT_KV_TOKENS = 512  # minimum of every stage; a stage takes more as memory allows


def placement_need(config: ModelConfig, context_length: int) -> Need:
    """Return the memory that a model's placement needs."""
    return Need(config=config, kv_tokens=min(_PLACEMENT_KV_TOKENS, context_length or config.context_length))


def rooms_of(node: pb.NodeState, dtype: str, *, own: str = "") -> Sequence[NodeRoom]:
    """Return the room on a node's device; empty while the device cannot compute.

    ``own`` names a running pipeline that is placed again: its reservations count as free, and a device in the state
    "starting" counts as ready.
    """
    if node.draining:
        return []
    unusable = ("failed",) if own else ("starting", "failed")
    rooms: list[NodeRoom] = []
    for device in [candidate for candidate in node.devices if candidate.state not in unusable][
        :1
    ]:  # until several join in one slice
        compute = dtype if dtype not in ("", "auto") else device.profile.compute_dtype
        size = 4 if compute == "float32" else 2
        held = sum(reservation.num_bytes for reservation in device.reserved if own and reservation.pipeline_id == own)
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
    """Group slices into one stage per node, in the order in which tokens first reach the nodes."""
    by_node: dict[NodeId, list[Placed]] = {}
    for piece in placed:
        by_node.setdefault(piece.node_id, []).append(piece)
    return [
        pb.StagePlacement(node_id=node_id, slices=slices_to_wire(piece.part for piece in parts))
        for node_id, parts in by_node.items()
    ]
