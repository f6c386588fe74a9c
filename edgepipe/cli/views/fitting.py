"""Whether a model fits the cluster as its nodes report it, by memory sizes and data rates alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgepipe.backend.types import DEFAULT_SETTINGS
from edgepipe.daemon.serving.capacity import rooms_of
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.planner.demand import Demand
from edgepipe.planner.plan import Plan, plan
from edgepipe.planner.profiles import Links, Machine, estimated_speed
from edgepipe.units import LinkShape
from edgepipe.weights.resident import dtype_of

if TYPE_CHECKING:
    from edgepipe.spec.facts import ModelConfig
    from edgepipe.weights.weight_table import WeightTable
    from edgepipe.wire.nodes import MemberState

_UNMEASURED = LinkShape(bytes_per_s=1e9 / 8, one_way_s=0.0005)  # a home network with cables
_WIFI_MS = 3.0  # a longer round trip means Wi-Fi
_READ_TOKENS = 1024


def plan_on(members: Sequence[MemberState], config: ModelConfig, weights: WeightTable) -> Plan | None:
    """Return the best placement on the free memory of the members; None if the model does not fit."""
    demand = Demand(config=config, weights=weights, read_tokens=_READ_TOKENS)
    try:
        return plan(demand, machines_of(members, config, weights), links_of(members), explain=False)
    except NoFeasiblePlacement:
        return None


def machines_of(members: Sequence[MemberState], config: ModelConfig, weights: WeightTable) -> list[Machine]:
    """Return the live members that can compute, with estimated speeds for a model."""
    machines: list[Machine] = []
    for member in members:
        profile = member.node.devices[0].profile if member.node.devices else None
        if member.state != "alive" or profile is None:
            continue
        for room in rooms_of(member.node, DEFAULT_SETTINGS):
            speed = estimated_speed(profile, config, weights=weights, dtype=dtype_of(room.bytes_per_weight))
            machines.append(Machine(room=room, device=profile.name or profile.device, speed=speed))
    return machines


def links_of(members: Sequence[MemberState]) -> Links:
    """Return links like the one with the longest round trip; rates are not measured yet."""
    worst_ms = max((member.rtt_ms for member in members if not member.self), default=0.0)
    if not worst_ms:
        return Links(assumed=_UNMEASURED)
    rate = 180e6 / 8 if worst_ms > _WIFI_MS else _UNMEASURED.bytes_per_s
    return Links(assumed=LinkShape(bytes_per_s=rate, one_way_s=worst_ms / 2e3))


def where_text(found: Plan | None) -> str:
    """Return where a model would go: a node's name, a number of nodes, or "no"."""
    if found is None:
        return "no"
    names = {stage.machine.name for stage in found.stages}
    return names.pop() if len(names) == 1 else f"{len(names)} nodes"


def rate_text(found: Plan) -> str:
    """Return the estimated rate of one chat."""
    rate = found.single.tokens_per_s
    return f"~{rate:.0f} tok/s" if rate >= 1 else "<1 tok/s"
