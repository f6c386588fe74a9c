"""The search of ``partition`` for more than ten devices: exact if all links are equal. PURE.

It does not enumerate sets. A dynamic program over devices and layers, with two flags for the ends, finds the best
counts if every device pays its cheapest incoming link: the true price if links are equal, else a bound. The chosen
devices are then ordered, exactly for up to ten, by 2-opt for more. ``bound_s`` tells how much better it could be.

Where links differ, the ring of the cheapest links may not exist, and its devices may lie far apart. So an exact search
over the ten best devices follows, and the better partition counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from edgepipe.planner.partition import (
    EMBEDS,
    EXACT_DEVICES,
    HEAD,
    PLAIN,
    ExactSearch,
    Floats,
    Ints,
    Partition,
    PartitionProblem,
    could_fit,
    evaluate,
    first_limit,
    first_true,
    near_index,
    rooms_within,
    server_times,
)

_BOTH = EMBEDS | HEAD
_WORTH = 0.01  # share by which a cycle may be shorter for which a second search is worth its time


class _Option(NamedTuple):
    """One role for a device."""

    flags: int
    room: int
    price_s: float  # cost of the device without its layers
    froms: tuple[int, ...]  # flags of the devices placed before


class ManySearch:
    """Search over more than ten devices, with the interface of ``ExactSearch``."""

    def __init__(self, num_devices: int, *, count: int = 0, first: int | None = None, must: Sequence[int] = ()) -> None:
        """``count``: number of devices (0: any). ``first``: device at the start. ``must``: devices to include."""
        self._count = count
        self._first = first
        self._must = frozenset(must)
        self._num_devices = num_devices
        self._few: ExactSearch | None = None  # search over ten devices: those that must be used first; None: not tried
        self._wanted = self._must if first is None else self._must | {first}
        if num_devices > EXACT_DEVICES >= max(count, len(self._wanted)):
            few_first = None if first is None else 0
            self._few = ExactSearch(EXACT_DEVICES, count=count, first=few_first, must=range(len(self._wanted)))

    def best(self, problem: PartitionProblem, *, below_s: float = inf, near_s: float = 0.0) -> Partition | None:
        """Return the best partition found with a cycle below ``below_s``, or None. ``near_s``: estimate of its T."""
        found = self.candidates(problem, below_s=below_s, near_s=near_s)
        return min(found, key=lambda partition: partition.cycle_s, default=None)

    def candidates(self, problem: PartitionProblem, *, below_s: float = inf, near_s: float = 0.0) -> list[Partition]:
        """Return the partitions found with cycles below ``below_s``: of all devices, then of the ten best if better."""
        tables = self._crossing(problem, below_s, near_s)
        bound_s = _bound_s(tables, problem)
        shares = [self._share(problem, table, bound_s) for table in tables if table.best_s < inf]
        found = [partition for partition in shares if partition is not None and partition.cycle_s < below_s]
        shortest_s = min((partition.cycle_s for partition in found), default=below_s)
        few = (
            self._among_few(problem, below_s=shortest_s, near_s=near_s) if bound_s < shortest_s * (1 - _WORTH) else None
        )
        return found if few is None else [*found, replace(few, bound_s=min(bound_s, few.cycle_s))]

    def _among_few(self, problem: PartitionProblem, *, below_s: float, near_s: float) -> Partition | None:
        """Return the best partition of the devices that must be used and the best others, ten together."""
        if self._few is None:
            return None
        wanted = sorted(self._wanted, key=lambda device: (device != self._first, device))
        others = [device for device in _best_first(problem) if device not in wanted]
        picked = [*wanted, *others][:EXACT_DEVICES]
        found = self._few.best(_restricted(problem, picked), below_s=below_s, near_s=near_s)
        return None if found is None else replace(found, devices=tuple(picked[device] for device in found.devices))

    def bound_s(self, problem: PartitionProblem, *, below_s: float = inf) -> float:
        """Return a lower bound of every partition's cycle; infinite if it is not below ``below_s``."""
        return _bound_s(self._crossing(problem, below_s, 0.0), problem)

    def _crossing(self, problem: PartitionProblem, below_s: float, near_s: float) -> list[_Table]:
        """Return the tables of the limits on T between which the turn passes M * T; none if no cycle is so short."""
        m = problem.micro_batches
        if not could_fit(problem, below_s / m) or self._turn_bound_s(problem, below_s / m) >= below_s:
            return []
        limits = server_times(problem, below_s / m)
        tables: dict[float, _Table] = {}

        def table(limit_s: float) -> _Table:
            if limit_s not in tables:
                tables[limit_s] = _Table(self, problem, limit_s)
            return tables[limit_s]

        low = first_true(limits, lambda limit_s: table(limit_s).best_s <= m * limit_s, near=near_index(limits, near_s))
        return [table(float(limits[index])) for index in (low, low - 1) if index >= 0]

    def balanced(self, problem: PartitionProblem, partition: Partition, *, slack: float) -> Partition:
        """Return a more balanced partition. See ``ExactSearch.balanced``."""
        most_s = partition.cycle_s * (1 + slack)
        limits = server_times(problem, partition.server_s)
        limit_s = first_limit(limits, lambda limit: self._turn_bound_s(problem, limit) <= most_s)
        found = None if limit_s is None else self._share(problem, _Table(self, problem, limit_s), partition.bound_s)
        worse = found is None or found.server_s >= partition.server_s or found.cycle_s > most_s
        return partition if found is None or worse else found

    def _turn_bound_s(self, problem: PartitionProblem, limit_s: float) -> float:
        """Return a lower bound of the turn within the limit: each device pays its cheapest incoming link."""
        table = _Table(self, problem, limit_s)
        return table.best_s

    def _share(self, problem: PartitionProblem, table: _Table, bound_s: float) -> Partition | None:
        layers = table.layers()
        if layers is None:
            return None
        first = next(device for device, (flags, _) in layers.items() if flags & EMBEDS)
        last = next(device for device, (flags, _) in layers.items() if flags & HEAD)
        order = shortest_way(problem, list(layers), first=first, last=last, limit_s=table.limit_s)
        partition = evaluate(problem, order, [layers[device][1] for device in order])
        return Partition(
            devices=partition.devices,
            layers=partition.layers,
            server_s=partition.server_s,
            turn_s=partition.turn_s,
            cycle_s=partition.cycle_s,
            bound_s=min(bound_s, partition.cycle_s),
        )

    def options(self, problem: PartitionProblem, device: int, rooms: Ints, path_in_s: float) -> list[_Option]:
        """Return the possible roles of a device."""
        middle = _Option(PLAIN, int(rooms[PLAIN]), problem.base_s[device] + path_in_s, (0, EMBEDS, HEAD, _BOTH))
        first = _Option(EMBEDS, int(rooms[EMBEDS]), float(problem.base_s[device]), (0, HEAD))
        head_s = problem.base_s[device] + problem.head_s[device]
        last = _Option(HEAD, int(rooms[HEAD]), head_s + path_in_s, (0, EMBEDS))
        if self._first is not None:
            return [first] if device == self._first else [middle, last]
        return [middle, first, last]

    def may_be_alone(self, device: int) -> bool:
        """Return whether the device may hold the whole model."""
        return self._count in (0, 1) and self._first in (None, device) and self._must <= {device}

    @property
    def counts(self) -> int:
        """Size of the axis that counts devices: 1 if any number is allowed."""
        return self._count + 1 if self._count else 1

    def needs(self, device: int) -> bool:
        """Return whether the device must be used."""
        return device in self._must or device == self._first


