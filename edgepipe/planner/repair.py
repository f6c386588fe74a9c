"""Slices that lost their node find another, while those that survive stay where they are. PURE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from edgepipe.errors import NoFeasiblePlacement
from edgepipe.ids import NodeId
from edgepipe.model.facts import LayerRange, Slice, make_slices
from edgepipe.planner.demand import Demand, batch_parts
from edgepipe.planner.placement import Need, Placed, stage_bytes
from edgepipe.planner.profiles import Machine
from edgepipe.units import format_bytes


def fill_gaps(
    demand: Demand, machines: Sequence[Machine], fixed: Sequence[Placed], on_disk: Mapping[NodeId, frozenset[int]]
) -> tuple[Placed, ...]:
    """Every layer that no fixed slice holds goes to the machines with the most of the gap on disk, then the fastest.

    A machine that holds a fixed slice already takes more only when the others cannot: loading it anew costs the KV that
    it kept. Raises NoFeasiblePlacement, naming the layers.
    """
    ordered = sorted(fixed, key=lambda one: one.part.layers.start)
    parts = [(one.node_id, one.part.layers) for one in ordered]
    free = {machine.node_id: _free_beside(demand, machine, ordered) for machine in machines}
    busy = {one.node_id for one in ordered}
    for gap in _gaps([layers for _, layers in parts], demand.config.num_layers):
        for node_id, layers in _fill(demand, machines, gap, free, busy, on_disk):
            parts.append((node_id, layers))
            busy.add(node_id)
    parts.sort(key=lambda one: one[1].start)
    slices = make_slices([layers for _, layers in parts], demand.config.num_layers)
    return tuple(Placed(node_id=node_id, part=part) for (node_id, _), part in zip(parts, slices, strict=True))


def _gaps(held: Sequence[LayerRange], num_layers: int) -> list[LayerRange]:
    edges = [0, *(edge for layers in held for edge in (layers.start, layers.end)), num_layers]
    return [LayerRange(start, end) for start, end in list(pairwise(edges))[::2] if start < end]


def _free_beside(demand: Demand, machine: Machine, fixed: Sequence[Placed]) -> int:
    """What a survivor's own slices leave."""
    need = _need(demand)
    own = [one.part for one in fixed if one.node_id == machine.node_id]
    return machine.room.free_bytes - sum(stage_bytes(need, machine.room, part) for part in own)


def _fill(
    demand: Demand,
    machines: Sequence[Machine],
    gap: LayerRange,
    free: dict[NodeId, int],
    busy: set[NodeId],
    on_disk: Mapping[NodeId, frozenset[int]],
) -> list[tuple[NodeId, LayerRange]]:
    """A gap's layers over as few machines as hold it. Takes what it uses from ``free``."""

    def rank(machine: Machine) -> tuple[bool, int, float, NodeId]:
        here = len(on_disk.get(machine.node_id, frozenset()) & frozenset(gap))
        layer_s = batch_parts(machine.speed, demand, 1).layer_s
        return machine.node_id in busy, -here, layer_s, machine.node_id

    candidates = sorted(machines, key=rank)
    whole = next((one for one in candidates if _fits(demand, one, gap, free) == len(gap)), None)
    before = dict(free)
    chosen: list[tuple[NodeId, LayerRange]] = []
    start = gap.start
    for machine in [whole] if whole is not None else candidates:
        count = _fits(demand, machine, LayerRange(start, gap.end), free)
        if count:
            part = LayerRange(start, start + count)
            free[machine.node_id] -= stage_bytes(_need(demand), machine.room, _slice(demand, part))
            chosen.append((machine.node_id, part))
            start += count
        if start == gap.end:
            return chosen
    rooms = ", ".join(f"{one.name} {format_bytes(max(0, before[one.node_id]))}" for one in machines) or "none"
    raise NoFeasiblePlacement(
        f"layers {gap} have no home",
        fact=f"free: {rooms}",
        next_step="start another node, or bring the lost one back",
    )


def _fits(demand: Demand, machine: Machine, layers: LayerRange, free: Mapping[NodeId, int]) -> int:
    """How many of the layers, from the first on, a machine can take."""
    for end in range(layers.end, layers.start, -1):
        part = _slice(demand, LayerRange(layers.start, end))
        if stage_bytes(_need(demand), machine.room, part) <= free[machine.node_id]:
            return end - layers.start
    return 0


def _slice(demand: Demand, layers: LayerRange) -> Slice:
    return Slice(index=0, layers=layers, embedding=layers.start == 0, head=layers.end == demand.config.num_layers)


def _need(demand: Demand) -> Need:
    return Need(config=demand.config, kv_tokens=demand.least_kv_tokens)
