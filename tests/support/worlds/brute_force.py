"""Finds the best partition by trying all: the referee of the planner's searches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import inf

from edgepipe.planner.partition import EMBEDS, HEAD, Partition, PartitionProblem, evaluate


def brute_force(problem: PartitionProblem) -> Partition | None:
    """Return the best partition by trying all, for few devices and layers. None if the model does not fit."""
    best: Partition | None = None
    for count in range(1, min(problem.num_devices, problem.num_layers) + 1):
        for devices in permutations(range(problem.num_devices), count):
            most = [int(problem.most_layers[device, _flags_of(i, count)]) for i, device in enumerate(devices)]
            if problem.unequal is not None:
                most = [problem.num_layers] * count
            for layers in _compositions(problem.num_layers, most):
                if not _fits(problem, devices, layers):
                    continue
                partition = evaluate(problem, devices, layers)
                if partition.cycle_s < inf and (best is None or partition.cycle_s < best.cycle_s):
                    best = partition
    return best


def _compositions(total: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write ``total`` as a sum of counts from 1 to ``most``."""
    if len(most) == 1:
        if 1 <= total <= most[0]:
            yield (total,)
        return
    for first in range(1, min(most[0], total - len(most) + 1) + 1):
        for rest in _compositions(total - first, most[1:]):
            yield (first, *rest)


def _fits(problem: PartitionProblem, devices: Sequence[int], layers: Sequence[int]) -> bool:
    """Return whether every device can hold its run of layers that differ."""
    if problem.unequal is None:
        return True
    end = 0
    for i, (device, count) in enumerate(zip(devices, layers, strict=True)):
        end += count
        if problem.unequal.earliest[device, _flags_of(i, len(devices)), end] > end - count:
            return False
    return True


def _flags_of(position: int, count: int) -> int:
    return (EMBEDS if position == 0 else 0) | (HEAD if position == count - 1 else 0)
