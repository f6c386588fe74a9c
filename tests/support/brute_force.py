"""Finds the best partition by trying all: the referee of the planner's searches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import inf

from edgepipe.planner.partition import Partition, PartitionProblem, evaluate, flags_of


def brute_force(problem: PartitionProblem) -> Partition | None:
    """Return the best partition by trying all, for few devices and layers. None if the model does not fit."""
    best: Partition | None = None
    for count in range(1, min(problem.num_devices, problem.num_layers) + 1):
        for devices in permutations(range(problem.num_devices), count):
            most = [int(problem.most_layers[device, flags_of(i, count)]) for i, device in enumerate(devices)]
            for layers in _compositions(problem.num_layers, most):
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
