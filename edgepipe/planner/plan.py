"""Find a placement from machines, links and the user's constraints, with reasons. PURE."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

from edgepipe.errors import NoFeasiblePlacement
from edgepipe.ids import NodeId
from edgepipe.planner.constraints import Constraints, LeftOut, choose_machines
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.expert_shares import Without, place_with_shares, plan_with_shares
from edgepipe.planner.forecast import Forecast, PromptForecast, Ring
from edgepipe.planner.placement import Placed, ram_stage_bytes
from edgepipe.planner.profiles import Links, Machine
from edgepipe.planner.search import Search, need_of, weight_bytes
from edgepipe.planner.shortage import narrower_kv, too_small, with_kv
from edgepipe.spec.facts import Slice
from edgepipe.spec.memory_classes import most_within

_Result = TypeVar("_Result")

_CONTEXT_STEP = 256  # tokens; granularity of the largest context that fits
_FORM_LOSS = 0.03  # see ``_most_context``, for forms of KV that the user did not ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One slice on its machine."""

    machine: Machine
    part: Slice
    weight_bytes: int
    kv_bytes: int  # KV bytes for the plan's KV tokens
    step_s: float  # time of one micro-batch
    alone_s: float  # time of a single chat's token
    ram_bytes: int = 0  # bytes of experts in host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement with its forecast."""

    demand: Demand
    stages: tuple[PlannedStage, ...]
    engine: NodeId  # best node for the engine
    kv_tokens: int  # capacity of every stage
    single: Forecast  # forecast for a single chat
    many: Forecast  # forecast for as many chats as are requested and fit
    prompt: PromptForecast  # prompt of ``demand.read_tokens`` in an idle ring
    left_out: tuple[LeftOut, ...] = ()
    gap: float = 0.0  # upper bound of the share by which the cycle could be shorter; 0: the plan is optimal
    without_ram: Without | None = None  # the best without experts in host memory, if the planner chose some

    @property
    def placed(self) -> tuple[Placed, ...]:
        """The placement without figures."""
        return tuple(
            Placed(node_id=stage.machine.node_id, part=stage.part, ram_percent=stage.machine.room.ram_percent)
            for stage in self.stages
        )

    @property
    def most_slots(self) -> int:
        """Bound on the slots of states, for ``StageSettings``; 0: none."""
        return self.stages[0].machine.room.most_slots

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second by the objective."""
        return (self.single if self.demand.objective is Objective.LATENCY else self.many).tokens_per_s

    @property
    def measured(self) -> bool:
        """Whether all its devices and links were measured."""
        hops = all(hop.link.measured for hop in self.single.hops)
        return hops and all(stage.machine.speed.source == "measured" for stage in self.stages)


def plan(
    demand: Demand,
    machines: Sequence[Machine],
    links: Links,
    constraints: Constraints | None = None,
    *,
    explain: bool = True,
) -> Plan:
    """Find the best placement within the constraints. ``explain``: give reasons for unused machines.

    Raises PlanInvalid if constraints contradict each other or the cluster, NoFeasiblePlacement with the arithmetic,
    and LinkNotMeasured for a link without measured or assumed figures.
    """
    constraints = constraints or Constraints()
    able, excluded = choose_machines(machines, constraints)
    chosen = any(machine.room.most_slots for machine in able)  # the model is served already
    choices = [0] if chosen else demand.slot_choices()
    return with_fewest_given_up(
        choices,
        lambda most_slots: _plan(
            demand,
            [machine.with_most_slots(most_slots) for machine in able] if most_slots else able,
            links=links,
            constraints=constraints,
            excluded=excluded,
            explain=explain,
            advise=most_slots == choices[-1],
        ),
    )


def with_fewest_given_up(choices: Sequence[int], attempt: Callable[[int], _Result]) -> _Result:
    """Return the first attempt that finds a placement, of those with ever fewer slots of states.

    Raises the last one's NoFeasiblePlacement if none does.
    """
    for most_slots in choices[:-1]:
        with contextlib.suppress(NoFeasiblePlacement):
            return attempt(most_slots)
    return attempt(choices[-1])


def _plan(
    demand: Demand,
    able: Sequence[Machine],
    *,
    links: Links,
    constraints: Constraints,
    excluded: Sequence[LeftOut],
    explain: bool,
    advise: bool,
) -> Plan:
    """See ``plan``, for a bound on the slots of states. ``advise``: an error names the largest context that fits."""
    if constraints.layers:
        rooms = [machine.room for machine in able]
        need = need_of(demand, demand.least_kv_tokens)
        placed = place_with_shares(need, rooms, constraints.layers, constraints.experts_in_ram)
        return describe(demand, placed, able, links)
    best = partial(_best_plan, demand, links=links, constraints=constraints, excluded=excluded, advise=advise)
    if not constraints.experts_in_ram:
        return best(able, explain=explain)
    return plan_with_shares(
        demand,
        able,
        constraints.experts_in_ram,
        search=best,
        describe=lambda placed: describe(demand, placed, able, links),
        num_nodes=constraints.num_nodes,
        explain=explain,
    )


def _best_plan(
    demand: Demand,
    able: Sequence[Machine],
    *,
    links: Links,
    constraints: Constraints,
    excluded: Sequence[LeftOut],
    explain: bool,
    advise: bool,
) -> Plan:
    """Return the best plan for machines as they are. See ``_plan``."""
    search = Search(demand, able, links, constraints)
    found = search.best()
    if found is None:
        error = too_small(demand, able, num_nodes=constraints.num_nodes)
        obstacles = [unused.machine.obstacle for unused in excluded if unused.machine.obstacle]
        fact, next_step = "; ".join([error.fact, *obstacles]), error.next_step
        if advise and demand.must_keep_tokens and (advice := _context_advice(demand, able, links, constraints)):
            next_step = f"{advice}; or {next_step}"
        raise error.changed(fact=fact, next_step=next_step)
    partition, kv_tokens = found
    result = describe(demand, search.placed(partition), able, links)
    _check_reached(result, links)
    gap = max(0.0, 1 - partition.bound_s / partition.cycle_s)
    left_out = [*excluded, *search.left_out(partition, kv_tokens)] if explain else excluded
    return replace(result, left_out=tuple(left_out), gap=gap)


def _context_advice(demand: Demand, machines: Sequence[Machine], links: Links, constraints: Constraints) -> str:
    """Name the largest context that fits, with the machines' form of KV and with each that takes less memory."""
    most = {"": _most_context(demand, machines, links, constraints)}
    whole = replace(demand, must_keep_tokens=demand.config.context_length)
    for form in narrower_kv(demand, machines):
        most[f" with --kv {form}"] = _most_context(whole, with_kv(machines, form), links, constraints, loss=_FORM_LOSS)
    found = [f"--context {tokens} or less{form}" for form, tokens in most.items() if tokens]
    return f"give {', '.join(found)}" if found else ""


