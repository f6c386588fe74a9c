"""Choose which stages keep experts in host memory, and how many, for devices that are too small for the model. PURE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from edgepipe.errors import NoFeasiblePlacement
from edgepipe.ids import NodeId
from edgepipe.planner.demand import Demand, Objective
from edgepipe.planner.placement import Need, NodeRoom, Placed, place_by_plan, ram_stage_bytes, stage_bytes
from edgepipe.planner.shortage import IN_RAM, least_share, share_bytes, shortage_of
from edgepipe.spec.expert_places import AUTO, SETTING, chosen_share
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.units import format_bytes

if TYPE_CHECKING:
    from edgepipe.planner.plan import Plan
    from edgepipe.planner.profiles import Machine

_TRIED = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)  # percent of the experts; each stage's share is then refined
_WORTH = 0.01  # smallest gain that justifies experts in host memory
_ANY_BYTES = 1 << 60  # more than any machine has

Describe = Callable[[Sequence[Placed]], "Plan"]


class ShareSearch(Protocol):
    """Finds the best plan for machines as they are."""

    def __call__(self, able: Sequence[Machine], *, explain: bool) -> Plan:
        """Raises NoFeasiblePlacement."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Without:
    """The best placement without experts in host memory."""

    tokens_per_s: float = 0.0  # 0: the model does not fit
    missing_bytes: int = 0  # memory that is missing; 0: only no cut between layers fits


@dataclass(frozen=True, slots=True)
class Shared:
    """A plan with experts in host memory."""

    plan: Plan
    machines: tuple[Machine, ...]  # machines with the shares that the search found


def candidates(need: Need, rooms: Sequence[NodeRoom]) -> frozenset[NodeId]:
    """Return the nodes that can keep experts in host memory and whose device cannot hold the model with its KV."""
    if all(spec.experts is None for spec in need.config.layers):
        return frozenset()
    whole = Slice(index=0, layers=LayerRange(0, need.config.num_layers), embedding=True, head=True)
    return frozenset(
        room.node_id
        for room in rooms
        if room.ram_bytes > 0 and not room.ram_percent and stage_bytes(need, room, whole) > room.free_bytes
    )


def plan_with_shares(
    demand: Demand,
    machines: Sequence[Machine],
    wanted: str,
    *,
    search: ShareSearch,
    describe: Describe,
    num_nodes: int,
    explain: bool,
) -> Plan:
    """Return the best plan with experts in host memory where they are wanted and help.

    wanted     "auto", or a share such as "40%" for each stage whose device cannot hold its layers
    search     returns the best plan for machines as they are; raises NoFeasiblePlacement
    describe   returns the plan of a placement with shares
    num_nodes  as in ``Constraints``; ``explain`` as for ``plan``

    "auto" gives each stage the smallest share with which its device holds the rest, and only if the plan is 1 % faster
    than the best without. Raises NoFeasiblePlacement.
    """
    without, missing = None, None
    try:
        without = search(machines, explain=explain)
    except NoFeasiblePlacement as error:
        missing = error
    small = candidates(_need(demand), [machine.room for machine in machines])
    if wanted == AUTO:
        found = _fastest(demand, machines, small, search, describe)
        least_per_s = without.tokens_per_s * (1 + _WORTH) if without is not None else 0.0
        if found is None or found.plan.tokens_per_s <= least_per_s:
            if missing is not None:
                raise _without_advice(missing)
            assert without is not None
            return without
    else:
        found = _with_given(demand, machines, small, chosen_share({SETTING: wanted}), search, describe)
    short = shortage_of(demand, machines, num_nodes=num_nodes).missing_bytes if without is None else 0
    compared = Without(tokens_per_s=without.tokens_per_s if without is not None else 0.0, missing_bytes=short)
    reasons = search(found.machines, explain=True).left_out if explain else ()
    return replace(found.plan, left_out=reasons, without_ram=compared)


def _fastest(
    demand: Demand, machines: Sequence[Machine], small: frozenset[NodeId], search: ShareSearch, describe: Describe
) -> Shared | None:
    found = _plans(demand, machines, small, search, describe) if small else iter(())
    return max(found, key=lambda each: each.plan.tokens_per_s, default=None)


def _with_given(
    demand: Demand,
    machines: Sequence[Machine],
    small: frozenset[NodeId],
    percent: int,
    search: ShareSearch,
    describe: Describe,
) -> Shared:
    """Return the plan with a given share. Raises NoFeasiblePlacement, which names the share that fits."""
    shared = _with_share(machines, dict.fromkeys(small, percent))
    try:
        return Shared(_least(demand, search(shared, explain=False), machines, small, (0, percent), describe), shared)
    except NoFeasiblePlacement as error:
        rooms = [machine.room for machine in machines if machine.node_id in small]
        what, fact = error.what, error.fact
        wanted, free = (share_bytes(demand, rooms, percent), sum(room.ram_bytes for room in rooms)) if rooms else (0, 0)
        if wanted > free and len(rooms) == len(machines):
            what = f"{percent} % of the experts do not fit the RAM"
            fact = f"they need {format_bytes(wanted)}, {format_bytes(free)} of RAM are free"
        best = _fastest(demand, machines, small, search, describe)
        fits = max((stage.machine.room.ram_percent for stage in best.plan.stages), default=0) if best else 0
        advice = f"give --experts-in-ram auto, which takes {fits} %" if fits else error.next_step
        raise NoFeasiblePlacement(what, fact=fact, next_step=advice) from error


