"""Place several independent pipelines of one model on disjoint machines, and compare them with one pipeline. PURE.

A replica reads its weights for its own share of the conversations only, has fewer hops and less room for KV. Which
number of replicas gives the most tokens per second depends on the concurrency, so layouts are compared by the forecast
for the wanted number of conversations. A faster replica gets a larger share of them; gateways keep to these shares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil, sqrt

from edgepipe.errors import NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import NodeId
from edgepipe.planner.constraints import Constraints, choose_machines
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.placement import Need, stage_weight_bytes
from edgepipe.planner.plan import Plan, plan
from edgepipe.planner.profiles import Links, Machine
from edgepipe.planner.shortage import shortage_of
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.units import format_bytes

MOST_REPLICAS = 16
"""Pipelines of one model: more than a home has machines for."""
_MOST_EXACT = 8  # machines; more are grouped by speed, then improved by exchanges
_REFINED = 4  # groupings whose shares are computed
_MOST_EXCHANGES = 200  # plans that improve a grouping of many machines
# KV of a running conversation over the tokens that it reads on average: engines take blocks as it grows, so it seldom
# holds as many as it may. The rest is room for different lengths.
_KEPT = 1.5
# Prompt tokens computed for each token of an answer: as many, as in ShareGPT's conversations. A quarter more, as steps
# vary in size, and some are beyond the size from which on a device takes much longer.
_PROMPTS = 1.25
# Share of the time that each further stage costs under load, as steps vary: what simulated rings of two and four stages
# give, compared with single machines (``scripts/bench batch replicas``).
_BUBBLE = 0.08
_WORTH = 0.01  # smallest gain that justifies another pipeline

Group = frozenset[int]  # indices of machines


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Independent pipelines over disjoint machines; each plan's demand has its share of the conversations."""

    plans: tuple[Plan, ...]

    @property
    def tokens_per_s(self) -> float:
        """Forecast for all conversations together, in tokens per second."""
        return sum(map(rate_of, self.plans))

    @property
    def shares(self) -> tuple[float, ...]:
        """Each pipeline's share of the conversations, 1 in all."""
        whole = sum(found.demand.concurrency for found in self.plans)
        return tuple(found.demand.concurrency / whole for found in self.plans)


def rate_of(found: Plan) -> float:
    """Return the forecast of a pipeline under load, in tokens per second, less the bubbles of its ring."""
    return found.many.tokens_per_s / (1 + _BUBBLE * (len(found.stages) - 1))


def best_layout(
    demand: Demand, machines: Sequence[Machine], links: Links, constraints: Constraints | None = None
) -> tuple[Layout, ...]:
    """Return the best layout for each number of pipelines that fits, the best of them first.

    A number without a gain of ``_WORTH`` over fewer pipelines comes behind them. Raises like ``plan``.
    """
    constraints = constraints or Constraints()
    search = _Groups(demand, machines, links, constraints)
    found = [Layout(plans=(search.whole(),))]
    for count in range(2, min(len(search.able), demand.concurrency, MOST_REPLICAS) + 1):
        layout = search.best(count)
        if layout is None:
            break
        found.append(layout)
    best = found[0]
    for layout in found[1:]:
        if layout.tokens_per_s > best.tokens_per_s * (1 + _WORTH):
            best = layout
    return (best, *(layout for layout in found if layout is not best))


