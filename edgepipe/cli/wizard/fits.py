"""Models that fit this cluster, and their estimated speed, from memory sizes and matrix rates alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgepipe.daemon.serving.capacity import rooms_of
from edgepipe.ids import NodeId
from edgepipe.model.shapes import named_shape
from edgepipe.planner.preview import ModelFit, which_fit
from edgepipe.planner.profiles import Links, Machine, estimated_speed
from edgepipe.units import LinkShape, format_bytes

if TYPE_CHECKING:
    from edgepipe.planner.placement import NodeRoom
    from edgepipe.wire.nodes import ClusterStatus

CATALOGUE: Mapping[str, str] = {
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B-Instruct",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm2-135m": "demo",
}
"""Known models by shape, and their names for ``models pull``; the demo model needs no hub."""

_UNMEASURED = LinkShape(bytes_per_s=1e9 / 8, one_way_s=0.0005)  # a home network with cables
_USABLE_TOKENS_PER_S = 5.0  # about as fast as people read
_WIFI_MS = 3.0  # a longer round trip means Wi-Fi


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model to choose."""

    source: str  # for ``models pull``
    text: str  # one line for people
    tokens_per_s: float = 0.0  # of one chat, estimated; 0: it does not fit


def fitting_models(status: ClusterStatus) -> tuple[list[Fit], list[Fit]]:
    """Return the models that fit, largest first, and the models that do not."""
    alive = [member.node for member in status.members if member.state == "alive"]
    rooms = {room.node_id: room for node in alive for room in rooms_of(node, "auto")}
    links = Links(assumed=_worst_link(status))
    machines = [(name, _machines(status, rooms, name)) for name in CATALOGUE]
    found = which_fit(machines, links)
    good = [
        Fit(source=CATALOGUE[fit.model], text=_text(fit), tokens_per_s=fit.plan.single.tokens_per_s)
        for fit in found
        if fit.plan is not None
    ]
    bad = [Fit(source=CATALOGUE[fit.model], text=_text(fit)) for fit in found if fit.plan is None]
    return good, bad


def best_fit(fits: Sequence[Fit]) -> Fit | None:
    """Return the largest model that answers as fast as people read, else the fastest model."""
    usable = next((fit for fit in fits if fit.tokens_per_s >= _USABLE_TOKENS_PER_S), None)
    return usable or max(fits, key=lambda fit: fit.tokens_per_s, default=None)


def _machines(status: ClusterStatus, rooms: Mapping[NodeId, NodeRoom], model: str) -> list[Machine]:
    config = named_shape(model)
    machines: list[Machine] = []
    for member in status.members:
        room = rooms.get(member.node.node_id)
        profile = member.node.devices[0].profile if member.node.devices else None
        if room is None or profile is None:
            continue
        speed = estimated_speed(profile, config, bytes_per_weight=room.bytes_per_weight)
        machines.append(Machine(room=room, device=profile.name or profile.device, speed=speed))
    return machines


def _worst_link(status: ClusterStatus) -> LinkShape:
    """Return the link with the longest round trip; rates are not measured yet."""
    worst_ms = max((member.rtt_ms for member in status.members if not member.self), default=0.0)
    if not worst_ms:
        return _UNMEASURED
    rate = 180e6 / 8 if worst_ms > _WIFI_MS else _UNMEASURED.bytes_per_s
    return LinkShape(bytes_per_s=rate, one_way_s=worst_ms / 2e3)


def _text(fit: ModelFit) -> str:
    size = format_bytes(fit.weight_bytes)
    name = CATALOGUE[fit.model]
    if fit.plan is None:
        return f"{name:<36} {size:>9}  does not fit"
    stages = fit.plan.stages
    where = stages[0].machine.name if len(stages) == 1 else f"{len(stages)} nodes"
    rate = fit.plan.single.tokens_per_s
    speed = f"~{rate:.0f} tok/s" if rate >= 1 else "<1 tok/s"
    return f"{name:<36} {size:>9}  {where:<10} {speed}"
