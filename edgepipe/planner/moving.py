"""Cost of moving a running model's stages, and whether a better placement justifies it. PURE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgepipe.ids import NodeId
from edgepipe.planner.expert_shares import rooms_as_placed
from edgepipe.planner.placement import Need, NodeRoom, Placed, ram_stage_bytes, stage_weight_bytes
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.weights.weight_table import FLOATS, WeightTable

LEAST_GAIN = 0.10
"""Smallest gain worth reporting: forecasts are not more accurate."""
_MOVING_GAIN = 0.10
_HORIZON_S = 600.0  # a move must pay off within this time
_DISK_BYTES_PER_S = 1e9  # a home SSD, read once
_OPENING_S = 0.5  # a new epoch: open streams, send plans again
_DISTURBED = 0.2  # share of the ring's rate lost while stages load beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCost:
    """Time of a move."""

    load_s: float  # time to load shards while steps continue
    pause_s: float  # time in which no step runs

    @property
    def lost_s(self) -> float:
        """Total loss, in seconds at full rate."""
        return self.pause_s + _DISTURBED * self.load_s


def move_cost(
    config: ModelConfig,
    before: Sequence[Placed],
    after: Sequence[Placed],
    rooms: Mapping[NodeId, NodeRoom],
    *,
    fetch_bytes: Callable[[NodeId, Sequence[Slice]], int],
    fetch_bytes_per_s: float,
    replay_s: float,
    weights: WeightTable = FLOATS,
) -> MoveCost:
    """Return the cost of moving from one placement to another.

    fetch_bytes        returns the bytes of slices that a node must first fetch from another node
    fetch_bytes_per_s  rate of the slowest link to such a node
    replay_s           seconds to recompute the KV of running sequences

    A stage whose layers stay keeps its process; every other stage loads its whole shard. Steps stop while a node
    replaces its former layers. Nodes load in parallel.
    """
    had = _parts(before)
    need = Need(config=config, kv_tokens=0, weights=weights)
    load_s = stopped_s = 0.0
    for node_id, parts in _parts(after).items():
        if had.get(node_id) == parts:
            continue
        room = next(iter(rooms_as_placed([rooms[node_id]], after)))
        num_bytes = sum(
            stage_weight_bytes(need, room, part.part) + ram_stage_bytes(need, room, part.part.layers) for part in parts
        )
        fetch_s = fetch_bytes(node_id, [part.part for part in parts]) / fetch_bytes_per_s
        load_s = max(load_s, num_bytes / _DISK_BYTES_PER_S + fetch_s)
        if node_id in had:
            stopped_s = max(stopped_s, num_bytes / _DISK_BYTES_PER_S)
    return MoveCost(load_s=load_s, pause_s=_OPENING_S + stopped_s + replay_s)


def worth_moving(gain: float, cost: MoveCost) -> bool:
    """Return whether a move pays off clearly and within ten minutes.

    Forecasts that differ little may rank placements wrongly, and stages would move back and forth.
    """
    return gain >= _MOVING_GAIN and gain * _HORIZON_S > cost.lost_s


def _parts(placed: Sequence[Placed]) -> dict[NodeId, list[Placed]]:
    found: dict[NodeId, list[Placed]] = {}
    for stage in placed:
        found.setdefault(stage.node_id, []).append(stage)
    return found