def layout_of(
    demand: Demand, machines: Sequence[Machine], links: Links, constraints: Constraints | None = None, *, count: int
) -> Layout:
    """Return the best layout of ``count`` pipelines.

    ``Constraints.num_nodes`` counts for each pipeline. Raises PlanInvalid for a first node, NoFeasiblePlacement with
    the largest number that fits.
    """
    constraints = constraints or Constraints()
    search = _Groups(demand, machines, links, constraints)
    if count == 1:
        return Layout(plans=(search.whole(),))
    found = search.best(count) if count <= len(search.able) else None
    if found is not None:
        return found
    short = shortage_of(demand, search.able)
    most = next((fewer for fewer in range(min(count - 1, len(search.able)), 1, -1) if search.best(fewer)), 1)
    free = ", ".join(f"{name} {format_bytes(size)}" for name, size in short.rooms) or "none"
    raise NoFeasiblePlacement(
        f"{count} replicas do not fit on {len(search.able)} machines that can compute",
        fact=f"each replica needs about {format_bytes(short.needed_bytes)} on machines of its own; free: {free}",
        next_step=(
            f"give --replicas {most}, or start another node"
            if most > 1
            else "leave --replicas out, or start another node"
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLayout:
    """A layout in which running pipelines keep their machines; their plans come first."""

    layout: Layout
    kept: tuple[int, ...]  # indices of the pipelines that stay, in the list that was given


def layout_around(
    demand: Demand,
    machines: Sequence[Machine],
    links: Links,
    constraints: Constraints | None = None,
    *,
    running: Sequence[Collection[NodeId]],
    count: int,
) -> KeptLayout | None:
    """Return the best layout of ``count`` pipelines that keeps running ones as they are; None if it does not fit.

    ``running``: the machines of each pipeline. The first one stays in any case; of the others those stay that give
    most. Further pipelines go on machines that none of ``running`` has. Raises like ``layout_of``.
    """
    constraints = constraints or Constraints()
    search = _Groups(demand, machines, links, constraints)
    return search.around([search.group_of(nodes) for nodes in running], count)


def layouts_text(layouts: Sequence[Layout]) -> str:
    """Say which number of pipelines was chosen, and what the others would give."""
    chosen, *others = (f"{_kind(layout)}: {layout.tokens_per_s:.0f} tok/s" for layout in layouts)
    beside = f" ({', '.join(others)})" if others else ""
    return f"{chosen} by forecast{beside}"


def _kind(layout: Layout) -> str:
    return "one pipeline" if len(layout.plans) == 1 else f"{len(layout.plans)} replicas"


class _Groups:
    """One search for groups of machines."""

    def __init__(self, demand: Demand, machines: Sequence[Machine], links: Links, constraints: Constraints) -> None:
        if constraints.first or constraints.layers:
            flag = "--first" if constraints.first else "--plan"
            raise PlanInvalid(f"{flag} and --replicas contradict each other", next_step="give one of them")
        kept = min(demand.context_tokens, int(_KEPT * demand.read_tokens))
        prompts = demand.prompt_share or _PROMPTS
        self._demand = replace(demand, objective=Objective.THROUGHPUT, context_tokens=kept, prompt_share=prompts)
        self._machines = machines
        self._links = links
        self._constraints = constraints
        self.able, _ = choose_machines(machines, constraints)
        self._plans: dict[tuple[Group, int], Plan | None] = {}
        need = Need(config=demand.config, kv_tokens=0, weights=demand.weights)
        whole = Slice(index=0, layers=LayerRange(0, demand.config.num_layers), embedding=True, head=True)
        self._least_bytes = min((stage_weight_bytes(need, machine.room, whole) for machine in self.able), default=0)

    def whole(self) -> Plan:
        """Return the plan of one pipeline for all conversations. Raises like ``plan``."""
        return plan(self._demand, self._machines, self._links, self._constraints, explain=False)

    def best(self, count: int) -> Layout | None:
        """Return the best layout of ``count`` pipelines, None if they do not fit."""
        share = ceil(self._demand.concurrency / count)
        whole = range(len(self.able))
        few = len(whole) <= _MOST_EXACT
        groupings = (self._ranked if few else self._improved)(count, share, whole)
        refined = [layout for groups in groupings if (layout := self._shared(groups)) is not None]
        return max(refined, key=lambda layout: layout.tokens_per_s, default=None)

    def group_of(self, nodes: Collection[NodeId]) -> Group:
        """Return machines as a group; machines that cannot be used are left out."""
        return frozenset(index for index, machine in enumerate(self.able) if machine.node_id in nodes)

    def around(self, running: Sequence[Group], count: int) -> KeptLayout | None:
        """Return the best layout of ``count`` pipelines that keeps running ones. See ``layout_around``."""
        share = ceil(self._demand.concurrency / count)
        others = sorted(range(1, len(running)), key=lambda index: -self._rate(running[index], share))
        kept = tuple(sorted([0, *others][:count]))
        groups = tuple(running[index] for index in kept)
        if count > len(kept):
            taken = frozenset[int]().union(*running)
            free = [index for index in range(len(self.able)) if index not in taken]
            more = count - len(kept)
            if more > len(free):
                return None
            few = len(free) <= _MOST_EXACT
            found = (self._ranked if few else self._improved)(more, share, free)
            layouts = [self._shared((*groups, *each)) for each in found]
            best = max(filter(None, layouts), key=lambda layout: layout.tokens_per_s, default=None)
        else:
            best = self._shared(groups)
        return KeptLayout(layout=best, kept=kept) if best is not None else None

    def _rate(self, group: Group, concurrency: int) -> float:
        """Return the forecast of a group's pipeline; 0 if the model does not fit."""
        found = self._plan(group, concurrency)
        return rate_of(found) if found is not None else 0.0

    def _plan(self, group: Group, concurrency: int) -> Plan | None:
        key = (group, concurrency)
        if key not in self._plans:
            self._plans[key] = self._new_plan(group, concurrency)
        return self._plans[key]

    def _new_plan(self, group: Group, concurrency: int) -> Plan | None:
        own = [self.able[index] for index in sorted(group)]
        beside = sum(machine.room.ram_bytes for machine in own) if self._constraints.experts_in_ram else 0
        free = sum(max(0, machine.room.free_bytes) for machine in own) + beside
        if free < self._least_bytes or len(own) < self._constraints.num_nodes:
            return None
        demand = replace(self._demand, concurrency=concurrency)
        constraints = replace(self._constraints, exclude=())
        try:
            return plan(demand, own, self._links, constraints, explain=False)
        except NoFeasiblePlacement:
            return None

    def _ranked(self, count: int, share: int, places: Sequence[int]) -> list[tuple[Group, ...]]:
        """Return the best groupings of few machines, by their places, for equal shares. The best comes first."""
        rated = [
            (sum(rates), groups)
            for groups in (_at(places, each) for each in _partitions(len(places), count))
            if all(rates := [self._rate(group, share) for group in groups])
        ]
        return [groups for _, groups in sorted(rated, key=lambda pair: -pair[0])[:_REFINED]]

    def _improved(self, count: int, share: int, places: Sequence[int]) -> list[tuple[Group, ...]]:
        """Group many machines by free memory, then move and exchange machines as long as that gains."""
        order = sorted(places, key=lambda index: -self.able[index].room.free_bytes)
        groups: list[set[int]] = [set() for _ in range(count)]
        for index in order:
            smallest = min(groups, key=lambda group: sum(self.able[each].room.free_bytes for each in group))
            smallest.add(index)
        best = [frozenset(group) for group in groups]
        rate = self._sum(best, share)
        tried = len(self._plans) + _MOST_EXCHANGES
        improved = True
        while improved and len(self._plans) < tried:
            improved = False
            for other in _neighbours(best):
                if len(self._plans) >= tried:
                    break
                if (better := self._sum(other, share)) > rate * (1 + _WORTH):
                    best, rate, improved = other, better, True
                    break
        return [tuple(best)] if rate else []

    def _sum(self, groups: Sequence[Group], share: int) -> float:
        """Return the groups' rate together; 0 unless the model fits on each."""
        rates = [self._rate(group, share) for group in groups]
        return sum(rates) if all(rates) else 0.0

    def _shared(self, groups: Sequence[Group]) -> Layout | None:
        """Share the conversations among the groups. Return None if one does not fit.

        The rate of a pipeline grows with its conversations c as R c / (c + h). Of pipelines with the same h, shares in
        proportion to the root of R give the most together.
        """
        equal = shares_by_speed(self._demand.concurrency, [1.0] * len(groups))
        rates = [self._rate(group, max(equal)) for group in groups]
        if not all(rates):
            return None
        shares = shares_by_speed(self._demand.concurrency, [sqrt(rate) for rate in rates])
        plans = [self._plan(group, share) for group, share in zip(groups, shares, strict=True)]
        fitting = tuple(found for found in plans if found is not None)
        return Layout(plans=fitting) if len(fitting) == len(groups) else None


def shares_by_speed(concurrency: int, rates: Sequence[float]) -> list[int]:
    """Share conversations in proportion to speeds. Each gets one at least, even if there are fewer."""
    spare, whole = max(0, concurrency - len(rates)), sum(rates)
    exact = [1 + spare * rate / whole for rate in rates]
    shares = [int(share) for share in exact]
    for index in sorted(range(len(rates)), key=lambda index: shares[index] - exact[index])[
        : spare + len(rates) - sum(shares)
    ]:
        shares[index] += 1
    return shares


def _partitions(size: int, count: int) -> Iterator[tuple[Group, ...]]:
    """Yield every partition of ``range(size)`` into ``count`` groups once."""

    def of(rest: Group, parts: int) -> Iterator[tuple[Group, ...]]:
        if parts == 1:
            yield (rest,)
            return
        first = min(rest)
        others = sorted(rest - {first})
        for taken in range(len(rest) - parts + 1):
            for beside in combinations(others, taken):
                group = frozenset((first, *beside))
                for further in of(rest - group, parts - 1):
                    yield (group, *further)

    if 1 <= count <= size:
        yield from of(frozenset(range(size)), count)


def _at(places: Sequence[int], groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return groups of positions in ``places`` as groups of places."""
    return tuple(frozenset(places[position] for position in group) for group in groups)


def _neighbours(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Yield the groupings in which one machine is elsewhere, or two have changed places."""
    for here, there in combinations(range(len(groups)), 2):
        a, b = groups[here], groups[there]
        moved = [(a - {x}, b | {x}) for x in sorted(a) if len(a) > 1]
        moved += [(a | {x}, b - {x}) for x in sorted(b) if len(b) > 1]
        moved += [(a - {x} | {y}, b - {y} | {x}) for x in sorted(a) for y in sorted(b)]
        for first, second in moved:
            changed = list(groups)
            changed[here], changed[there] = first, second
            yield changed