class _Table:
    """Table ``cost[flags, devices, layers]``: the least sum of prices, built device by device."""

    def __init__(self, search: ManySearch, problem: PartitionProblem, limit_s: float) -> None:
        self._search = search
        self._instance = problem
        self.limit_s = limit_s
        rooms = rooms_within(problem, limit_s)
        hop = np.where(problem.upload_s <= limit_s, problem.upload_s + problem.latency_s, inf)
        np.fill_diagonal(hop, inf)
        together = problem.closing_s + np.where(np.eye(problem.num_devices, dtype=bool), inf, 0.0)
        cost = np.full((4, search.counts, problem.num_layers + 1), inf)
        cost[0, 0, 0] = 0.0
        self._costs: list[Floats] = [cost]
        self._options: list[list[_Option]] = []
        for device in range(problem.num_devices):
            options = search.options(problem, device, rooms[device], float(hop[:, device].min()))
            closing_s = float(together[:, device].min())  # charged with the last device
            options = [
                option._replace(price_s=option.price_s + closing_s) if option.flags == HEAD else option
                for option in options
            ]
            self._options.append(options)
            cost = self._with(cost, device, options)
            self._costs.append(cost)
        self._alone = self._best_alone(rooms)
        self.best_s = min(float(cost[_BOTH, -1, -1]), self._alone[0])

    def _best_alone(self, rooms: Ints) -> tuple[float, int]:
        """Return the least cost with a single device, and that device."""
        problem = self._instance
        costs = problem.base_s + problem.head_s + problem.num_layers * problem.layer_s + np.diag(problem.closing_s)
        able = [
            (float(costs[device]), device)
            for device in range(problem.num_devices)
            if rooms[device, _BOTH] >= problem.num_layers and self._search.may_be_alone(device)
        ]
        return min(able, default=(inf, -1))

    def _with(self, cost: Floats, device: int, options: Sequence[_Option]) -> Floats:
        after = np.full_like(cost, inf) if self._search.needs(device) else cost.copy()
        layer_s = float(self._instance.layer_s[device])
        for option in options:
            if option.room < 1 or option.price_s == inf:
                continue
            froms = list(option.froms)
            moved = _slide(self._one_more(cost[froms]), option.room, layer_s) + option.price_s
            for index, before in enumerate(froms):
                target = before | option.flags
                np.minimum(after[target], moved[index], out=after[target])
        return after

    def _one_more(self, cost: Floats) -> Floats:
        """Return the costs shifted by one more device."""
        if self._search.counts == 1:
            return cost
        more = np.full_like(cost, inf)
        more[:, 1:] = cost[:, :-1]
        return more

    def layers(self) -> dict[int, tuple[int, int]] | None:
        """Return flags and layers of every device in use; None if the model does not fit."""
        flags, used, left = _BOTH, self._search.counts - 1, self._instance.num_layers
        if self.best_s == inf:
            return None
        if self._alone[0] <= self.best_s:
            return {self._alone[1]: (_BOTH, left)}
        found: dict[int, tuple[int, int]] = {}
        for device in reversed(range(self._instance.num_devices)):
            before, after = self._costs[device], self._costs[device + 1]
            wanted = after[flags, used, left]
            if before[flags, used, left] == wanted and not self._search.needs(device):
                continue
            option_flags, came_from, count = self._step(before, device, (flags, used, left), float(wanted))
            found[device] = (option_flags, count)
            flags, left = came_from, left - count
            used -= 1 if self._search.counts > 1 else 0
        return found

    def _step(self, before: Floats, device: int, state: tuple[int, int, int], wanted: float) -> tuple[int, int, int]:
        """Return the role, the flags before it and the layers that led to a state's cost."""
        flags, used, left = state
        layer_s = float(self._instance.layer_s[device])
        used_before = used - 1 if self._search.counts > 1 else used
        best = (inf, 0, 0, 0)
        for option in self._options[device]:
            counts = np.arange(1, min(option.room, left) + 1)
            for came_from in option.froms:
                if came_from | option.flags != flags or used_before < 0 or not len(counts):
                    continue
                costs = before[came_from, used_before, left - counts] + counts * layer_s + option.price_s
                index = int(np.argmin(costs))
                if costs[index] < best[0]:
                    best = (float(costs[index]), option.flags, came_from, int(counts[index]))
        assert best[0] <= wanted * (1 + 1e-9), "every cost has an origin"
        return best[1:]


