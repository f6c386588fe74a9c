"""Replace lost stages by new nodes while the other stages stay. PURE."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from edgepipe.ids import NodeId
from edgepipe.planner.placement import Need, NodeRoom, Placed, stage_bytes
from edgepipe.spec.facts import Slice


def replace_lost(
    need: Need,
    standing: Sequence[Placed],
    rooms: Sequence[NodeRoom],
    *,
    fetch_bytes: Callable[[NodeId, Sequence[Slice]], int],
    broken: Collection[tuple[NodeId, NodeId]] = (),
) -> tuple[Placed, ...] | None:
    """Place each lost stage whole on a node without a stage. Returns None if there are too few such nodes.

    standing     the former placement; a stage is lost if its node is not among ``rooms``
    rooms        the reachable nodes; the memory of a stage that stays counts as free
    fetch_bytes  returns the bytes of slices that a node must first fetch
    broken       unusable links; returns None if the placement would need one of them
    returns      the placement in the order of ``standing``

    The largest stage is placed first. Nodes that fetch less are preferred, then those with more room.
    """
    rooms_by_id = {room.node_id: room for room in rooms}
    lost: dict[NodeId, list[Slice]] = {}
    for stage in standing:
        if stage.node_id not in rooms_by_id:
            lost.setdefault(stage.node_id, []).append(stage.part)
    taken = {stage.node_id for stage in standing}
    free = [room for room in rooms if room.node_id not in taken]
    homes: dict[NodeId, NodeId] = {}
    for node_id, parts in sorted(lost.items(), key=lambda item: -sum(len(part.layers) for part in item[1])):
        able = [room for room in free if _takes(need, room, parts)]
        if not able:
            return None
        home = min(able, key=lambda room: (fetch_bytes(room.node_id, parts), -room.free_bytes, room.name))
        free.remove(home)
        homes[node_id] = home.node_id
    placed = tuple(
        replace(stage, node_id=homes[stage.node_id], ram_percent=rooms_by_id[homes[stage.node_id]].ram_percent)
        if stage.node_id in homes
        else stage
        for stage in standing
    )
    hops = pairwise(stage.node_id for stage in sorted(placed, key=lambda stage: stage.part.index))
    return None if any(hop in broken for hop in hops) else placed


def _takes(need: Need, room: NodeRoom, parts: Sequence[Slice]) -> bool:
    return sum(stage_bytes(need, room, part) for part in parts) <= room.free_bytes
