"""Layers to nodes by free memory, or as a person says. PURE."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgepipe.errors import NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import NodeId
from edgepipe.model.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.units import format_bytes

_PLAN_PART = re.compile(r"(?P<node>[^:,\s]+):(?P<first>\d{1,6})-(?P<last>\d{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoom:
    """What one node offers."""

    node_id: NodeId
    name: str
    free_bytes: int  # for weights and KV, headroom already taken off
    bytes_per_weight: int  # of the compute dtype: 4 for float32, 2 for bf16
    bytes_per_kv: int  # of one key or value
    shares_host_memory: bool = False  # with everything else that the machine runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What is to be placed."""

    config: ModelConfig
    kv_tokens: int  # that every stage must be able to keep, at the least


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One stage of the placement."""

    node_id: NodeId
    part: Slice


def place(need: Need, nodes: Sequence[NodeRoom], *, num_nodes: int = 0) -> tuple[Placed, ...]:
    """Layers over ``num_nodes`` nodes (0: as few as hold them) in proportion to free memory.

    Nodes with more room come first: the first stage also embeds and the engine runs beside it. Raises
    NoFeasiblePlacement, saying how much is missing where.
    """
    able = sorted(nodes, key=lambda node: (-node.free_bytes, node.name, node.node_id))
    if num_nodes > need.config.num_layers:
        raise PlanInvalid(
            f"{num_nodes} nodes cannot share {need.config.num_layers} layers",
            next_step=f"ask for at most {need.config.num_layers} nodes with --nodes",
        )
    if num_nodes > len(able) or not able:
        raise NoFeasiblePlacement(
            f"{num_nodes} nodes are wanted, {len(able)} can compute" if num_nodes else "no node can compute",
            fact=f"nodes with a backend: {', '.join(node.name for node in able) or 'none'}",
            next_step="start another node, or ask for fewer with --nodes",
        )
    counts = [num_nodes] if num_nodes else range(1, min(len(able), need.config.num_layers) + 1)
    for count in counts:
        if split := _split(need, able[:count]):
            return _placed(able[:count], split, need.config)
    raise _too_small(need, able[:num_nodes] if num_nodes else able)


def place_by_plan(need: Need, nodes: Sequence[NodeRoom], plan: str) -> tuple[Placed, ...]:
    """Layers as ``"a:0-14,b:15-29"`` says (inclusive, by node name or id).

    Raises PlanInvalid for a gap, an overlap, an unknown node or a bad spelling, NoFeasiblePlacement for lack of room.
    """
    parts = [_read_part(text.strip(), nodes) for text in plan.split(",")]
    slices = make_slices([layers for _, layers in parts], need.config.num_layers)
    placed = tuple(Placed(node_id=node.node_id, part=part) for (node, _), part in zip(parts, slices, strict=True))
    for node in {node.node_id: node for node, _ in parts}.values():
        wanted = sum(stage_bytes(need, node, one.part) for one in placed if one.node_id == node.node_id)
        if wanted > node.free_bytes:
            raise _lacks(node, wanted)
    return placed


def stage_bytes(need: Need, node: NodeRoom, part: Slice) -> int:
    """Memory that a slice takes on a node: its weights, embedding and head counted, and the KV it must keep."""
    kv = need.config.kv_bytes_per_token(num_layers=len(part.layers), bytes_per_value=node.bytes_per_kv)
    return need.config.slice_parameters(part) * node.bytes_per_weight + kv * need.kv_tokens


def _split(need: Need, nodes: Sequence[NodeRoom]) -> list[LayerRange] | None:
    """Ranges for these nodes in this order, or None if they cannot hold the model.

    The share of the nodes before the cut grows with their room; a cut then moves left until its node holds its layers.
    """
    total = sum(max(node.free_bytes, 0) for node in nodes)
    ranges: list[LayerRange] = []
    start, room_so_far, num_layers = 0, 0, need.config.num_layers
    for index, node in enumerate(nodes):
        room_so_far += max(node.free_bytes, 0)
        others = len(nodes) - 1 - index
        wanted = num_layers if not others else round(num_layers * room_so_far / total) if total else 0
        end = min(max(wanted, start + 1), num_layers - others)
        while end > start and not _holds(need, node, _slice(index, start, end, num_layers)):
            end -= 1
        if end == start:
            return None
        ranges.append(LayerRange(start, end))
        start = end
    return ranges if start == num_layers else _fill(need, nodes)


def _fill(need: Need, nodes: Sequence[NodeRoom]) -> list[LayerRange] | None:
    """Ranges where every node takes as much as it holds, leaving one layer for each node behind it."""
    ranges: list[LayerRange] = []
    start, num_layers = 0, need.config.num_layers
    for index, node in enumerate(nodes):
        end = num_layers - (len(nodes) - 1 - index)
        while end > start and not _holds(need, node, _slice(index, start, end, num_layers)):
            end -= 1
        if end == start:
            return None
        ranges.append(LayerRange(start, end))
        start = end
    return ranges if start == num_layers else None


def _slice(index: int, start: int, end: int, num_layers: int) -> Slice:
    return Slice(index=index, layers=LayerRange(start, end), embedding=start == 0, head=end == num_layers)


def _holds(need: Need, node: NodeRoom, part: Slice) -> bool:
    return stage_bytes(need, node, part) <= node.free_bytes


def _placed(nodes: Sequence[NodeRoom], ranges: list[LayerRange], config: ModelConfig) -> tuple[Placed, ...]:
    slices = make_slices(ranges, config.num_layers)
    return tuple(Placed(node_id=node.node_id, part=part) for node, part in zip(nodes, slices, strict=True))


def _too_small(need: Need, nodes: Sequence[NodeRoom]) -> NoFeasiblePlacement:
    whole = _slice(0, 0, need.config.num_layers, need.config.num_layers)
    wanted = stage_bytes(need, nodes[0], whole)
    free = sum(max(node.free_bytes, 0) for node in nodes)
    rooms = ", ".join(f"{node.name} {format_bytes(max(node.free_bytes, 0))}" for node in nodes)
    missing = f"{format_bytes(wanted - free)} missing" if wanted > free else "no cut between layers fits"
    return NoFeasiblePlacement(
        f"the model needs about {format_bytes(wanted)}, {format_bytes(free)} are free",
        fact=f"{missing}; free: {rooms}",
        next_step="close other programs, start another node, or serve a smaller model",
    )


def _lacks(node: NodeRoom, wanted: int) -> NoFeasiblePlacement:
    return NoFeasiblePlacement(
        f"node {node.name} lacks {format_bytes(wanted - node.free_bytes)} for its layers",
        fact=f"they need {format_bytes(wanted)}, {format_bytes(max(node.free_bytes, 0))} are free there",
        next_step="give it fewer layers with --plan, or leave the placement to edgepipe",
        node=node.name,
    )


def _read_part(text: str, nodes: Sequence[NodeRoom]) -> tuple[NodeRoom, LayerRange]:
    match = _PLAN_PART.fullmatch(text)
    if match is None:
        raise PlanInvalid(
            f"'{text}' is no part of a plan",
            fact="a part is NODE:FIRST-LAST",
            next_step='write it like "a:0-14,b:15-29"',
        )
    found = [node for node in nodes if match["node"] in (node.name, node.node_id)]
    if len(found) != 1:
        problem = "is the name of several nodes" if found else "is no node that can compute"
        raise PlanInvalid(
            f"'{match['node']}' {problem}",
            fact=f"nodes: {', '.join(sorted(f'{node.name} ({node.node_id})' for node in nodes)) or 'none'}",
            next_step="name the node by its id" if found else "see 'edgepipe status'",
        )
    return found[0], LayerRange(int(match["first"]), int(match["last"]) + 1)
