"""The planner's values from the states that nodes report, and placements from the planner's values."""

from __future__ import annotations

from collections.abc import Sequence

from edgepipe.backend.types import DEFAULT_SETTINGS, StageSettings
from edgepipe.daemon.device.memory import uses_host_memory
from edgepipe.errors import BackendUnavailable
from edgepipe.ids import NodeId
from edgepipe.planner.placement import Need, NodeRoom, Placed
from edgepipe.spec.facts import ModelConfig
from edgepipe.weights.weight_table import FLOATS, WeightTable
from edgepipe.wire.engines import StagePlacement
from edgepipe.wire.nodes import DeviceState, NodeState

_PLACEMENT_KV_TOKENS = 512  # minimum of every stage; a stage takes more as memory allows


def placement_need(config: ModelConfig, context_length: int, weights: WeightTable = FLOATS) -> Need:
    """Return the memory that a model's placement needs."""
    kv_tokens = min(_PLACEMENT_KV_TOKENS, context_length or config.context_length)
    return Need(config=config, kv_tokens=kv_tokens, weights=weights)


def usable_device(node: NodeState, *, own: frozenset[str] = frozenset()) -> DeviceState | None:
    """Return the node's device; None while it cannot compute. ``own``: as for ``rooms_of``."""
    unusable = ("failed",) if own else ("starting", "failed")
    return next((device for device in node.devices if device.state not in unusable), None)  # one device per node


def device_is_coming(node: NodeState) -> bool:
    """Return whether a node's device starts, or starts again after a crash: within seconds it may have room."""
    return not node.draining and any(
        device.state == "starting" or (device.state == "failed" and not isinstance(device.error, BackendUnavailable))
        for device in node.devices
    )


def rooms_of(
    node: NodeState, settings: StageSettings, *, states: bool = False, own: frozenset[str] = frozenset()
) -> Sequence[NodeRoom]:
    """Return the room on a node's device; empty while the device cannot compute, or not with these settings.

    ``states``: it must keep states of recurrent layers.
    ``own`` names running pipelines that are placed again: their reservations count as free, and a device in the state
    "starting" counts as ready.
    """
    device = usable_device(node, own=own)
    if node.draining or device is None or device.profile is None:
        return []
    if settings.kv and settings.kv not in device.profile.kv_forms:
        return []
    if states and not device.profile.keeps_states:
        return []
    size = 4 if settings.dtype_on(device.profile.compute_dtype) == "float32" else 2
    ours = [reservation for reservation in device.reserved if reservation.pipeline_id in own]
    held, beside = (sum(each) for each in ((r.num_bytes for r in ours), (r.ram_bytes for r in ours)))
    if not device.free_bytes + held:
        return []
    room = NodeRoom(
        node_id=node.node_id,
        name=node.name,
        free_bytes=device.free_bytes + held,
        bytes_per_weight=size,
        shares_host_memory=uses_host_memory(device.profile),
        packing=device.profile.packing,
        kv=settings.kv,
        most_slots=settings.most_slots,
        ram_bytes=device.ram_free_bytes + beside,
    )
    return [room]


def cannot_keep(node: NodeState, settings: StageSettings, *, states: bool) -> str:
    """Return what a node that can compute cannot keep, as a clause; empty if it can keep all, or cannot compute."""
    if not rooms_of(node, DEFAULT_SETTINGS):
        return ""
    if not rooms_of(node, settings):
        return f"cannot keep KV as {settings.kv}"
    if not rooms_of(node, settings, states=states):
        return "cannot keep states of recurrent layers: its backend does not compute them"
    return ""


def stages_of(placed: Sequence[Placed]) -> tuple[StagePlacement, ...]:
    """Group slices into one stage per node, in the order in which tokens first reach the nodes."""
    by_node: dict[NodeId, list[Placed]] = {}
    for piece in placed:
        by_node.setdefault(piece.node_id, []).append(piece)
    return tuple(
        StagePlacement(node_id=node_id, slices=tuple(piece.part for piece in pieces), ram_percent=pieces[0].ram_percent)
        for node_id, pieces in by_node.items()
    )