def _most_context(
    demand: Demand, machines: Sequence[Machine], links: Links, constraints: Constraints, *, loss: float = 0.0
) -> int:
    """Return the largest context that fits, in steps of ``_CONTEXT_STEP``; 0 if the model does not fit.

    ``loss``: part of it that may be missing, which saves searches.
    """
    fits, too_many = 0, demand.must_keep_tokens // _CONTEXT_STEP + 1
    tried = too_many - 1 if loss else too_many // 2  # all may fit
    while too_many - fits > max(1, loss * fits):
        fewer = replace(demand, must_keep_tokens=tried * _CONTEXT_STEP)
        if Search(fewer, machines, links, constraints).best() is not None:
            fits = tried
        else:
            too_many = tried
        tried = (fits + too_many) // 2
    return fits * _CONTEXT_STEP


def describe(demand: Demand, placed: Sequence[Placed], machines: Sequence[Machine], links: Links) -> Plan:
    """Return a placement with its figures. Raises LinkNotMeasured."""
    shares = {stage.node_id: stage.ram_percent for stage in placed}
    by_id = {machine.node_id: machine.with_ram_percent(shares.get(machine.node_id, 0)) for machine in machines}
    need = need_of(demand, 0)
    kv_tokens = _kv_room(demand, placed, by_id)
    ring = Ring(demand, placed, by_id, links)
    room = by_id[placed[0].node_id].room
    chats = demand.sequences(kv_tokens, most_slots=room.most_slots, rest_tokens=room.rest_tokens)
    single, many = ring.of(1, 1), ring.best(chats)
    wanted = min(kv_tokens, demand.kv_of(demand.concurrency, room.rest_tokens))
    stages = tuple(
        PlannedStage(
            machine=by_id[each.node_id],
            part=each.part,
            weight_bytes=weight_bytes(demand, by_id[each.node_id].room, each.part),
            kv_bytes=by_id[each.node_id].room.kv_bytes(demand.config, each.part.layers, wanted),
            step_s=many.step_s[index],
            alone_s=single.step_s[index],
            ram_bytes=ram_stage_bytes(need, by_id[each.node_id].room, each.part.layers),
        )
        for index, each in enumerate(placed)
    )
    return Plan(
        demand=demand,
        stages=stages,
        engine=_engine_place(placed, links),
        kv_tokens=kv_tokens,
        single=single,
        many=many,
        prompt=ring.prompt(demand.read_tokens),
    )


def _check_reached(found: Plan, links: Links) -> None:
    """Raises NoFeasiblePlacement if two neighbours of the best placement do not reach each other."""
    machines = [stage.machine for stage in found.stages]
    for sender, receiver in pairwise(machines):
        if not links.carries_hop(sender.node_id, receiver.node_id):
            raise NoFeasiblePlacement(
                f"the model fits only with {sender.name} next to {receiver.name}, which do not reach each other",
                fact=f"it needs {len(machines)} machines: {', '.join(machine.name for machine in machines)}",
                next_step="see 'edgepipe doctor' on either of them, or start another node",
            )


def _engine_place(placed: Sequence[Placed], links: Links) -> NodeId:
    """Return the best node for the engine: the shortest path from the last stage over the engine to the first.

    That is the first stage's node unless another one has a shorter path.
    """
    first, last = placed[0].node_id, placed[-1].node_id

    def way_s(node: NodeId) -> float:
        legs = [(last, node), (node, first)]
        return sum(links.between(a, b).shape.one_way_s for a, b in legs if a != b)

    return min(dict.fromkeys(stage.node_id for stage in placed), key=lambda node: (way_s(node), node != first))


def _kv_room(demand: Demand, placed: Sequence[Placed], machines: Mapping[NodeId, Machine]) -> int:
    """Return the KV tokens that fit on the tightest node beside its weights."""
    free = {node_id: machine.room.free_bytes for node_id, machine in machines.items()}
    layers: dict[NodeId, list[int]] = {}
    for stage in placed:
        free[stage.node_id] -= weight_bytes(demand, machines[stage.node_id].room, stage.part)
        layers.setdefault(stage.node_id, []).extend(stage.part.layers)
    return min(
        most_within(free[node_id], partial(machines[node_id].room.kv_bytes, demand.config, own))
        for node_id, own in layers.items()
    )
