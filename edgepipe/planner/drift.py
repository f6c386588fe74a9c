"""Compare a running ring with its plan, and correct the cluster by its measurements. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgepipe.backend.cost import StepWork
from edgepipe.backend.expert_reads import ExpertShare, cleaned
from edgepipe.planner.cluster import Cluster
from edgepipe.planner.forecast import Forecast
from edgepipe.planner.placement import Placed
from edgepipe.planner.profiles import MEASURED, Speed, StepParts
from edgepipe.spec.facts import ModelConfig
from edgepipe.weights.weight_table import WeightTable

DRIFT = 0.15
"""Share by which a time must differ from the plan to count as a departure."""
_LEAST_S = 0.001  # the hosts' part of a hop varies by as much


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Measured times of a ring that decodes S sequences in M micro-batches; 0: not known."""

    micro_batches: int
    sequences: int
    step_s: tuple[float, ...]  # time of a step on each slice
    upload_s: tuple[float, ...]  # time of an upload on each hop
    one_way_s: tuple[float, ...]  # one-way delay of each hop


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A device or link whose time differs from the plan."""

    place: str  # "stage 1", "link 0-1", counted from 0
    planned_s: float
    seen_s: float
    quantity: str = "step"  # "step", "upload" or "latency"

    @property
    def ratio(self) -> float:
        """Measured over planned time."""
        return self.seen_s / self.planned_s if self.planned_s else 1.0

    @property
    def size(self) -> float:
        """Relative deviation, in either direction."""
        return max(self.ratio, 1 / self.ratio) - 1 if self.ratio else 0.0


def departures(planned: Forecast, seen: Seen) -> list[Departure]:
    """Return all departures from the plan, the largest first. ``planned`` must have the same S and M."""
    found = [
        Departure(place=f"stage {index}", planned_s=a, seen_s=b)
        for index, (a, b) in enumerate(zip(planned.step_s, seen.step_s, strict=True))
        if b
    ]
    for index, hop in enumerate(planned.hops):
        place = f"link {index}-{index + 1}"
        pairs = ((hop.upload_s, seen.upload_s[index], "upload"), (hop.latency_s, seen.one_way_s[index], "latency"))
        for a, b, quantity in pairs:
            if b and abs(a - b) > _LEAST_S:
                found.append(Departure(place=place, planned_s=a, seen_s=b, quantity=quantity))
    left = [departure for departure in found if departure.size > DRIFT]
    return sorted(left, key=lambda departure: -departure.size)


def corrected(cluster: Cluster, placed: Sequence[Placed], planned: Forecast, seen: Seen) -> Cluster:
    """Return the cluster with measured speeds and links where they depart from the plan."""
    left = {(departure.place, departure.planned_s): departure for departure in departures(planned, seen)}
    machines = {machine.node_id: machine for machine in cluster.machines}
    for index, stage in enumerate(placed):
        off = left.get((f"stage {index}", planned.step_s[index]))
        if off is not None:
            machine = machines[stage.node_id]
            machines[stage.node_id] = replace(machine, speed=ScaledSpeed(machine.speed, off.ratio))
    links = cluster.links
    for index, hop in enumerate(planned.hops):
        shape, place = hop.link.shape, f"link {index}-{index + 1}"
        if (off := left.get((place, hop.latency_s))) is not None:
            shape = replace(shape, one_way_s=max(0.0, off.seen_s - hop.host_s))
        if hop.upload_s and (off := left.get((place, hop.upload_s))) is not None:
            shape = replace(shape, bytes_per_s=shape.bytes_per_s / off.ratio)
        if shape != hop.link.shape:
            links = links.with_shape(placed[index].node_id, placed[index + 1].node_id, shape)
    return replace(cluster, machines=tuple(machines.values()), links=links)


def with_expert_shares(cluster: Cluster, shares: Sequence[ExpertShare]) -> Cluster:
    """Return the cluster with speeds for a model whose steps read these shares of a layer's experts.

    A step of the ring shows its time at its own number of rows only. The shares say how the time of other numbers of
    rows differs, and correct the speeds of machines outside the ring.
    """
    if not (usable := cleaned(shares)):
        return cluster
    machines = (replace(machine, speed=machine.speed.with_expert_shares(usable)) for machine in cluster.machines)
    return replace(cluster, machines=tuple(machines))


class ScaledSpeed:
    """Speed of a device that takes ``ratio`` times as long as assumed."""

    source = MEASURED
    busy, measured_s = False, 0.0

    def __init__(self, assumed: Speed, ratio: float) -> None:
        self._thought = assumed
        self._ratio = ratio

    def with_expert_shares(self, shares: tuple[ExpertShare, ...]) -> ScaledSpeed:
        """See ``Speed.with_expert_shares``."""
        return ScaledSpeed(self._thought.with_expert_shares(shares), self._ratio)

    def parts(self, work: StepWork) -> StepParts:
        """Return the scaled times. See ``Speed.parts``."""
        parts = self._thought.parts(work)
        return StepParts(
            base_s=parts.base_s * self._ratio, layer_s=parts.layer_s * self._ratio, head_s=parts.head_s * self._ratio
        )

    def token_s(self, config: ModelConfig, weights: WeightTable, *, context_tokens: int) -> float:
        """See ``Speed.token_s``."""
        return self._ratio * self._thought.token_s(config, weights, context_tokens=context_tokens)

    def with_ram_percent(self, percent: int) -> ScaledSpeed:
        """See ``Speed.with_ram_percent``."""
        return ScaledSpeed(self._thought.with_ram_percent(percent), self._ratio)
