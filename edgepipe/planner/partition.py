"""Choose the devices, their order and their number of layers: exact for up to ten devices. PURE.

With M micro-batches of b sequences each, a sequence gets a token every ``cycle = max(M * T, turn)``: T is the slowest
server (a device's step, a link's upload), ``turn`` the sum of all servers and of latency. A device's time is linear in
its layers, so only counts matter. The search covers the set of devices, the two ends (the head costs a layer or more),
the counts, and the path through the links.

Under a limit on T the four are independent: counts fill the fastest devices first (exact, because times are linear),
and the path is the shortest one through the allowed links (Held and Karp 1962), both for every set and pair of ends at
once. A binary search over the finitely many values of T then finds the smallest cycle.

``ExactSearch`` needs layers of equal time and size; ``partition_unequal`` searches where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

EXACT_DEVICES = 10  # up to this number every set, pair of ends and order is considered
PLAIN, EMBEDS, HEAD = 0, 1, 2  # flags of a stage; both: the only stage

_ROUNDING = 1e-9
_NEVER = -(10**9)  # layers of an unusable device: no sum with it reaches the model's layers


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalLayers:
    """Times and capacities of N devices for L layers that differ."""

    done_s: Floats  # [N, L + 1] of the first 0, 1, ... layers
    earliest: Ints  # [N, 4, L + 1] first layer of the longest run that ends before a layer and fits, by flags


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProblem:
    """Times and capacities of N devices for one number of micro-batches."""

    num_layers: int
    micro_batches: int
    base_s: Floats  # [N] per step, independent of the layers
    layer_s: Floats  # [N] per layer, of the mean one if they differ
    head_s: Floats  # [N] additional with the head
    most_layers: Ints  # [N, 4] layers that fit wherever they begin, by flags; 0: the device cannot be used so
    upload_s: Floats  # [N, N] time that a step's activations occupy the link; infinite: no link
    latency_s: Floats  # [N, N] one way
    closing_s: Floats  # [N, N] from the last device's logits to the first one's next step
    unequal: UnequalLayers | None = None  # None: all layers are equal

    @property
    def num_devices(self) -> int:
        """Number of devices N."""
        return len(self.base_s)

    def stage_s(self, device: int, layers: range) -> float:
        """Return the time of a step over some layers, without the head."""
        if self.unequal is None:
            return float(self.base_s[device] + len(layers) * self.layer_s[device])
        done_s = self.unequal.done_s[device]
        return float(self.base_s[device] + done_s[layers.stop] - done_s[layers.start])


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Devices in order with their layers, and the resulting times."""

    devices: tuple[int, ...]
    layers: tuple[int, ...]
    server_s: float  # T
    turn_s: float
    cycle_s: float
    bound_s: float  # lower bound of every partition's cycle; equal to ``cycle_s`` if the search is exact

    def layers_at(self, position: int) -> range:
        """Return the layers of the stage at a position."""
        start = sum(self.layers[:position])
        return range(start, start + self.layers[position])


def evaluate(problem: PartitionProblem, devices: Sequence[int], layers: Sequence[int]) -> Partition:
    """Return the times of one partition, which must fit."""
    ends = list(accumulate(layers))
    times = [
        problem.stage_s(device, range(end - count, end))
        for device, count, end in zip(devices, layers, ends, strict=True)
    ]
    times[-1] += problem.head_s[devices[-1]]
    hops = list(pairwise(devices))
    uploads = [problem.upload_s[hop] for hop in hops]
    server_s = float(max([*times, *uploads]))
    latency_s = sum(problem.latency_s[hop] for hop in hops)
    turn_s = float(sum(times) + sum(uploads) + latency_s + problem.closing_s[devices[0], devices[-1]])
    cycle_s = max(problem.micro_batches * server_s, turn_s)
    return Partition(
        devices=tuple(devices),
        layers=tuple(layers),
        server_s=server_s,
        turn_s=turn_s,
        cycle_s=cycle_s,
        bound_s=cycle_s,
    )