def _without_advice(error: NoFeasiblePlacement) -> NoFeasiblePlacement:
    """Return the error without the advice that did not help."""
    return NoFeasiblePlacement(error.what, fact=error.fact, next_step=error.next_step.replace(f"{IN_RAM}, or ", ""))


def place_with_shares(need: Need, rooms: Sequence[NodeRoom], layers: str, wanted: str) -> tuple[Placed, ...]:
    """Place layers by hand like ``place_by_plan``, with experts in host memory as ``wanted``; empty: none."""
    if not wanted:
        return place_by_plan(need, rooms, layers)
    empty = [replace(room, free_bytes=_ANY_BYTES, ram_bytes=_ANY_BYTES) for room in rooms]
    parts = _parts(place_by_plan(need, empty, layers))
    choices = range(101) if wanted == AUTO else (0, chosen_share({SETTING: wanted}))
    shared = [_room_with(need, room, parts.get(room.node_id, []), choices) for room in rooms]
    return place_by_plan(need, shared, layers)


def rooms_as_placed(rooms: Sequence[NodeRoom], placed: Sequence[Placed]) -> list[NodeRoom]:
    """Return the rooms with the shares of a placement."""
    shares = {stage.node_id: stage.ram_percent for stage in placed}
    return [
        room.with_ram_percent(shares[room.node_id])
        if shares.get(room.node_id, 0) not in (0, room.ram_percent)
        else room
        for room in rooms
    ]


def _plans(
    demand: Demand, machines: Sequence[Machine], small: frozenset[NodeId], search: ShareSearch, describe: Describe
) -> Iterator[Shared]:
    """Yield the best plan of each tried share, with each stage's share refined.

    If none is feasible, the first feasible one between them.
    """
    found = False
    for percent in (*_TRIED, *range(least_share(demand, machines) or 101, 101)):
        if found and percent not in _TRIED:
            return
        shared = _with_share(machines, dict.fromkeys(small, percent))
        try:
            best = search(shared, explain=False)
        except NoFeasiblePlacement:
            continue
        found = True
        yield Shared(_least(demand, best, machines, small, range(percent + 1), describe), shared)


def _least(
    demand: Demand,
    found: Plan,
    machines: Sequence[Machine],
    small: frozenset[NodeId],
    choices: Sequence[int],
    describe: Describe,
) -> Plan:
    """Return the plan with the smallest shares with which the devices hold the same layers and KV."""
    chats = demand.concurrency if demand.objective is Objective.THROUGHPUT else 1
    wanted = demand.kv_of(chats, machines[0].room.rest_tokens)
    need = replace(_need(demand), kv_tokens=min(found.kv_tokens, wanted))
    parts = _parts(found.placed)
    shares = {
        machine.node_id: _room_with(need, machine.room, parts.get(machine.node_id, []), choices).ram_percent
        for machine in machines
        if machine.node_id in small
    }
    return describe(
        [replace(stage, ram_percent=shares.get(stage.node_id, stage.ram_percent)) for stage in found.placed]
    )


def _room_with(need: Need, room: NodeRoom, parts: Sequence[Slice], choices: Sequence[int]) -> NodeRoom:
    """Return a room with the first share that lets it hold the slices; the last one if none does."""
    if room.ram_percent or not room.ram_bytes or not parts:
        return room
    return next(
        (shared for shared in (room.with_ram_percent(percent) for percent in choices) if _holds(need, shared, parts)),
        room.with_ram_percent(choices[-1]),
    )


def _holds(need: Need, room: NodeRoom, parts: Sequence[Slice]) -> bool:
    on_device = sum(stage_bytes(need, room, part) for part in parts)
    beside = sum(ram_stage_bytes(need, room, part.layers) for part in parts)
    return on_device <= room.free_bytes and beside <= room.ram_bytes


def _with_share(machines: Sequence[Machine], shares: Mapping[NodeId, int]) -> tuple[Machine, ...]:
    return tuple(machine.with_ram_percent(shares.get(machine.node_id, 0)) for machine in machines)


def _parts(placed: Sequence[Placed]) -> dict[NodeId, list[Slice]]:
    found: dict[NodeId, list[Slice]] = {}
    for stage in placed:
        found.setdefault(stage.node_id, []).append(stage.part)
    return found


def _need(demand: Demand) -> Need:
    return Need(config=demand.config, kv_tokens=demand.least_kv_tokens, weights=demand.weights)
