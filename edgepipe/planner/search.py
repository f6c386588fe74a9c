"""Search the partition of the layers among machines, with the KV room and the number of micro-batches. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from edgepipe.backend.cost import layer_kinds
from edgepipe.errors import NoFeasiblePlacement, PlanInvalid
from edgepipe.planner.constraints import Constraints, LeftOut, machine_named
from edgepipe.planner.demand import Demand, Objective, batch_parts
from edgepipe.planner.hosts import hop_host_s, turn_host_s
from edgepipe.planner.partition import EXACT_DEVICES, ExactSearch, Ints, Partition, PartitionProblem, UnequalLayers
from edgepipe.planner.partition_many import ManySearch
from edgepipe.planner.partition_unequal import ManyUnequalSearch, UnequalSearch, earliest_within
from edgepipe.planner.placement import Need, NodeRoom, Placed, stage_weight_bytes
from edgepipe.planner.profiles import Links, Machine, Speed, StepParts
from edgepipe.scheduler.sizing import most_micro_batches
from edgepipe.spec.facts import LayerRange, Slice, make_slices
from edgepipe.units import format_bytes, format_duration_s
from edgepipe.weights.resident import ResidentSizes

_SLACK = 0.003  # share of the objective to give up for a more even spread of work
_MUCH_LONGER = 4.0  # factor of the cycle, limit for a first search
_WORTH = 0.01  # smallest gain that justifies another device


class _Rooms(NamedTuple):
    """Layers that fit, by machine and flags; see ``PartitionProblem`` and ``UnequalLayers``."""

    most: Ints
    earliest: Ints


_PartitionSearch = ExactSearch | ManySearch | UnequalSearch | ManyUnequalSearch


class Search:
    """One search over machines, KV room and micro-batches."""

    def __init__(self, demand: Demand, machines: Sequence[Machine], links: Links, constraints: Constraints) -> None:
        self._demand = demand
        self._machines = machines
        self._layers = demand.config.num_layers
        self._equal = len(set(layer_kinds(demand.config, demand.weights))) == 1
        self._constraints = constraints
        self._check_count()
        self._first = machines.index(machine_named(machines, constraints.first)) if constraints.first else None
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


def _slice(flags: int) -> Slice:
    return Slice(index=0, layers=LayerRange(0, 1), embedding=bool(flags & 1), head=bool(flags & 2))


def need_of(demand: Demand, kv_tokens: int) -> Need:
    """Return what stages must hold beside other things."""
    return Need(config=demand.config, kv_tokens=kv_tokens, weights=demand.weights)


def weight_bytes(demand: Demand, room: NodeRoom, part: Slice) -> int:
    """Return the bytes of a slice's weights on a node."""
    return stage_weight_bytes(need_of(demand, 0), room, part)
