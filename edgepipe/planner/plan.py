"""Find a placement from machines, links and the user's constraints, with reasons. PURE."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf
from typing import NamedTuple, TypeVar

import numpy as np

from edgepipe.backend.cost import layer_kinds
from edgepipe.errors import NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import NodeId
from edgepipe.planner.demand import Demand, Objective, batch_parts
from edgepipe.planner.expert_shares import Without, place_with_shares, plan_with_shares
from edgepipe.planner.forecast import Forecast, PromptForecast, Ring
from edgepipe.planner.hosts import hop_host_s, turn_host_s
from edgepipe.planner.partition import EXACT_DEVICES, ExactSearch, Ints, Partition, PartitionProblem, UnequalLayers
from edgepipe.planner.partition_many import ManySearch
from edgepipe.planner.partition_unequal import ManyUnequalSearch, UnequalSearch, earliest_within
from edgepipe.planner.placement import Need, NodeRoom, Placed, ram_stage_bytes, stage_weight_bytes
from edgepipe.planner.profiles import Links, Machine, Speed, StepParts
from edgepipe.planner.shortage import narrower_kv, too_small, with_kv
from edgepipe.scheduler.sizing import most_micro_batches
from edgepipe.spec.facts import LayerRange, Slice, make_slices
from edgepipe.spec.memory_classes import most_within
from edgepipe.units import format_bytes, format_duration_s
from edgepipe.weights.resident import ResidentSizes

_Result = TypeVar("_Result")

_SLACK = 0.003  # share of the objective to give up for a more even spread of work
_MUCH_LONGER = 4.0  # factor of the cycle, limit for a first search
_CONTEXT_STEP = 256  # tokens; granularity of the largest context that fits
_FORM_LOSS = 0.03  # see ``_most_context``, for forms of KV that the user did not ask for
_WORTH = 0.01  # smallest gain that justifies another device


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """The user's constraints."""

    num_nodes: int = 0  # exact number; 0: the planner decides
    exclude: tuple[str, ...] = ()  # names or ids
    layers: str = ""  # "a:0-14,b:15-29": complete placement by hand
    first: str = ""  # node of the first stage
    experts_in_ram: str = ""  # "auto" or a share of the experts such as "40%"; empty: none, but as nodes are set


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
class LeftOut:
    """A machine that the plan does not use, with the reason."""

    machine: Machine
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement with its forecast."""

    demand: Demand
    stages: tuple[PlannedStage, ...]
    engine: NodeId  # best node for the engine
    kv_tokens: int  # capacity of every stage
    single: Forecast  # forecast for a single chat
    many: Forecast  # forecast for as many chats as are requested and fit
    prompt: PromptForecast  # of ``demand.read_tokens``, in an idle ring
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
    chosen = any(machine.room.most_slots for machine in able)  # where the model is served already
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
        need = _need(demand, demand.least_kv_tokens)
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
    search = _Search(demand, able, links, constraints)
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
        if _Search(fewer, machines, links, constraints).best() is not None:
            fits = tried
        else:
            too_many = tried
        tried = (fits + too_many) // 2
    return fits * _CONTEXT_STEP


def describe(demand: Demand, placed: Sequence[Placed], machines: Sequence[Machine], links: Links) -> Plan:
    """Return a placement with its figures. Raises LinkNotMeasured."""
    shares = {stage.node_id: stage.ram_percent for stage in placed}
    by_id = {machine.node_id: machine.with_ram_percent(shares.get(machine.node_id, 0)) for machine in machines}
    need = _need(demand, 0)
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
            weight_bytes=_weight_bytes(demand, by_id[each.node_id].room, each.part),
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


def choose_machines(machines: Sequence[Machine], constraints: Constraints) -> tuple[list[Machine], list[LeftOut]]:
    """Return the machines that may be used, the roomiest first, and those that may not. Raises PlanInvalid."""
    if constraints.layers and (constraints.num_nodes or constraints.first):
        other = "--nodes" if constraints.num_nodes else "--first"
        raise PlanInvalid(f"--plan and {other} contradict each other", next_step="give one of them")
    unwanted = [_named(machines, name).node_id for name in constraints.exclude]
    if constraints.first and _named(machines, constraints.first).node_id in unwanted:
        raise PlanInvalid(
            f"{constraints.first} cannot be first and be left out", next_step="change --first or --exclude"
        )
    _check_reachable(machines, constraints)
    ordered = sorted(machines, key=lambda machine: (-machine.room.free_bytes, machine.name, machine.node_id))
    able = [machine for machine in ordered if machine.node_id not in unwanted and not machine.obstacle]
    if unwanted and not able:
        raise PlanInvalid("--exclude leaves out every node that can compute", next_step="leave out fewer")
    return able, [
        LeftOut(machine=machine, reason=machine.obstacle or "excluded by --exclude")
        for machine in ordered
        if machine not in able
    ]


def _check_reachable(machines: Sequence[Machine], constraints: Constraints) -> None:
    """Raise PlanInvalid if the user asks for layers on a machine that others do not reach."""
    asked = {part.strip().rpartition(":")[0] for part in constraints.layers.split(",")} | {constraints.first}
    for machine in machines:
        if machine.obstacle and asked & {machine.name, machine.node_id}:
            raise PlanInvalid(f"{machine.name} can get no layers now", fact=machine.obstacle)


def _named(machines: Sequence[Machine], name: str) -> Machine:
    found = [machine for machine in machines if name in (machine.name, machine.node_id)]
    if len(found) != 1:
        problem = "is the name of several nodes" if found else "is not a node that can compute"
        raise PlanInvalid(
            f"'{name}' {problem}",
            fact=f"nodes: {', '.join(sorted(f'{machine.name} ({machine.node_id})' for machine in machines)) or 'none'}",
            next_step="name the node by its id" if found else "see 'edgepipe status'",
        )
    return found[0]


class _Rooms(NamedTuple):
    """Layers that fit, by machine and flags; see ``PartitionProblem`` and ``UnequalLayers``."""

    most: Ints
    earliest: Ints


_PartitionSearch = ExactSearch | ManySearch | UnequalSearch | ManyUnequalSearch


class _Search:
    """One search over machines, KV room and micro-batches."""

    def __init__(self, demand: Demand, machines: Sequence[Machine], links: Links, constraints: Constraints) -> None:
        self._demand = demand
        self._machines = machines
        self._layers = demand.config.num_layers
        self._equal = len(set(layer_kinds(demand.config, demand.weights))) == 1
        self._constraints = constraints
        self._check_count()
        self._first = machines.index(_named(machines, constraints.first)) if constraints.first else None
        ids = [machine.node_id for machine in machines]
        self._shapes = [[None if a == b else links.hop(a, b).shape for b in ids] for a in ids]
        self._hosts_s = [links.host_s(node) for node in ids]
        one_way = [[0.0 if shape is None else shape.one_way_s for shape in row] for row in self._shapes]
        self._latency_s = np.array(one_way, dtype=np.float64).reshape(len(ids), len(ids))
        home_s = [[links.home_s(first, last, ids) for last in ids] for first in ids]
        self._home_s = np.array(home_s, dtype=np.float64).reshape(len(ids), len(ids))
        self._micro_batches = 1  # M of the partition found last
        self._parts: dict[tuple[int, float], StepParts] = {}

    def best(self) -> tuple[Partition, int] | None:
        """Return the best partition and the KV tokens that it reserves.

        Less KV may allow a faster ring, but with fewer conversations. So the first level that fits is compared with the
        next lower one.
        """
        found: list[tuple[Partition, int, int]] = []  # partition, KV tokens, M
        per_s = 0.0
        for kv_tokens in self._demand.kv_levels(self._machines[0].room.rest_tokens):
            sequences = self._sequences(kv_tokens)
            partition = self._best_with(
                kv_tokens, self._constraints.num_nodes, at_most_s=sequences / per_s if per_s else inf
            )
            if partition is not None:
                found.append((partition, kv_tokens, self._micro_batches))
                per_s = sequences / partition.cycle_s
            if per_s and (self._demand.objective is Objective.LATENCY or kv_tokens != found[0][1]):
                break
        if not found:
            return None
        partition, kv_tokens, self._micro_batches = found[-1]
        partition = self._without_needless(partition, kv_tokens)
        search = self._new_search(len(partition.devices))
        return search.balanced(self._problem_with(kv_tokens), partition, slack=_SLACK), kv_tokens

    def placed(self, partition: Partition) -> tuple[Placed, ...]:
        """Return the partition as slices."""
        ends = np.cumsum(partition.layers)
        ranges = [LayerRange(int(end - count), int(end)) for end, count in zip(ends, partition.layers, strict=True)]
        slices = make_slices(ranges, self._layers)
        return tuple(
            Placed(
                node_id=self._machines[device].node_id,
                part=part,
                ram_percent=self._machines[device].room.ram_percent,
            )
            for device, part in zip(partition.devices, slices, strict=True)
        )

    def left_out(self, partition: Partition, kv_tokens: int) -> list[LeftOut]:
        """Return the unused machines, each with the reason."""
        problem = self._problem_with(kv_tokens)
        reasons: dict[tuple[int, int], str] = {}  # equal machines share a reason
        out: list[LeftOut] = []
        for index, machine in enumerate(self._machines):
            if index in partition.devices:
                continue
            kind = id(machine.speed), machine.room.free_bytes
            if kind not in reasons:
                reasons[kind] = self._reason(index, partition, problem)
            out.append(LeftOut(machine=machine, reason=reasons[kind]))
        return out

    def _check_count(self) -> None:
        wanted = self._constraints.num_nodes
        if wanted > self._layers:
            raise PlanInvalid(
                f"{wanted} nodes cannot share {self._layers} layers",
                next_step=f"ask for at most {self._layers} nodes with --nodes",
            )
        if wanted > len(self._machines) or not self._machines:
            names = ", ".join(machine.name for machine in self._machines) or "none"
            raise NoFeasiblePlacement(
                f"{wanted} nodes are wanted, {len(self._machines)} can compute" if wanted else "no node can compute",
                fact=f"nodes with a backend: {names}",
                next_step="start another node, or ask for fewer with --nodes",
            )

    def _sequences(self, kv_tokens: int) -> int:
        if self._demand.objective is Objective.LATENCY:
            return 1
        room = self._machines[0].room
        return self._demand.sequences(kv_tokens, most_slots=room.most_slots, rest_tokens=room.rest_tokens)

    def _best_with(self, kv_tokens: int, count: int, *, at_most_s: float = inf, most: int = 0) -> Partition | None:
        """Return the best partition over all M, or those up to ``most``."""
        sequences, best = self._sequences(kv_tokens), None
        search = self._new_search(count)
        room = self._rooms(kv_tokens)
        below_s = at_most_s
        for micro_batches in range(1, min(sequences, most or most_micro_batches(len(self._machines))) + 1):
            problem = self._instance(micro_batches, sequences, room)
            found = search.best(problem, below_s=below_s)
            if found is not None:
                best, below_s = found, found.cycle_s
                self._micro_batches = micro_batches
        return best

    def _without_needless(self, partition: Partition, kv_tokens: int) -> Partition:
        """Use fewer devices as long as that costs less than ``_WORTH``."""
        most_s, bound_s = partition.cycle_s * (1 + _WORTH), partition.bound_s
        while not self._constraints.num_nodes and len(partition.devices) > 1:
            fewer = self._best_with(kv_tokens, len(partition.devices) - 1, at_most_s=most_s, most=self._micro_batches)
            if fewer is None:
                break
            partition = replace(fewer, bound_s=min(bound_s, fewer.cycle_s))
        return partition

    def _new_search(self, count: int, must: Sequence[int] = ()) -> _PartitionSearch:
        few = len(self._machines) <= EXACT_DEVICES
        if self._equal:
            kind = ExactSearch if few else ManySearch
        else:
            kind = UnequalSearch if few else ManyUnequalSearch
        return kind(len(self._machines), count=count, first=self._first, must=must)

    def _problem_with(self, kv_tokens: int) -> PartitionProblem:
        """Return the problem with the M of the partition found last."""
        return self._instance(self._micro_batches, self._sequences(kv_tokens), self._rooms(kv_tokens))

    def _reason(self, index: int, partition: Partition, problem: PartitionProblem) -> str:
        room, machine = problem.most_layers[index], self._machines[index]
        if room.max() < 1:
            return f"{format_bytes(max(0, machine.room.free_bytes))} free cannot hold one layer and its KV"
        if self._constraints.num_nodes:
            return f"--nodes asks for {self._constraints.num_nodes}"
        search = self._new_search(0, must=(index,))
        with_it = search.best(problem, below_s=_MUCH_LONGER * partition.cycle_s, near_s=partition.server_s)
        with_it = with_it or search.best(problem)
        if with_it is None:
            return "no ring with it fits"
        loss = with_it.cycle_s / partition.cycle_s - 1
        if loss < _WORTH:
            return "it would gain less than 1 %"
        position = with_it.devices.index(index)
        own = [hop for hop in pairwise(with_it.devices) if index in hop]
        link_s = float(sum(problem.upload_s[hop] + problem.latency_s[hop] for hop in own))
        step_s = problem.stage_s(index, with_it.layers_at(position))
        why = f"its links: {format_duration_s(link_s)} a token" if link_s > step_s else "it is slower"
        return f"it would slow each token by {loss * 100:.0f} % ({why})"

    def _rooms(self, kv_tokens: int) -> _Rooms:
        """Return the layers that fit on each machine."""
        config, weights = self._demand.config, self._demand.weights
        most = np.zeros((len(self._machines), 4), dtype=np.int64)
        earliest = np.zeros((len(self._machines), 4, config.num_layers + 1), dtype=np.int64)
        # Machines that keep weights alike share their runs.
        runs: dict[tuple[ResidentSizes, tuple[int, ...]], list[Ints]] = {}
        for index, machine in enumerate(self._machines):
            sizes = machine.room.sizes(config, weights)
            kv = machine.room.layers_kv_bytes(config, kv_tokens)
            layers = np.array(sizes.layers, dtype=np.int64) + kv
            if (sizes, kv) not in runs:
                runs[sizes, kv] = _run_bytes(layers)
            free = [machine.room.free_bytes - sizes.of_tables(_slice(flags)) for flags in range(4)]
            most[index] = [
                np.searchsorted(run, room, side="right") for run, room in zip(runs[sizes, kv], free, strict=True)
            ]
            if not self._equal:
                earliest[index] = earliest_within(layers, free)
            if machine.room.ram_bytes and any(sizes.in_ram):
                in_ram = np.array(sizes.in_ram, dtype=np.int64)
                beside = [np.searchsorted(run, machine.room.ram_bytes, side="right") for run in _run_bytes(in_ram)]
                most[index] = np.minimum(most[index], beside)
                if not self._equal:
                    ram = [machine.room.ram_bytes] * len(free)
                    earliest[index] = np.maximum(earliest[index], earliest_within(in_ram, ram))
        return _Rooms(most=most, earliest=earliest)

    def _instance(self, micro_batches: int, sequences: int, rooms: _Rooms) -> PartitionProblem:
        demand = self._demand
        rows = sequences / micro_batches
        parts = [self._parts_of(machine.speed, rows) for machine in self._machines]
        layer_s = np.stack([times.layer_s for times in parts])
        num_bytes = rows * (1 + demand.prompt_share) * demand.hop_bytes
        uploads = [[inf if shape is None else num_bytes / shape.bytes_per_s for shape in row] for row in self._shapes]
        hop_hosts_s = np.array([hop_host_s(host_s, num_bytes) for host_s in self._hosts_s])
        turn_hosts_s = np.array([turn_host_s(host_s, rows) for host_s in self._hosts_s])
        unequal = None
        if not self._equal:
            done_s = np.pad(np.cumsum(layer_s, axis=1), ((0, 0), (1, 0)))
            unequal = UnequalLayers(done_s=done_s, earliest=rooms.earliest)
        return PartitionProblem(
            num_layers=self._layers,
            micro_batches=micro_batches,
            base_s=np.array([times.base_s for times in parts]),
            layer_s=layer_s.mean(axis=1) if unequal is not None else layer_s[:, 0],
            head_s=np.array([times.head_s for times in parts]),
            most_layers=rooms.most,
            upload_s=np.array(uploads, dtype=np.float64),
            latency_s=self._latency_s + hop_hosts_s[None, :],
            closing_s=self._home_s.T + turn_hosts_s[:, None],
            unequal=unequal,
        )

    def _parts_of(self, speed: Speed, rows: float) -> StepParts:
        """Return a machine's step times, cached for machines of equal speed."""
        key = (id(speed), rows)
        if key not in self._parts:
            self._parts[key] = batch_parts(speed, self._demand, rows)
        return self._parts[key]


