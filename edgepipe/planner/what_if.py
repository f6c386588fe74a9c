"""Compare a plan with other clusters and objectives, and find the most useful improvements. PURE."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from edgepipe.backend.devices import named_device
from edgepipe.errors import ConfigInvalid, NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import NodeId
from edgepipe.planner.cluster import Cluster, names, table_machine
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.plan import Plan, plan
from edgepipe.planner.profiles import Machine
from edgepipe.units import LinkShape, format_rate, named_link, parse_bytes, parse_link

_CABLE = LinkShape(bytes_per_s=125e6, one_way_s=0.0003)  # gigabit Ethernet through a home switch
_FASTER_CABLE = LinkShape(bytes_per_s=312.5e6, one_way_s=0.0002)
_MORE_BYTES = 8_000_000_000
_WORTH_TELLING = 0.03
_MOST_HELPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another option and its plan."""

    what: str
    plan: Plan | None  # None: the model does not fit
    why_not: str = ""

    def gain_over(self, base: Plan) -> float:
        """Return the gain in tokens per second by the objective; 0.1 is 10 % more."""
        return self.plan.tokens_per_s / base.tokens_per_s - 1 if self.plan is not None else -1.0


def changed(cluster: Cluster, text: str) -> Cluster:
    """Apply changes such as ``"add rtx4090, link 2.5gbit,0.2ms, memory studio 96GB, remove laptop"`` to a cluster.

    Raises ConfigInvalid for an unknown change, PlanInvalid for an unknown node.
    """
    for change in _changes(text):
        verb, _, rest = change.partition(" ")
        rest = rest.strip()
        if verb == "add" and rest:
            cluster = cluster.with_machine(_new_machine(cluster, rest))
        elif verb == "remove" and rest:
            gone = _machine(cluster, rest)
            cluster = replace(cluster, machines=tuple(machine for machine in cluster.machines if machine is not gone))
        elif verb == "link" and rest:
            cluster = _with_link(cluster, rest)
        elif verb == "memory" and len(rest.split()) == 2:
            name, size = rest.split()
            machine = _machine(cluster, name)
            cluster = cluster.with_memory(machine.node_id, parse_bytes(size) - machine.room.free_bytes)
        else:
            raise ConfigInvalid(
                f"'{change}' is not a known change",
                fact="changes: add DEVICE, remove NODE, link [NODE] RATE[,LATENCY], memory NODE SIZE",
                next_step='write it like "add rtx4090, link 2.5gbit"',
            )
    return cluster


def alternatives(demand: Demand, cluster: Cluster, base: Plan, constraints: Constraints) -> Iterator[Alternative]:
    """Yield other plans: without constraints, on the best single machine, and for the other objective.

    Plans with the same placement are left out.
    """
    only = Constraints(experts_in_ram=constraints.experts_in_ram)
    if constraints != only:
        free = _try("without constraints", demand, cluster, only)
        if free.plan is not None and free.plan.placed != base.placed:
            yield free
    if len(base.stages) > 1:
        yield _try("best single machine", demand, cluster, replace(only, num_nodes=1))
    other = Objective.THROUGHPUT if demand.objective is Objective.LATENCY else Objective.LATENCY
    found = _try(f"--objective {other.value}", replace(demand, objective=other), cluster, only)
    if found.plan is not None and found.plan.placed != base.placed:
        yield found


def helps(demand: Demand, cluster: Cluster, base: Plan, constraints: Constraints) -> list[Alternative]:
    """Return the most useful improvements under the same constraints, best first: cables, memory, a machine."""
    tried = [
        _try(label, demand, other, constraints)
        for label, other in [*_better_links(cluster, base), *_more_memory(cluster, base), *_one_more(cluster, base)]
    ]
    worth = [option for option in tried if option.gain_over(base) >= _WORTH_TELLING]
    return sorted(worth, key=lambda option: -option.gain_over(base))[:_MOST_HELPS]


def _better_links(cluster: Cluster, base: Plan) -> Iterator[tuple[str, Cluster]]:
    shapes = [hop.link.shape for hop in base.single.hops]
    slowest = min((shape.bytes_per_s for shape in shapes), default=float("inf"))
    latest = max((shape.one_way_s for shape in shapes), default=0.0)
    for cable in (_CABLE, _FASTER_CABLE):
        if cable.bytes_per_s > slowest or cable.one_way_s < latest / 2:
            shape = LinkShape(
                bytes_per_s=max(cable.bytes_per_s, slowest), one_way_s=min(cable.one_way_s, latest or cable.one_way_s)
            )
            yield f"cables of {format_rate(shape.bytes_per_s)} everywhere", cluster.with_links(shape)


def _more_memory(cluster: Cluster, base: Plan) -> Iterator[tuple[str, Cluster]]:
    for stage in base.stages:
        machine = stage.machine
        # Apple's memory cannot be extended.
        if machine.room.shares_host_memory and not machine.device.startswith("Apple"):
            yield f"8 GB more RAM in {machine.name}", cluster.with_memory(machine.node_id, _MORE_BYTES)


def _one_more(cluster: Cluster, base: Plan) -> Iterator[tuple[str, Cluster]]:
    fastest = max(base.stages, key=lambda stage: len(stage.part.layers) / max(stage.alone_s, 1e-9)).machine
    name = f"another {fastest.name}"
    twin = replace(fastest, room=replace(fastest.room, node_id=_free_name(cluster), name=name))
    yield f"one more machine like {fastest.name}", cluster.with_machine(twin)


def _try(label: str, demand: Demand, cluster: Cluster, constraints: Constraints) -> Alternative:
    try:
        return Alternative(what=label, plan=plan(demand, cluster.machines, cluster.links, constraints, explain=False))
    except NoFeasiblePlacement as error:
        return Alternative(what=label, plan=None, why_not=error.what)


def _changes(text: str) -> list[str]:
    """Split at commas. A part that begins with a digit (a link's latency) belongs to the previous part."""
    parts: list[str] = []
    for part in (piece.strip() for piece in text.split(",")):
        if parts and re.match(r"\d", part):
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _with_link(cluster: Cluster, text: str) -> Cluster:
    """Change links by ``2.5gbit`` or ``1gbit,0.3ms``, after an optional node. The default latency is a cable's."""
    words = text.split()
    nodes = [_machine(cluster, words[0]).node_id] if len(words) == 2 else []
    shape = parse_link(words[-1])
    if "," not in words[-1] and not shape.ideal and named_link(words[-1]) is None:
        shape = replace(shape, one_way_s=_CABLE.one_way_s)
    return cluster.with_links(shape, nodes)


def _new_machine(cluster: Cluster, text: str) -> Machine:
    machine = table_machine(_free_name(cluster), named_device(text), cluster.config, cluster.weights, cluster.kv)
    return replace(machine, room=replace(machine.room, name=f"new {text}"))


def _free_name(cluster: Cluster) -> NodeId:
    taken = {machine.node_id for machine in cluster.machines}
    return NodeId(next(f"new-{name}" for name in names(len(taken) + 1) if f"new-{name}" not in taken))


def _machine(cluster: Cluster, name: str) -> Machine:
    found = [machine for machine in cluster.machines if name in (machine.name, machine.node_id)]
    if len(found) != 1:
        known = ", ".join(machine.name for machine in cluster.machines)
        raise PlanInvalid(
            f"'{name}' is not one node of the cluster", fact=f"nodes: {known}", next_step="name one of them"
        )
    return found[0]
