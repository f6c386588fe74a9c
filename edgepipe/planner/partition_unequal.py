"""The search of ``partition`` for layers that differ in time or bytes. PURE.

A device's time then depends on which layers it gets, so the order of the devices matters. Under a limit on T, a dynamic
program over (set of devices, last device, layers done) finds the shortest turn, as Held and Karp's (1962) finds paths.
Prefix sums give a run's time, and runs that end at one layer are those that begin late enough, so the best of them is
the minimum of a window. With N devices and L layers one limit takes ``O(2**N N**3 L log L)`` operations on arrays; all
links equal save a factor of N**2. A binary search over the values of T finds the smallest cycle. The search for layers
of mean time gives a bound before: sets that cannot be below it are left out.

For more than ten devices, ``ManySearch`` over layers of mean time chooses devices and order, and the layers are then
shared out exactly in that order. ``bound_s`` holds if every layer took as little as the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgepipe.planner.partition import (
    EMBEDS,
    HEAD,
    PLAIN,
    ExactSearch,
    Floats,
    Ints,
    Partition,
    PartitionProblem,
    UnequalLayers,
    evaluate,
    first_limit,
    first_true,
    near_index,
)
from edgepipe.planner.partition_many import ManySearch

_BOTH = EMBEDS | HEAD
_ROUNDING = 1e-9
_ESTIMATE = 1.1  # factor by which a cycle of mean layers may exceed that of the real ones


class UnequalSearch:
    """Search over up to ten devices and layers that differ, with the interface of ``ExactSearch``."""

    def __init__(self, num_devices: int, *, count: int = 0, first: int | None = None, must: Sequence[int] = ()) -> None:
        """``count``: number of devices (0: any). ``first``: device at the start. ``must``: devices to include."""
        self._num_devices = num_devices
        self._most = min(count or num_devices, num_devices)
        self._count = count
        self._first = first
        self._must = sum(1 << device for device in set(must))
        self._mean = ExactSearch(num_devices, count=count, first=first, must=must)
        self._sets: dict[bool, _Sets] = {}

    def best(self, problem: PartitionProblem, *, below_s: float = inf, near_s: float = 0.0) -> Partition | None:
        """Return the partition with the smallest cycle below ``below_s``, or None. ``near_s``: estimate of its T."""
        guess = self._guess(problem, below_s, near_s)
        better = self._best(problem, guess.cycle_s if guess is not None else below_s, near_s)
        return guess if better is None else better

    def _guess(self, problem: PartitionProblem, below_s: float, near_s: float) -> Partition | None:
        """Return the best partition over the devices, in order, that suit layers of mean time; it bounds the search."""
        mean = self._mean.best(replace(problem, unequal=None), below_s=_ESTIMATE * below_s, near_s=near_s)
        return None if mean is None else shared_out(problem, mean.devices, below_s=below_s)

    def _best(self, problem: PartitionProblem, below_s: float, near_s: float) -> Partition | None:
        m = problem.micro_batches
        turns: dict[float, float] = {}  # tables are large: kept are only their results

        def turn_s(limit_s: float) -> float:
            if limit_s not in turns:
                turns[limit_s] = self._table(problem, limit_s, below_s).turn_s
            return turns[limit_s]

        if not could_fit(problem, below_s / m) or turn_s(below_s / m) == inf:
            return None
        limits = server_times(problem, below_s / m)
        low = first_true(limits, lambda limit: turn_s(limit) <= m * limit, near=near_index(limits, near_s))
        ends = [float(limits[index]) for index in (low, low - 1) if index >= 0]
        found = [self._table(problem, end, below_s).partition() for end in ends if turn_s(end) < inf]
        return min(found, key=lambda partition: partition.cycle_s, default=None)

    def balanced(self, problem: PartitionProblem, partition: Partition, *, slack: float) -> Partition:
        """Return a more balanced partition. See ``ExactSearch.balanced``."""
        most_s = partition.cycle_s * (1 + slack)
        limits = server_times(problem, partition.server_s)
        above_s = most_s * (1 + _ROUNDING)
        limit_s = first_limit(limits, lambda limit: self._table(problem, limit, above_s).turn_s <= most_s)
        if limit_s is None:
            return partition
        found = self._table(problem, limit_s, above_s).partition()
        return partition if found.server_s >= partition.server_s else replace(found, bound_s=partition.bound_s)

    def allows(self, masks: Ints, size: int) -> npt.NDArray[np.bool_]:
        """Return which sets of so many devices may be a ring."""
        return (masks & self._must == self._must) & (self._count in (0, size))

    def may_begin(self, device: int) -> bool:
        """Return whether the device may be the first."""
        return self._first in (None, device)

    @property
    def most_devices(self) -> int:
        """Largest number of devices."""
        return self._most

    def _table(self, problem: PartitionProblem, limit_s: float, below_s: float) -> _Table:
        closing = _senders(problem.closing_s)
        alike = len(closing.times_s) == 1 or self._first is not None
        if alike not in self._sets:
            starters = [tuple(device for device in range(self._num_devices) if self.may_begin(device))]
            if not alike:
                starters = [(device,) for device in range(self._num_devices)]
            self._sets[alike] = _Sets(self._num_devices, starters, self._most)
        closing_s = problem.closing_s[[self._first]] if self._first is not None else closing.times_s
        return _Table(self, self._sets[alike], problem, closing_s, limit_s, below_s)


class _Senders(NamedTuple):
    """Devices by how long they take to each other one."""

    group: Ints  # [N]
    times_s: Floats  # [G, N]


def _senders(times_s: Floats) -> _Senders:
    """Return one group if every device is as far from all others, else a group for each."""
    count = len(times_s)
    own = np.eye(count, dtype=bool)
    least, most = np.where(own, inf, times_s).min(axis=0), np.where(own, -inf, times_s).max(axis=0)
    if np.array_equal(least, most) or count == 1:
        return _Senders(np.zeros(count, dtype=np.int64), least[None])
    return _Senders(np.arange(count), times_s)


class _Sets:
    """Columns of a table: sets of devices by the group of their first device, and how they grow by a device."""

    def __init__(self, num_devices: int, starters: Sequence[tuple[int, ...]], most: int) -> None:
        masks = np.arange(1 << num_devices)
        sizes = np.array([int(mask).bit_count() for mask in masks])
        able = np.zeros((len(starters), len(masks)), dtype=bool)
        for group, devices in enumerate(starters):
            able[group] = (masks & sum(1 << device for device in devices)) != 0
        able &= (sizes >= 1) & (sizes < max(most, 2))
        self.starters = starters
        self.groups, self.masks = np.nonzero(able)
        self.column = np.full(able.shape, -1)
        self.column[self.groups, self.masks] = np.arange(len(self.masks))
        self.steps: list[list[tuple[Ints, Ints]]] = []  # [size - 1][device]: columns without it, and those with it
        for size in range(1, most):
            by_device: list[tuple[Ints, Ints]] = []
            for device in range(num_devices):
                without = (sizes[self.masks] == size) & (self.masks >> device & 1 == 0)
                old = np.flatnonzero(without)
                by_device.append((old, self.column[self.groups[old], self.masks[old] | 1 << device]))
            self.steps.append(by_device)


class _End(NamedTuple):
    """The last stage of a ring with several: its device, and the column of the others."""

    column: int
    device: int


class _Table:
    """Table ``cost[group of the last device, layers done, column]`` under a limit on T: the shortest time so far."""

    def __init__(
        self,
        search: UnequalSearch,
        sets: _Sets,
        problem: PartitionProblem,
        closing_s: Floats,
        limit_s: float,
        below_s: float,
    ) -> None:
        """``closing_s``: [G, N], by the group of the first device and the last device. ``below_s``: wanted turn."""
        self._search, self._sets, self._problem, self._closing_s = search, sets, problem, closing_s
        hop_s = np.where(problem.upload_s <= limit_s * (1 + _ROUNDING), problem.upload_s + problem.latency_s, inf)
        self._hops = _senders(hop_s)
        self._runs = _Runs(problem, limit_s)
        num_layers = problem.num_layers
        self._cost = np.full((len(self._hops.times_s), num_layers + 1, len(sets.masks)), inf)
        left_s = np.diff(self._runs.done_s).min(axis=0)  # each layer's time on its fastest device
        self._left_s = np.append(np.cumsum(left_s[::-1])[::-1], 0.0)[:, None]  # [L + 1, 1]
        self._least_s = np.full(len(sets.masks), inf)  # lower bound of the turn, by column
        self._below_s = below_s
        self.turn_s, self._end = self._alone()  # infinite if it is not below ``below_s``
        if search.most_devices > 1 and num_layers > 1:
            self._begin()
            for size, steps in enumerate(sets.steps, start=2):
                for device, (old, new) in enumerate(steps):
                    able = self._least_s[old] < self._below_s
                    if able.any():
                        self._grow(device, old[able], new[able], size)

    def partition(self) -> Partition:
        """Return the partition with the shortest turn. There must be one."""
        assert self._end is not None, "a finite turn has an end"
        if self._end.column < 0:
            return evaluate(self._problem, [self._end.device], [self._problem.num_layers])
        column, device, done = self._end.column, self._end.device, self._problem.num_layers
        devices, layers = [device], list[int]()
        low = int(self._runs.headed[device])
        while True:
            before, _ = self._cheapest(column, device, low, done)
            layers.append(done - before)
            done = before
            mask, group = int(self._sets.masks[column]), int(self._sets.groups[column])
            if mask.bit_count() == 1:
                devices.append(mask.bit_length() - 1)
                layers.append(done)
                break
            device, column = self._last_of(mask, group, devices[-1], done)
            devices.append(device)
            low = int(self._runs.plain[device, done])
        return evaluate(self._problem, devices[::-1], layers[::-1])

    def _alone(self) -> tuple[float, _End | None]:
        """Return the turn of the best single device."""
        problem, search = self._problem, self._search
        times = {
            device: problem.stage_s(device, range(problem.num_layers))
            + float(problem.head_s[device] + problem.closing_s[device, device])
            for device in range(problem.num_devices)
            if search.may_begin(device) and self._runs.alone[device] and search.allows(np.array(1 << device), 1)
        }
        device = min(times, key=lambda each: times[each], default=-1)
        return (times[device], _End(-1, device)) if device >= 0 and times[device] < self._below_s else (inf, None)

    def _begin(self) -> None:
        """Enter the first stages."""
        done_s, base_s = self._runs.done_s, self._problem.base_s
        for group, devices in enumerate(self._sets.starters):
            for device in devices:
                column = self._sets.column[group, 1 << device]
                fits = self._runs.first[device]
                self._cost[self._hops.group[device], fits, column] = base_s[device] + done_s[device, fits]
                least_s = base_s[device] + done_s[device, fits] + self._left_s[fits, 0]
                self._least_s[column] = least_s.min(initial=inf)

    def _grow(self, device: int, old: Ints, new: Ints, size: int) -> None:
        """Append a stage on ``device``, the ``size``-th, to the rings of the columns ``old``, as their last and not."""
        problem, runs = self._problem, self._runs
        done_s = runs.done_s[device]
        via = self._cost[0][:, old] + self._hops.times_s[0, device]
        for cost, hop_s in zip(self._cost[1:], self._hops.times_s[1:, device], strict=True):
            np.minimum(via, cost[:, old] + hop_s, out=via)
        via -= done_s[:, None]
        if runs.headed[device] < problem.num_layers:
            self._finish(device, old, via, size)
        if new[0] < 0:
            return
        added = runs.windows[device].least(via) + (done_s + problem.base_s[device])[:, None]
        group = self._hops.group[device]
        self._cost[group][:, new] = np.minimum(self._cost[group][:, new], added)
        self._least_s[new] = np.minimum(self._least_s[new], (added + self._left_s).min(axis=0))

    def _finish(self, device: int, old: Ints, via: Floats, size: int) -> None:
        problem, sets = self._problem, self._sets
        turns = via[int(self._runs.headed[device]) : problem.num_layers].min(axis=0)
        own_s = problem.base_s[device] + problem.head_s[device] + self._runs.done_s[device, -1]
        turns = turns + own_s + self._closing_s[sets.groups[old], device]
        turns = np.where(self._search.allows(sets.masks[old] | 1 << device, size), turns, inf)
        index = int(np.argmin(turns))
        if turns[index] < min(self.turn_s, self._below_s):
            self.turn_s, self._end = float(turns[index]), _End(int(old[index]), device)

    def _cheapest(self, column: int, device: int, low: int, done: int) -> tuple[int, float]:
        """Return where a stage on ``device`` up to layer ``done`` begins, and the time so far, without its own."""
        if low >= done:
            return low, inf
        via = (self._cost[:, low:done, column] + self._hops.times_s[:, device, None]).min(axis=0)
        index = int(np.argmin(via - self._runs.done_s[device, low:done]))
        return low + index, float(via[index] - self._runs.done_s[device, low + index])

    def _last_of(self, mask: int, group: int, follower: int, done: int) -> tuple[int, int]:
        """Return the last device of a ring before ``follower``, and the column of those before it."""
        best, found = inf, (-1, -1)
        for device in range(self._problem.num_devices):
            before = int(self._sets.column[group, mask & ~(1 << device)]) if mask >> device & 1 else -1
            if before < 0:
                continue
            _, cost_s = self._cheapest(before, device, int(self._runs.plain[device, done]), done)
            cost_s += float(self._problem.base_s[device] + self._runs.done_s[device, done])
            cost_s += float(self._hops.times_s[self._hops.group[device], follower])
            if cost_s < best:
                best, found = cost_s, (device, before)
        assert found[0] >= 0, "every cost has an origin"
        return found


class _Runs:
    """The runs of layers that a device may take within a limit on T."""

    def __init__(self, problem: PartitionProblem, limit_s: float) -> None:
        layers = _unequal(problem)
        self.done_s = layers.done_s
        limits = limit_s * (1 + _ROUNDING) - problem.base_s
        by_time = np.stack([_earliest(done, limit) for done, limit in zip(self.done_s, limits, strict=True)])
        headed = np.array(
            [_earliest(done, limit)[-1] for done, limit in zip(self.done_s, limits - problem.head_s, strict=True)]
        )
        # [N, L + 1]: where a stage between others may begin that ends before a layer; at that layer: nowhere
        self.plain = np.maximum(np.maximum(layers.earliest[:, PLAIN], by_time), 1)
        # [N]: where the last stage may begin
        self.headed = np.maximum(np.maximum(layers.earliest[:, HEAD, -1], headed), 1)
        self.alone = np.maximum(layers.earliest[:, _BOTH, -1], headed) == 0  # [N]: whether one stage may take all
        # [N, L + 1]: whether the first stage may take so many; not none, not all
        self.first = np.maximum(layers.earliest[:, EMBEDS], by_time) == 0
        self.first[:, [0, -1]] = False
        self.windows = [_Windows(low) for low in self.plain]


class _Windows:
    """Windows of rows: that of each end begins at ``low[end]`` and stops before ``end``."""

    def __init__(self, low: Ints) -> None:
        widths = np.arange(len(low)) - low
        levels = np.where(widths > 0, np.log2(np.maximum(widths, 1)).astype(np.int64), -1)
        self._low = low
        self._ends = [np.flatnonzero(levels == level) for level in range(int(levels.max(initial=-1)) + 1)]

    def least(self, values: Floats) -> Floats:
        """Return the minimum of each window, by columns; infinite if it is empty."""
        found = np.full_like(values, inf)
        least, width = values, 1  # least[i]: of the ``width`` rows from i
        for ends in self._ends:
            if width > 1:
                least = np.minimum(least[: -width // 2], least[width // 2 :])
            found[ends] = np.minimum(least[self._low[ends]], least[ends - width])
            width *= 2
        return found


def _earliest(done_s: Floats, limit_s: float) -> Ints:
    """Return for each end the first layer of the longest run before it that takes at most ``limit_s``."""
    ends = np.arange(len(done_s))
    if limit_s < 0:
        return ends
    return np.minimum(np.searchsorted(done_s, done_s - limit_s * (1 + _ROUNDING), side="left"), ends)


def _unequal(problem: PartitionProblem) -> UnequalLayers:
    assert problem.unequal is not None, "the search is for layers that differ"
    return problem.unequal


def earliest_within(sizes: Ints, free: Sequence[int]) -> Ints:
    """Return ``[4, L + 1]``: see ``UnequalLayers.earliest``. ``sizes``: [L] bytes; ``free``: bytes by flags."""
    ends = np.concatenate([[0], np.cumsum(sizes)])
    return np.stack(
        [np.searchsorted(ends, ends - room, side="left") if room >= 0 else np.arange(len(ends)) for room in free]
    )


def could_fit(problem: PartitionProblem, limit_s: float) -> bool:
    """Return False if the devices cannot hold the model within the limit. Cheap; True may be wrong."""
    runs, layers = _Runs(problem, limit_s), np.arange(problem.num_layers + 1)
    most = (layers - runs.plain).max(axis=1)
    most = np.maximum(most, (layers * runs.first).max(axis=1))
    most = np.maximum(most, problem.num_layers - runs.headed)
    return bool(runs.alone.any() or most.sum() >= problem.num_layers)


def server_times(problem: PartitionProblem, most_s: float) -> Floats:
    """Return all possible times of the slowest server up to ``most_s``, ascending."""
    done_s = _unequal(problem).done_s
    start, end = np.triu_indices(problem.num_layers + 1, k=1)
    runs = problem.base_s[:, None] + (done_s[:, end] - done_s[:, start])
    last = (problem.base_s + problem.head_s)[:, None] + (done_s[:, -1:] - done_s[:, :-1])
    found = np.unique(np.concatenate([runs.ravel(), last.ravel(), problem.upload_s.ravel()]))
    found = found[found <= most_s]
    return np.append(found, most_s) if most_s < inf else found


class ManyUnequalSearch:
    """Search over more than ten devices and layers that differ, with the interface of ``ExactSearch``."""

    def __init__(self, num_devices: int, *, count: int = 0, first: int | None = None, must: Sequence[int] = ()) -> None:
        """``count``: number of devices (0: any). ``first``: device at the start. ``must``: devices to include."""
        self._many = ManySearch(num_devices, count=count, first=first, must=must)

    def best(self, problem: PartitionProblem, *, below_s: float = inf, near_s: float = 0.0) -> Partition | None:
        """Return the best partition found with a cycle below ``below_s``, or None. ``near_s``: estimate of its T."""
        bound_s = self._many.bound_s(_easier(problem), below_s=below_s)
        if bound_s >= below_s:
            return None
        means = self._many.candidates(replace(problem, unequal=None), below_s=_ESTIMATE * below_s, near_s=near_s)
        orders = dict.fromkeys(mean.devices for mean in means)
        shares = [shared_out(problem, order, below_s=below_s) for order in orders]
        found = [partition for partition in shares if partition is not None]
        best = min(found, key=lambda partition: partition.cycle_s, default=None)
        return None if best is None else replace(best, bound_s=min(bound_s, best.cycle_s))

    def balanced(self, problem: PartitionProblem, partition: Partition, *, slack: float) -> Partition:
        """Return a more balanced partition of the same devices in order. See ``ExactSearch.balanced``."""
        order, most_s = partition.devices, partition.cycle_s * (1 + slack)
        limits = server_times(problem, partition.server_s)
        limit_s = first_limit(limits, lambda limit: _in_order(problem, order, limit)[0] <= most_s)
        if limit_s is None:
            return partition
        found = evaluate(problem, order, _in_order(problem, order, limit_s)[1])
        return partition if found.server_s >= partition.server_s else replace(found, bound_s=partition.bound_s)


def shared_out(problem: PartitionProblem, order: Sequence[int], *, below_s: float = inf) -> Partition | None:
    """Return the partition over these devices in order with the smallest cycle below ``below_s``, or None."""
    m = problem.micro_batches
    limits = server_times(problem, below_s / m)
    if not len(limits) or _in_order(problem, order, float(limits[-1]))[0] >= below_s:
        return None
    low = first_true(limits, lambda limit: _in_order(problem, order, limit)[0] <= m * limit, near=len(limits) - 2)
    shares = [_in_order(problem, order, float(limits[index])) for index in (low, low - 1) if index >= 0]
    found = [evaluate(problem, order, layers) for turn_s, layers in shares if turn_s < below_s]
    return min(found, key=lambda partition: partition.cycle_s, default=None)


def _in_order(problem: PartitionProblem, order: Sequence[int], limit_s: float) -> tuple[float, list[int]]:
    """Return the shortest turn over these devices in order, and its layers; infinite if no layers fit."""
    runs, num_layers = _Runs(problem, limit_s), problem.num_layers
    most_s = limit_s * (1 + _ROUNDING)
    if len(order) == 1:
        device = order[0]
        turn_s = problem.stage_s(device, range(num_layers)) + float(
            problem.head_s[device] + problem.closing_s[device, device]
        )
        return (turn_s, [num_layers]) if runs.alone[device] else (inf, [])
    if any(problem.upload_s[hop] > most_s for hop in pairwise(order)):
        return inf, []
    cost = np.where(runs.first[order[0]], problem.base_s[order[0]] + runs.done_s[order[0]], inf)
    costs = [cost]  # least times by number of layers on the devices so far, without hops
    for device in order[1:-1]:
        done_s = runs.done_s[device]
        cost = runs.windows[device].least((cost - done_s)[:, None])[:, 0] + done_s + problem.base_s[device]
        costs.append(cost)
    turn_s, layers, done, low = inf, list[int](), num_layers, int(runs.headed[order[-1]])
    for device, cost in zip(order[:0:-1], costs[::-1], strict=True):
        if low >= done or not np.isfinite(cost[low:done]).any():
            return inf, []
        begin = low + int(np.argmin(cost[low:done] - runs.done_s[device, low:done]))
        if done == num_layers:
            last_s = problem.base_s[device] + problem.head_s[device] + runs.done_s[device, -1]
            turn_s = float(cost[begin] + last_s - runs.done_s[device, begin])
        layers.append(done - begin)
        done = begin
        low = int(runs.plain[order[len(order) - 1 - len(layers)], done])
    layers.append(done)
    hops = sum(float(problem.upload_s[hop] + problem.latency_s[hop]) for hop in pairwise(order))
    return turn_s + hops + float(problem.closing_s[order[0], order[-1]]), layers[::-1]


def _easier(problem: PartitionProblem) -> PartitionProblem:
    """Return the problem with equal layers that is no harder: all as fast as the fastest, in the longest runs."""
    layers = _unequal(problem)
    counts = np.arange(problem.num_layers + 1)
    most = np.stack(
        [
            (counts - layers.earliest[:, PLAIN]).max(axis=1),
            (counts * (layers.earliest[:, EMBEDS] == 0)).max(axis=1),
            problem.num_layers - layers.earliest[:, HEAD, -1],
            problem.num_layers * (layers.earliest[:, _BOTH, -1] == 0),
        ],
        axis=1,
    )
    return replace(problem, layer_s=np.diff(layers.done_s).min(axis=1), most_layers=most, unequal=None)