class ExactSearch:
    """All sets of up to ten devices with all pairs of ends, built once for any number of problems."""

    def __init__(self, num_devices: int, *, count: int = 0, first: int | None = None, must: Sequence[int] = ()) -> None:
        """``count``: number of devices (0: any). ``first``: device at the start. ``must``: devices to include."""
        masks = np.arange(1, 1 << num_devices)
        member = (masks[:, None] >> np.arange(num_devices)) & 1
        sizes = member.sum(axis=1)
        wanted = np.ones(len(masks), dtype=bool) if not count else sizes == count
        for device in must:
            wanted &= member[:, device] == 1
        sets, firsts, lasts = np.nonzero(
            wanted[:, None, None]
            & (member[:, :, None] & member[:, None, :] == 1)
            & ((sizes == 1)[:, None, None] | ~np.eye(num_devices, dtype=bool))
        )
        if first is not None:
            kept = firsts == first
            sets, firsts, lasts = sets[kept], firsts[kept], lasts[kept]
        by_size = np.argsort(sizes[sets], kind="stable")  # equals are ordered by number of devices, fewest first
        sets, self._first, self._last = sets[by_size], firsts[by_size], lasts[by_size]
        self._num_devices = num_devices
        self._mask = masks[sets]
        self._member = member[sets].astype(np.float64)
        self._size = sizes[sets]
        devices = np.arange(num_devices)
        flags = np.where(devices == self._first[:, None], EMBEDS, 0) + np.where(devices == self._last[:, None], HEAD, 0)
        self._flags = np.where(member[sets] == 1, flags, 4)  # 4: not in the set
        self._sizes = sizes
        self._masks_by_size = [masks[sizes == size] for size in range(1, num_devices + 1)]

    def best(self, problem: PartitionProblem, *, below_s: float = inf, near_s: float = 0.0) -> Partition | None:
        """Return the partition with the smallest cycle below ``below_s``, or None. ``near_s``: estimate of its T."""
        if not len(self._mask) or not could_fit(problem, below_s / problem.micro_batches):
            return None
        search = _Limits(self, problem)
        limits = server_times(problem, below_s / problem.micro_batches)
        if search.shortest_turn_s(limits[-1]) >= below_s:
            return None
        search.forget_above(below_s)

        def filled(limit_s: float) -> bool:
            """Return whether the slowest server, not the turn, limits the ring."""
            if search.shortest_turn_s(limit_s) > problem.micro_batches * limit_s:
                return False
            search.forget_above(problem.micro_batches * limit_s * (1 + _ROUNDING))
            return True

        low = first_true(limits, filled, near=near_index(limits, near_s))
        shares = [search.partition(limits[index]) for index in (low, low - 1) if index >= 0]
        found = [partition for partition in shares if partition is not None and partition.cycle_s < below_s]
        return min(found, key=lambda partition: partition.cycle_s, default=None)

    def balanced(self, problem: PartitionProblem, partition: Partition, *, slack: float) -> Partition:
        """Return the partition with the fastest slowest server, among those whose cycle is at most ``slack`` longer."""
        most_s = partition.cycle_s * (1 + slack)
        search = _Limits(self, problem)
        limit_s = first_limit(
            server_times(problem, partition.server_s), lambda limit: search.shortest_turn_s(limit) <= most_s
        )
        found = None if limit_s is None else search.partition(limit_s)
        return (
            partition
            if found is None or found.server_s >= partition.server_s
            else replace(found, bound_s=partition.bound_s)
        )

    def stage_sums_s(self, problem: PartitionProblem, limit_s: float, choices: Ints) -> tuple[Floats, Ints]:
        """Return for each choice the least sum of step times within the limit ``[C]``, and its layers ``[C, N]``."""
        rooms = rooms_within(problem, limit_s)  # [N, 5]
        fastest = np.argsort(problem.layer_s, kind="stable")
        room = rooms[fastest, self._flags[choices][:, fastest]]  # [C, N], fastest first
        extra = np.maximum(room - 1, 0)
        before = np.cumsum(extra, axis=1) - extra
        missing = problem.num_layers - self._size[choices]
        taken = np.clip(missing[:, None] - before, 0, extra)
        sums = self._member[choices] @ (problem.base_s + problem.layer_s) + problem.head_s[self._last[choices]]
        sums += taken @ problem.layer_s[fastest]
        fits = (room.sum(axis=1) >= problem.num_layers) & (missing >= 0)
        layers = np.zeros_like(room)
        layers[:, fastest] = taken
        return np.where(fits, sums, inf), layers + (self._flags[choices] < 4)

    def paths_s(self, problem: PartitionProblem, limit_s: float) -> Floats:
        """Return ``[masks, N, N]``: the shortest path through a set, from end to end over links within the limit."""
        hop = np.where(problem.upload_s <= limit_s, problem.upload_s + problem.latency_s, inf)
        np.fill_diagonal(hop, inf)
        n = self._num_devices
        paths = np.full((1 << n, n, n), inf)
        for device in range(n):
            paths[1 << device, device, device] = 0.0
        for masks in self._masks_by_size[:-1]:
            longer = (paths[masks][:, :, :, None] + hop[None, None]).min(axis=2)  # [m, first, next]
            for device in range(n):
                free = (masks >> device) & 1 == 0
                paths[masks[free] | 1 << device, :, device] = longer[free, :, device]
        return paths

    def sizes(self) -> Ints:
        """Return the number of devices of every choice."""
        return self._size

    def any_way(self, choice: int) -> tuple[int, ...]:
        """Return the devices of a choice, in any order between its ends."""
        first, last = int(self._first[choice]), int(self._last[choice])
        between = [int(device) for device in np.flatnonzero(self._flags[choice] == PLAIN)]
        return (first, *between, last) if first != last else (first,)

    def path(self, paths: Floats, problem: PartitionProblem, choice: int, *, limit_s: float) -> tuple[int, ...]:
        """Return the devices of a choice in the order of its shortest path over links within the limit."""
        hop = np.where(problem.upload_s <= limit_s, problem.upload_s + problem.latency_s, inf)
        first, last, mask = int(self._first[choice]), int(self._last[choice]), int(self._mask[choice])
        order = [last]
        while mask != 1 << first:
            device = order[-1]
            mask ^= 1 << device
            order.append(int(np.argmin(paths[mask, first] + hop[:, device])))
        return tuple(reversed(order))

    def choices(self) -> tuple[Ints, Ints, Ints]:
        """Return the mask, first and last device of every choice."""
        return self._mask, self._first, self._last