def _bound_s(tables: Sequence[_Table], problem: PartitionProblem) -> float:
    return min((max(problem.micro_batches * table.limit_s, table.best_s) for table in tables), default=inf)


def _slide(cost: Floats, room: int, layer_s: float) -> Floats:
    """Return ``out[..., l] = min over 1 <= n <= room of cost[..., l - n] + n * layer_s``."""
    num = cost.shape[-1]
    room = min(room, num - 1)
    lines = layer_s * np.arange(num, dtype=np.float64)
    padded: Floats = np.full((*cost.shape[:-1], room + num - 1), inf)
    padded[..., room:] = (cost - lines)[..., : num - 1]
    windows = np.lib.stride_tricks.sliding_window_view(padded, room, axis=-1)
    return windows.min(axis=-1) + lines


def shortest_way(
    problem: PartitionProblem, devices: list[int], *, first: int, last: int, limit_s: float = inf
) -> tuple[int, ...]:
    """Order devices between two ends: exactly for up to ten, else by 2-opt from the nearest neighbours."""
    if len(devices) <= 2:
        return (first, last)[: len(devices)]
    hop = np.where(problem.upload_s <= limit_s, problem.upload_s, inf) + problem.latency_s
    between = [device for device in devices if device not in (first, last)]
    if len(devices) <= EXACT_DEVICES:
        return _exact_path(problem, devices, first, last, limit_s)
    order, left = [first], set(between)
    while left:
        order.append(min(left, key=lambda device: (hop[order[-1], device], device)))
        left.remove(order[-1])
    order.append(last)
    return tuple(_two_opt(hop, order))