def _run_bytes(layers: Ints) -> list[Ints]:
    """Return, by a stage's flags, the bytes of its first 1, 2, ... layers; of the largest runs without flags."""
    ends = np.concatenate([[0], np.cumsum(layers)])
    counts = range(1, len(layers) + 1)
    anywhere = np.array([(ends[count:] - ends[:-count]).max() for count in counts], dtype=np.int64)
    return [anywhere, ends[1:], ends[-1] - ends[-2::-1], ends[1:]]


def _engine_place(placed: Sequence[Placed], links: Links) -> NodeId:
    """Return the best node for the engine: the shortest path from the last stage over the engine to the first.

    That is the first stage's node unless another one has a shorter path.
    """
    first, last = placed[0].node_id, placed[-1].node_id

    def way_s(node: NodeId) -> float:
        legs = [(last, node), (node, first)]
        return sum(links.between(a, b).shape.one_way_s for a, b in legs if a != b)

    return min(dict.fromkeys(stage.node_id for stage in placed), key=lambda node: (way_s(node), node != first))


def _slice(flags: int) -> Slice:
    return Slice(index=0, layers=LayerRange(0, 1), embedding=bool(flags & 1), head=bool(flags & 2))


def _need(demand: Demand, kv_tokens: int) -> Need:
    return Need(config=demand.config, kv_tokens=kv_tokens, weights=demand.weights)


def _weight_bytes(demand: Demand, room: NodeRoom, part: Slice) -> int:
    return stage_weight_bytes(_need(demand, 0), room, part)


def _kv_room(demand: Demand, placed: Sequence[Placed], machines: Mapping[NodeId, Machine]) -> int:
    """Return the KV tokens that fit on the tightest node beside its weights."""
    free = {node_id: machine.room.free_bytes for node_id, machine in machines.items()}
    layers: dict[NodeId, list[int]] = {}
    for stage in placed:
        free[stage.node_id] -= _weight_bytes(demand, machines[stage.node_id].room, stage.part)
        layers.setdefault(stage.node_id, []).extend(stage.part.layers)
    return min(
        most_within(free[node_id], partial(machines[node_id].room.kv_bytes, demand.config, own))
        for node_id, own in layers.items()
    )
