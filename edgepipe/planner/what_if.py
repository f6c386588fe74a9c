"""Other clusters and other aims beside a plan: what they would change, and what would help most. PURE."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from edgepipe.backend.devices import named_device
from edgepipe.errors import ConfigInvalid, NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import NodeId
from edgepipe.planner.cluster import Cluster, names, table_machine
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.plan import Plan, Wishes, plan
from edgepipe.planner.profiles import Machine
from edgepipe.units import LinkShape, format_rate, parse_bytes, parse_link

_CABLE = LinkShape(bytes_per_s=125e6, one_way_s=0.0003)  # gigabit Ethernet through a home switch
_FASTER_CABLE = LinkShape(bytes_per_s=312.5e6, one_way_s=0.0002)
_MORE_BYTES = 8_000_000_000
_WORTH_TELLING = 0.03
_MOST_HELPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way, and what it would give."""

    what: str
    plan: Plan | None  # None: it does not fit
    why_not: str = ""

    def gain_over(self, base: Plan) -> float:
        """Of what the objective counts; 0.1 is a tenth more."""
        return self.plan.tokens_per_s / base.tokens_per_s - 1 if self.plan is not None else -1.0


def changed(cluster: Cluster, text: str) -> Cluster:
    """The cluster with changes such as ``"add rtx4090, link 2.5gbit,0.2ms, memory studio 96GB, remove laptop"``.

    Raises ConfigInvalid for what is no change, PlanInvalid for a node that is not there.
    """
    for change in _changes(text):
        verb, _, rest = change.partition(" ")
        rest = rest.strip()
        if verb == "add" and rest:
            cluster = cluster.with_machine(_new_machine(cluster, rest))
        elif verb == "remove" and rest:
            gone = _machine(cluster, rest)
            cluster = replace(cluster, machines=tuple(one for one in cluster.machines if one is not gone))
        elif verb == "link" and rest:
            cluster = _with_link(cluster, rest)
        elif verb == "memory" and len(rest.split()) == 2:
            name, size = rest.split()
            machine = _machine(cluster, name)
            cluster = cluster.with_memory(machine.node_id, parse_bytes(size) - machine.room.free_bytes)
        else:
            raise ConfigInvalid(
                f"'{change}' is no change that can be imagined",
                fact="there are: add DEVICE, remove NODE, link [NODE] RATE[,LATENCY], memory NODE SIZE",
                next_step='write it like "add rtx4090, link 2.5gbit"',
            )
    return cluster


def alternatives(demand: Demand, cluster: Cluster, base: Plan, wishes: Wishes) -> Iterator[Alternative]:
    """What would be done without wishes, the best single machine, and the best plan for the other aim, where they are
    others."""
    if wishes != Wishes():
        free = _try("without wishes", demand, cluster, Wishes())
        if free.plan is not None and free.plan.placed != base.placed:
            yield free
    if len(base.stages) > 1:
        yield _try("best single machine", demand, cluster, Wishes(num_nodes=1))
    other = Objective.THROUGHPUT if demand.objective is Objective.LATENCY else Objective.LATENCY
    found = _try(f"--objective {other.value}", replace(demand, objective=other), cluster, Wishes())
    if found.plan is not None and found.plan.placed != base.placed:
        yield found


def helps(demand: Demand, cluster: Cluster, base: Plan, wishes: Wishes) -> list[Alternative]:
    """What would gain the most with the same wishes, the best first: cables, memory, one more machine."""
    tried = [
        _try(what, demand, other, wishes)
        for what, other in [*_better_links(cluster, base), *_more_memory(cluster, base), *_one_more(cluster, base)]
    ]
    worth = [one for one in tried if one.gain_over(base) >= _WORTH_TELLING]
    return sorted(worth, key=lambda one: -one.gain_over(base))[:_MOST_HELPS]


def _better_links(cluster: Cluster, base: Plan) -> Iterator[tuple[str, Cluster]]:
    shapes = [hop.link.shape for hop in base.one.hops]
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
        if machine.room.shares_host_memory and not machine.device.startswith("Apple"):  # others cannot be given more
            yield f"8 GB more RAM in {machine.name}", cluster.with_memory(machine.node_id, _MORE_BYTES)


def _one_more(cluster: Cluster, base: Plan) -> Iterator[tuple[str, Cluster]]:
    fastest = max(base.stages, key=lambda stage: len(stage.part.layers) / max(stage.alone_s, 1e-9)).machine
    name = f"another {fastest.name}"
    twin = replace(fastest, room=replace(fastest.room, node_id=_free_name(cluster), name=name))
    yield f"one more machine like {fastest.name}", cluster.with_machine(twin)


def _try(what: str, demand: Demand, cluster: Cluster, wishes: Wishes) -> Alternative:
    try:
        return Alternative(what=what, plan=plan(demand, cluster.machines, cluster.links, wishes, explain=False))
    except NoFeasiblePlacement as error:
        return Alternative(what=what, plan=None, why_not=error.what)


def _changes(text: str) -> list[str]:
    """Parts between commas; one that begins with a number belongs to the part before it (a link's latency)."""
    parts: list[str] = []
    for part in (one.strip() for one in text.split(",")):
        if parts and re.match(r"\d", part):
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _with_link(cluster: Cluster, text: str) -> Cluster:
    """``2.5gbit``, ``1gbit,0.3ms``, or with the node first whose links change; a latency not given stays small."""
    words = text.split()
    nodes = [_machine(cluster, words[0]).node_id] if len(words) == 2 else []
    shape = parse_link(words[-1])
    if "," not in words[-1] and not shape.ideal:
        shape = replace(shape, one_way_s=_CABLE.one_way_s)
    return cluster.with_links(shape, nodes)


def _new_machine(cluster: Cluster, text: str) -> Machine:
    machine = table_machine(_free_name(cluster), named_device(text), cluster.config)
    return replace(machine, room=replace(machine.room, name=f"new {text}"))


def _free_name(cluster: Cluster) -> NodeId:
    taken = {one.node_id for one in cluster.machines}
    return NodeId(next(f"new-{name}" for name in names(len(taken) + 1) if f"new-{name}" not in taken))


def _machine(cluster: Cluster, name: str) -> Machine:
    found = [one for one in cluster.machines if name in (one.name, one.node_id)]
    if len(found) != 1:
        known = ", ".join(one.name for one in cluster.machines)
        raise PlanInvalid(f"'{name}' is not one node of the cluster", fact=f"nodes: {known}")
    return found[0]
