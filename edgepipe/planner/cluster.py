"""Machines, links and the model to run on them: measured, modelled, or with changes. PURE."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgepipe.backend.cost import CostModel
from edgepipe.backend.devices import DeviceModel, adjusted, named_device
from edgepipe.ids import NodeId
from edgepipe.planner.placement import NodeRoom
from edgepipe.planner.profiles import Links, Machine, TableSpeed
from edgepipe.spec.facts import ModelConfig
from edgepipe.units import LinkShape
from edgepipe.weights.weight_table import FLOATS, WeightTable

_BYTES_PER_VALUE = 2  # bf16, of weights that are not packed, and of KV
_PACKING = "emulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Input of a plan."""

    model: str  # name of the model, for people
    config: ModelConfig
    machines: tuple[Machine, ...]
    links: Links
    weights: WeightTable = FLOATS
    kv: str = ""  # form of the KV, see ``ModelConfig.kv_bytes_per_token``; empty: each machine's compute dtype

    def with_machine(self, machine: Machine) -> Cluster:
        """Return the cluster with one more machine. Its links are as assumed, else like the fastest measured one."""
        between = (shape for (a, b), shape in self.links.measured.items() if a != b)
        assumed = self.links.assumed or min(between, key=lambda link: link.one_way_s, default=LinkShape())
        return replace(self, machines=(*self.machines, machine), links=replace(self.links, assumed=assumed))

    def with_links(self, shape: LinkShape, nodes: Iterable[NodeId] = ()) -> Cluster:
        """Return the cluster with all links replaced, or those from and to ``nodes``."""
        touched = frozenset(nodes)
        ids = [machine.node_id for machine in self.machines]
        links = self.links
        for a in ids:
            for b in ids:
                if a != b and (not touched or a in touched or b in touched):
                    links = links.with_shape(a, b, shape)
        return replace(self, links=links)

    def with_speeds_of(self, known: Iterable[Machine]) -> Cluster:
        """Return the cluster with the speeds of the ``known`` machines."""
        speeds = {machine.node_id: machine.speed for machine in known}
        machines = (replace(machine, speed=speeds.get(machine.node_id, machine.speed)) for machine in self.machines)
        return replace(self, machines=tuple(machines))

    def with_memory(self, node: NodeId, more_bytes: int) -> Cluster:
        """Return the cluster with more memory in one machine."""
        return replace(
            self,
            machines=tuple(
                replace(machine, room=replace(machine.room, free_bytes=machine.room.free_bytes + more_bytes))
                if machine.node_id == node
                else machine
                for machine in self.machines
            ),
        )


def known_cluster(
    devices: Sequence[str],
    config: ModelConfig,
    *,
    link: LinkShape,
    model: str = "",
    adjustments: Mapping[str, str] | None = None,
    weights: WeightTable = FLOATS,
    kv: str = "",
) -> Cluster:
    """Build a cluster of devices from the table, named a, b, c, ..., with one kind of link. Raises ConfigInvalid."""
    speeds: dict[str, Machine] = {}
    machines: list[Machine] = []
    for name, key in zip(names(len(devices)), devices, strict=True):
        if key not in speeds:
            speeds[key] = table_machine(name, adjusted(named_device(key), adjustments or {}), config, weights, kv)
        known = speeds[key]
        machines.append(replace(known, room=replace(known.room, node_id=NodeId(name), name=name)))
    return Cluster(
        model=model, config=config, machines=tuple(machines), links=Links(assumed=link), weights=weights, kv=kv
    )


def table_machine(
    name: str, device: DeviceModel, config: ModelConfig, weights: WeightTable = FLOATS, kv: str = ""
) -> Machine:
    """Build a machine from a device's data sheet. ``kv``: form of the KV; empty: the compute dtype."""
    return Machine(
        room=NodeRoom(
            node_id=NodeId(name),
            name=name,
            free_bytes=device.usable_bytes,
            bytes_per_weight=_BYTES_PER_VALUE,
            packing=_PACKING,
            kv=kv,
            ram_bytes=device.ram_bytes,
        ),
        device=device.name,
        speed=TableSpeed(CostModel(config, device, weights=weights, kind=_PACKING, kv=kv)),
        total_bytes=device.memory_bytes,
    )


def names(count: int) -> list[str]:
    """Return the names a, b, ..., z, aa, ab, ..."""
    letters = string.ascii_lowercase
    return [letters[i] if i < 26 else letters[i // 26 - 1] + letters[i % 26] for i in range(count)]
