"""Memory of slices on nodes, and hand-written placements. PURE."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from edgepipe.errors import NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import NodeId
from edgepipe.spec.expert_places import split_kind, with_ram_percent
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.spec.kv_forms import rest_tokens
from edgepipe.spec.memory_classes import kv_bytes
from edgepipe.units import format_bytes
from edgepipe.weights.resident import WIDE, ResidentSizes, dtype_of, resident_sizes
from edgepipe.weights.weight_table import FLOATS, WeightTable

_PLAN_PART = re.compile(r"(?P<node>[^:,\s]+):(?P<first>\d{1,6})-(?P<last>\d{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoom:
    """Capacity of one node."""

    node_id: NodeId
    name: str
    free_bytes: int  # memory for weights and KV, without headroom
    bytes_per_weight: int  # size of a float in the compute dtype: 4 for float32, 2 for bf16
    shares_host_memory: bool = False  # the device's memory is the machine's, which all programs share
    packing: str = WIDE  # how it keeps packed weights, see ``resident_bytes``
    kv: str = ""  # form of the served model's KV, see ``ModelConfig.kv_bytes_per_token``; empty: the compute dtype
    most_slots: int = 0  # states that it keeps beside the KV; 0: as many as pay, see ``MemoryClasses.states``
    ram_bytes: int = 0  # free host memory for experts beside the device; 0: the node keeps none there

    @property
    def ram_percent(self) -> int:
        """Share of each layer's experts that the node keeps in host memory."""
        return split_kind(self.packing)[1]

    def with_ram_percent(self, percent: int) -> NodeRoom:
        """Return the node with ``percent`` of each layer's experts in host memory."""
        return replace(self, packing=with_ram_percent(split_kind(self.packing)[0], percent))

    def sizes(self, config: ModelConfig, weights: WeightTable) -> ResidentSizes:
        """Return the bytes of a model's weights on this node."""
        return resident_sizes(config, weights, kind=self.packing, dtype=self.dtype)

    @property
    def dtype(self) -> str:
        """The compute dtype."""
        return dtype_of(self.bytes_per_weight)

    @property
    def rest_tokens(self) -> int:
        """Slots that a sequence needs behind its last token's."""
        return rest_tokens(self.kv)

    def layers_kv_bytes(self, config: ModelConfig, num_tokens: int) -> tuple[int, ...]:
        """Return the bytes of each layer's KV on this node, for a KV cache of ``num_tokens``."""
        return kv_bytes(config, num_tokens, form=self.kv or self.dtype, most_slots=self.most_slots)

    def kv_bytes(self, config: ModelConfig, layers: Iterable[int], num_tokens: int) -> int:
        """Return the bytes of the KV in some layers, by index, on this node, for a KV cache of ``num_tokens``."""
        each = self.layers_kv_bytes(config, num_tokens)
        return sum(each[layer] for layer in layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Model and KV to place."""

    config: ModelConfig
    kv_tokens: int  # minimum for every stage
    weights: WeightTable = FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One stage of a placement."""

    node_id: NodeId
    part: Slice
    ram_percent: int = 0  # percent of each layer's experts that its node keeps in host memory


def place_by_plan(need: Need, nodes: Sequence[NodeRoom], plan: str) -> tuple[Placed, ...]:
    """Place layers by a plan such as ``"a:0-14,b:15-29"`` (inclusive, by node name or id).

    Raises PlanInvalid for a gap, an overlap, an unknown node or a bad spelling, NoFeasiblePlacement for lack of room.
    """
    parts = [_read_part(text.strip(), nodes) for text in plan.split(",")]
    ranges, count = [layers for _, layers in parts], need.config.num_layers
    if need.config.has_mtp and ranges[-1].end == count - 1:  # the stage with the head has that layer
        ranges[-1] = LayerRange(ranges[-1].start, count)
    slices = make_slices(ranges, count)
    placed = tuple(
        Placed(node_id=node.node_id, part=part, ram_percent=node.ram_percent)
        for (node, _), part in zip(parts, slices, strict=True)
    )
    for node in {node.node_id: node for node, _ in parts}.values():
        wanted = sum(stage_bytes(need, node, stage.part) for stage in placed if stage.node_id == node.node_id)
        if wanted > node.free_bytes:
            raise _lacks(node, wanted)
        in_ram = sum(
            ram_stage_bytes(need, node, stage.part.layers) for stage in placed if stage.node_id == node.node_id
        )
        if node.ram_bytes and in_ram > node.ram_bytes:
            raise lacks_ram(node.name, in_ram, node.ram_bytes)
    return placed


def stage_bytes(need: Need, node: NodeRoom, part: Slice) -> int:
    """Return the memory of a slice on a node: weights, embedding and head included, and the required KV."""
    return stage_weight_bytes(need, node, part) + node.kv_bytes(need.config, part.layers, need.kv_tokens)


def stage_weight_bytes(need: Need, node: NodeRoom, part: Slice) -> int:
    """Return the bytes of a slice's weights in a node's device memory."""
    return node.sizes(need.config, need.weights).of_slice(part)


def ram_stage_bytes(need: Need, node: NodeRoom, layers: LayerRange) -> int:
    """Return the bytes of the layers' experts that a node keeps in host memory."""
    return sum(node.sizes(need.config, need.weights).in_ram[layers.start : layers.end])


def lacks_ram(node: str, wanted: int, free: int) -> NoFeasiblePlacement:
    """Return the error for experts that a node's host memory cannot hold."""
    return NoFeasiblePlacement(
        f"node {node} lacks {format_bytes(wanted - free)} of RAM for experts",
        fact=f"they need {format_bytes(wanted)}, {format_bytes(max(free, 0))} of RAM are free there",
        next_step="give a lower --experts-in-ram, close other programs there, or start another node",
        node=node,
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
            f"'{text}' is not a part of a plan",
            fact="a part is NODE:FIRST-LAST",
            next_step='write it like "a:0-14,b:15-29"',
        )
    return room_named(nodes, match["node"]), LayerRange(int(match["first"]), int(match["last"]) + 1)


def room_named(nodes: Sequence[NodeRoom], name: str) -> NodeRoom:
    """Return the node with a name or id. Raises PlanInvalid."""
    found = [node for node in nodes if name in (node.name, node.node_id)]
    if len(found) != 1:
        problem = "is the name of several nodes" if found else "is not a node that can compute"
        raise PlanInvalid(
            f"'{name}' {problem}",
            fact=f"nodes: {', '.join(sorted(f'{node.name} ({node.node_id})' for node in nodes)) or 'none'}",
            next_step="name the node by its id" if found else "see 'edgepipe status'",
        )
    return found[0]
