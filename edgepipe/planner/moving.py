"""What it costs to move a running model's stages, and whether a better placement is worth that. PURE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgepipe.ids import NodeId
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.planner.placement import Need, NodeRoom, Placed, stage_bytes

LEAST_GAIN = 0.05
"""Below it a better placement is not worth mentioning: forecasts are no surer."""
_MOVING_GAIN = 0.10
_HORIZON_S = 600.0  # within which a move must have paid
_DISK_BYTES_PER_S = 1e9  # of an SSD at home, read once
_OPENING_S = 0.5  # a new epoch: streams are opened, plans go out anew
_DISTURBED = 0.2  # of the ring's rate, while stages load beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCost:
    """Time that a move takes."""

    load_s: float  # shards are read while steps go on
    pause_s: float  # nothing is answered

    @property
    def lost_s(self) -> float:
        """Of answering at full rate, in all."""
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
) -> MoveCost:
    """What it takes to go from one placement to another.

    fetch_bytes        of these slices that a node would have to fetch from another one first
    fetch_bytes_per_s  of the slowest link to such a node
    replay_s           to compute again what running sequences have in their KV caches

    A stage whose layers stay keeps its process; every other one reads its whole shard. While one does that had other
    layers before, steps stop. Nodes load side by side.
    """
    had = _parts(before)
    need = Need(config=config, kv_tokens=0)
    load_s = stopped_s = 0.0
    for node_id, parts in _parts(after).items():
        if had.get(node_id) == parts:
            continue
        num_bytes = sum(stage_bytes(need, rooms[node_id], part) for part in parts)
        fetch_s = fetch_bytes(node_id, parts) / fetch_bytes_per_s
        load_s = max(load_s, num_bytes / _DISK_BYTES_PER_S + fetch_s)
        if node_id in had:
            stopped_s = max(stopped_s, num_bytes / _DISK_BYTES_PER_S)
    return MoveCost(load_s=load_s, pause_s=_OPENING_S + stopped_s + replay_s)


def worth_moving(gain: float, cost: MoveCost) -> bool:
    """Whether it pays within ten minutes, and clearly: forecasts that differ by little may be wrong about which is
    better, and stages would go to and fro."""
    return gain >= _MOVING_GAIN and gain * _HORIZON_S > cost.lost_s


def _parts(placed: Sequence[Placed]) -> dict[NodeId, list[Slice]]:
    found: dict[NodeId, list[Slice]] = {}
    for one in placed:
        found.setdefault(one.node_id, []).append(one.part)
    return found
