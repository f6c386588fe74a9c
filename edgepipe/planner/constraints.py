"""The user's constraints, and the machines that they leave. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgepipe.errors import PlanInvalid
from edgepipe.planner.placement import room_named
from edgepipe.planner.profiles import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """The user's constraints."""

    num_nodes: int = 0  # exact number; 0: the planner decides
    exclude: tuple[str, ...] = ()  # names or ids
    layers: str = ""  # "a:0-14,b:15-29": complete placement by hand
    first: str = ""  # node of the first stage
    experts_in_ram: str = ""  # "auto" or a share of the experts such as "40%"; empty: none, but as nodes are set


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A machine that the plan does not use, with the reason."""

    machine: Machine
    reason: str


def choose_machines(machines: Sequence[Machine], constraints: Constraints) -> tuple[list[Machine], list[LeftOut]]:
    """Return the machines that may be used, the roomiest first, and those that may not. Raises PlanInvalid."""
    if constraints.layers and (constraints.num_nodes or constraints.first):
        other = "--nodes" if constraints.num_nodes else "--first"
        raise PlanInvalid(f"--plan and {other} contradict each other", next_step="give one of them")
    unwanted = [machine_named(machines, name).node_id for name in constraints.exclude]
    if constraints.first and machine_named(machines, constraints.first).node_id in unwanted:
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


def machine_named(machines: Sequence[Machine], name: str) -> Machine:
    """Return the machine with a name or id. Raises PlanInvalid."""
    room = room_named([machine.room for machine in machines], name)
    return next(machine for machine in machines if machine.room is room)
