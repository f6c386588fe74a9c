"""Another number of pipelines for a model that is served: which machines go together then. PURE.

Pipelines that stay as they are cost nothing. So they stay unless a layout made anew is clearly faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgepipe.errors import NoFeasiblePlacement
from edgepipe.ids import NodeId
from edgepipe.planner.constraints import Constraints
from edgepipe.planner.demand import Demand
from edgepipe.planner.moving import LEAST_GAIN
from edgepipe.planner.profiles import Links, Machine
from edgepipe.planner.replicas import KeptLayout, Layout, best_layout, layout_around, layout_of

Nodes = frozenset[NodeId]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """A layout for a model that is served, and the machines of each of its pipelines."""

    layout: Layout
    groups: tuple[Nodes, ...]  # one for each plan; those of a pipeline that stays are all its machines


def regrouped(
    demand: Demand,
    machines: Sequence[Machine],
    links: Links,
    constraints: Constraints,
    *,
    running: Sequence[Nodes],
    count: int,
) -> Regrouping:
    """Return the layout for ``count`` pipelines. ``running``: the machines of each pipeline, the first one first.

    Raises like ``layout_of``.
    """
    around = layout_around(demand, machines, links, constraints, running=running, count=count)
    try:
        anew = layout_of(demand, machines, links, constraints, count=count)
    except NoFeasiblePlacement:
        if around is None:
            raise
        return _kept(around, running)
    if around is not None and around.layout.tokens_per_s * (1 + LEAST_GAIN) >= anew.tokens_per_s:
        return _kept(around, running)
    return Regrouping(layout=anew, groups=tuple(_nodes(anew, index) for index in range(len(anew.plans))))


def best_number(demand: Demand, machines: Sequence[Machine], links: Links, constraints: Constraints) -> int:
    """Return the number of pipelines with which the machines give most. Raises like ``best_layout``."""
    return len(best_layout(demand, machines, links, constraints)[0].plans)


def with_more(
    demand: Demand,
    machines: Sequence[Machine],
    links: Links,
    constraints: Constraints,
    *,
    running: Sequence[Nodes],
) -> Regrouping | None:
    """Return the layout with the most further pipelines that pay, on machines that none uses; None if none pays.

    All pipelines of ``running`` stay as they are. More have to give ``LEAST_GAIN`` more tokens per second.
    """
    now = layout_around(demand, machines, links, constraints, running=running, count=len(running))
    if now is None:
        return None
    best: KeptLayout | None = None
    rate = now.layout.tokens_per_s * (1 + LEAST_GAIN)
    for count in range(len(running) + 1, min(len(machines), demand.concurrency) + 1):
        found = layout_around(demand, machines, links, constraints, running=running, count=count)
        if found is None:
            break
        if found.layout.tokens_per_s > rate:
            best, rate = found, found.layout.tokens_per_s
    return _kept(best, running) if best is not None else None


def _kept(found: KeptLayout, running: Sequence[Nodes]) -> Regrouping:
    stay = [running[index] for index in found.kept]
    new = [_nodes(found.layout, index) for index in range(len(stay), len(found.layout.plans))]
    return Regrouping(layout=found.layout, groups=(*stay, *new))


def _nodes(layout: Layout, index: int) -> Nodes:
    return frozenset(stage.machine.node_id for stage in layout.plans[index].stages)