def _best_first(problem: PartitionProblem) -> list[int]:
    """Return the devices, the shortest step of an even share of the layers first, with the cheapest link to it."""
    hop_s = problem.upload_s + problem.latency_s
    np.fill_diagonal(hop_s, inf)
    share_s = problem.base_s + problem.layer_s * problem.num_layers / EXACT_DEVICES + hop_s.min(axis=0)
    return np.argsort(share_s, kind="stable").tolist()


def _restricted(problem: PartitionProblem, devices: Sequence[int]) -> PartitionProblem:
    """Return the problem with equal layers for some of its devices, in this order."""
    picked = np.array(devices)
    links = np.ix_(picked, picked)
    return PartitionProblem(
        num_layers=problem.num_layers,
        micro_batches=problem.micro_batches,
        base_s=problem.base_s[picked],
        layer_s=problem.layer_s[picked],
        head_s=problem.head_s[picked],
        most_layers=problem.most_layers[picked],
        upload_s=problem.upload_s[links],
        latency_s=problem.latency_s[links],
        closing_s=problem.closing_s[links],
    )


def _exact_path(
    problem: PartitionProblem, devices: list[int], first: int, last: int, limit_s: float
) -> tuple[int, ...]:
    small = replace(
        _restricted(problem, devices),
        num_layers=len(devices),
        micro_batches=1,
        most_layers=np.full((len(devices), 4), len(devices)),
    )
    search = ExactSearch(len(devices), count=len(devices), first=devices.index(first))
    _, _, lasts = search.choices()
    choice = int(np.flatnonzero(lasts == devices.index(last))[0])
    masks, firsts, _ = search.choices()
    for most_s in (limit_s, inf):  # every device has a link within the limit; a path through all may not exist
        paths = search.paths_s(small, most_s)
        if paths[masks[choice], firsts[choice], lasts[choice]] < inf:
            break
    return tuple(devices[device] for device in search.path(paths, small, choice, limit_s=most_s))


def _two_opt(hop: Floats, order: list[int]) -> list[int]:
    """Reverse stretches while that shortens the path; the ends stay. Links may differ by direction."""

    def length_s(path: Sequence[int]) -> float:
        return float(sum(hop[a, b] for a, b in pairwise(path)))

    best_s, improved = length_s(order), True
    while improved:
        improved = False
        for start in range(1, len(order) - 2):
            for end in range(start + 1, len(order) - 1):
                tried = [*order[:start], *reversed(order[start : end + 1]), *order[end + 1 :]]
                tried_s = length_s(tried)
                if tried_s < best_s * (1 - 1e-12) or (best_s == inf and tried_s < inf):
                    order, best_s, improved = tried, tried_s, True
    return order
