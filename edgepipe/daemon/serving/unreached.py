"""PURE: which nodes a placement leaves out, so that every remaining node can open connections to every other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from edgepipe.ids import NodeId

Way = tuple[NodeId, NodeId]  # one node and another, or itself


def left_out(unreached: Collection[Way], *, own: NodeId) -> dict[NodeId, Way]:
    """Choose the nodes to leave out, each with one of its failed ways.

    This node (``own``) stays unless it does not reach its own ports: it may be the only one with the model's files. Of
    the others, those with the most failed ways go first, and of these those that others do not reach.
    """
    chosen: dict[NodeId, Way] = {}
    rest: list[Way] = sorted(set(unreached))
    while rest:
        touching = Counter(node for way in rest for node in set(way))
        missed = Counter(receiver for _, receiver in rest)
        able = [node for node in touching if node != own or (own, own) in rest]
        worst = max(able, key=lambda node: ((node, node) in rest, touching[node], missed[node], node))
        chosen[worst] = max((way for way in rest if worst in way), key=lambda way: (way[1] == worst, way[0] == own))
        rest = [way for way in rest if worst not in way]
    return chosen
