"""New homes for the layers of nodes that are gone, while the other stages stay as they are. PURE."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from edgepipe.ids import NodeId
from edgepipe.model.facts import Slice
from edgepipe.planner.placement import Need, NodeRoom, Placed, stage_bytes


def replace_lost(
    need: Need,
    standing: Sequence[Placed],
    rooms: Sequence[NodeRoom],
    *,
    fetch_bytes: Callable[[NodeId, Sequence[Slice]], int],
    broken: Collection[tuple[NodeId, NodeId]] = (),
) -> tuple[Placed, ...] | None:
    """The placement with each lost stage whole on a node that has no stage yet; None if there are too few of those.

    standing     as it was; a stage is lost if its node is not among ``rooms``
    rooms        of nodes that are there; those that keep their stage count what it takes as free
    fetch_bytes  of these slices that a node would have to fetch first
    broken       links that carry nothing; None, too, if the placement would need one of them
    returns      in the order of ``standing``

    The largest stage chooses first; nodes that fetch less are preferred, among equals those with more room.
    """
    there = {room.node_id: room for room in rooms}
    lost: dict[NodeId, list[Slice]] = {}
    for one in standing:
        if one.node_id not in there:
            lost.setdefault(one.node_id, []).append(one.part)
    taken = {one.node_id for one in standing}
    free = [room for room in rooms if room.node_id not in taken]
    homes: dict[NodeId, NodeId] = {}
    for node_id, parts in sorted(lost.items(), key=lambda item: -sum(len(part.layers) for part in item[1])):
        able = [room for room in free if _takes(need, room, parts)]
        if not able:
            return None
        home = min(able, key=lambda room: (fetch_bytes(room.node_id, parts), -room.free_bytes, room.name))
        free.remove(home)
        homes[node_id] = home.node_id
    placed = tuple(Placed(node_id=homes.get(one.node_id, one.node_id), part=one.part) for one in standing)
    hops = pairwise(one.node_id for one in sorted(placed, key=lambda one: one.part.index))
    return None if any(hop in broken for hop in hops) else placed


def _takes(need: Need, room: NodeRoom, parts: Sequence[Slice]) -> bool:
    return sum(stage_bytes(need, room, part) for part in parts) <= room.free_bytes