class _Limits:
    """One problem under different limits on T."""

    def __init__(self, search: ExactSearch, problem: PartitionProblem) -> None:
        self._search = search
        self._instance = problem
        self._uploads = np.unique(problem.upload_s[np.isfinite(problem.upload_s)])
        self._ways: dict[int, Floats] = {}
        self._alive = np.arange(len(search.choices()[0]))  # choices that can still be the best
        self._turns = np.zeros(0)
        self._alike = _alike(problem)

    def shortest_turn_s(self, limit_s: float) -> float:
        """Return the shortest turn of all choices; infinite if none fits."""
        _, first, last = self._search.choices()
        sums, _ = self._search.stage_sums_s(self._instance, limit_s, self._alive)
        closing_s = self._instance.closing_s[first[self._alive], last[self._alive]]
        self._turns = sums + self._paths_s(limit_s) + closing_s
        return float(self._turns.min())

    def forget_above(self, cycle_s: float) -> None:
        """Drop choices with a longer turn under the last limit: under a lower limit it is not shorter."""
        self._alive = self._alive[self._turns <= cycle_s]

    def partition(self, limit_s: float) -> Partition | None:
        """Return the partition with the shortest turn."""
        if self.shortest_turn_s(limit_s) == inf:
            return None
        choice = self._alive[int(np.argmin(self._turns))]
        _, layers = self._search.stage_sums_s(self._instance, limit_s, np.array([choice]))
        if self._alike is not None:
            order = self._search.any_way(int(choice))
        else:
            paths, most_s = self._ways_at(limit_s), limit_s * (1 + _ROUNDING)
            order = self._search.path(paths, self._instance, int(choice), limit_s=most_s)
        return evaluate(self._instance, order, [int(layers[0, device]) for device in order])

    def _paths_s(self, limit_s: float) -> Floats:
        """Return the shortest path of every choice."""
        if self._alike is not None:
            upload_s, latency_s = self._alike
            hops = self._search.sizes()[self._alive] - 1
            hop_s = upload_s + latency_s if upload_s <= limit_s * (1 + _ROUNDING) else inf
            return np.where(hops == 0, 0.0, hops * hop_s) if hop_s < inf else np.where(hops == 0, 0.0, inf)
        mask, first, last = (column[self._alive] for column in self._search.choices())
        return self._ways_at(limit_s)[mask, first, last]

    def _ways_at(self, limit_s: float) -> Floats:
        """Return the paths at a limit. They change only where the limit passes a link's upload."""
        allowed = int(np.searchsorted(self._uploads, limit_s * (1 + _ROUNDING), side="right"))
        if allowed not in self._ways:
            longest = self._uploads[allowed - 1] if allowed else -1.0
            self._ways[allowed] = self._search.paths_s(self._instance, float(longest))
        return self._ways[allowed]


def _alike(problem: PartitionProblem) -> tuple[float, float] | None:
    """Return upload and latency if all links are equal, so that the order does not matter; else None."""
    others = ~np.eye(problem.num_devices, dtype=bool)
    uploads, latencies = problem.upload_s[others], problem.latency_s[others]
    if not len(uploads):
        return 0.0, 0.0
    if np.ptp(latencies) or not np.isfinite(uploads).all() or np.ptp(uploads):
        return None
    return float(uploads[0]), float(latencies[0])


def first_limit(limits: Floats, holds: Callable[[float], bool]) -> float | None:
    """Return the smallest limit for which ``holds``, or None if the last one fails. ``holds`` must be monotonic."""
    if not len(limits) or not holds(float(limits[-1])):
        return None
    return float(limits[first_true(limits, holds, near=len(limits) - 1)])


def first_true(limits: Floats, holds: Callable[[float], bool], *, near: int) -> int:
    """Return the index of the first limit for which ``holds``. ``holds`` must be monotonic and true for the last.

    Starts at ``near`` and moves away in growing steps: successive searches have close results.
    """
    low, high = 0, len(limits) - 1
    step, at = 1, min(max(near, 0), high)
    while low < high:
        if holds(float(limits[at])):
            high = at
            if low == high:
                break
            at = max(low, at - step) if step else (low + high) // 2
        else:
            low = at + 1
            at = min(high, low + step - 1) if step else (low + high) // 2
        if step and (at <= low or at >= high or 4 * step > high - low):
            step, at = 0, (low + high) // 2  # both bounds are known: bisect
        step *= 2
    return low


def near_index(limits: Floats, near_s: float) -> int:
    """Return the index to start at: a known T, else the top, since a better limit is seldom far below it."""
    return int(np.searchsorted(limits, near_s)) if near_s else len(limits) - 2


def could_fit(problem: PartitionProblem, limit_s: float) -> bool:
    """Return False if the devices cannot hold the model within the limit. Cheap; True may be wrong."""
    rooms = rooms_within(problem, limit_s)[:, :4].max(axis=1)
    return int(np.maximum(rooms, 0).sum()) >= problem.num_layers


def rooms_within(problem: PartitionProblem, limit_s: float) -> Ints:
    """Return ``[N, 5]``: layers that a device may take, by flags; the last column is for devices not in the set."""
    layer_s = np.maximum(problem.layer_s, 1e-15)
    plain = np.minimum((limit_s - problem.base_s) / layer_s + _ROUNDING, 10**6)
    headed = np.minimum((limit_s - problem.base_s - problem.head_s) / layer_s + _ROUNDING, 10**6)
    by_time = np.floor(np.stack([plain, plain, headed, headed], axis=1)).astype(np.int64)
    room = np.minimum(by_time, problem.most_layers)
    room = np.where(room < 1, _NEVER, room)
    return np.concatenate([room, np.zeros((len(room), 1), dtype=np.int64)], axis=1)


def server_times(problem: PartitionProblem, most_s: float) -> Floats:
    """Return all possible times of the slowest server up to ``most_s``, ascending."""
    counts = np.arange(1, problem.num_layers + 1)
    plain = problem.base_s[:, None] + counts * problem.layer_s[:, None]
    values = [plain.ravel(), (plain + problem.head_s[:, None]).ravel(), problem.upload_s.ravel()]
    found = np.unique(np.concatenate(values))
    found = found[found <= most_s]
    return np.append(found, most_s) if most_s < inf else found
