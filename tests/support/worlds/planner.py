"""Machines and links for tests of the planner."""

from __future__ import annotations

import string
from dataclasses import replace

import numpy as np

from edgepipe.backend.cost import CostModel
from edgepipe.backend.devices import named_device, parse_devices
from edgepipe.ids import NodeId
from edgepipe.planner.partition import PartitionProblem, UnequalLayers
from edgepipe.planner.partition_unequal import earliest_within
from edgepipe.planner.placement import NodeRoom
from edgepipe.planner.profiles import Machine, TableSpeed
from edgepipe.spec.facts import ModelConfig

GB = 10**9


def machine(name: str, device: str, config: ModelConfig, *, free_bytes: int = 0, taken_bytes: int = 0) -> Machine:
    model = named_device(device)
    return Machine(
        room=NodeRoom(
            node_id=NodeId(name),
            name=name,
            free_bytes=free_bytes or model.memory_bytes - GB // 2,
            bytes_per_weight=2,
        ),
        device=model.name,
        speed=TableSpeed(CostModel(config, model)),
        taken_bytes=taken_bytes,
    )


def machines(devices: str, config: ModelConfig) -> list[Machine]:
    """Called a, b, c, ..."""
    return [
        machine(name, key, config) for name, key in zip(string.ascii_lowercase, parse_devices(devices), strict=False)
    ]


def unequal_instance(generator: np.random.Generator, *, devices: int, layers: int, alike: bool) -> PartitionProblem:
    """Any times and rooms of layers in classes; links of one kind where ``alike``."""
    problem = random_instance(generator, devices=devices, layers=layers, alike=alike)
    if alike:
        np.copyto(problem.closing_s, problem.closing_s[0, 0])
    kinds = generator.integers(0, int(generator.integers(1, 4)), layers)
    times = generator.uniform(0.1, 2, (devices, 3))[:, kinds]
    sizes = generator.integers(1, 9, 3)[kinds]
    rooms = generator.integers(0, 9 * layers, (devices, 1)) - np.array([0, 2, 3, 5])
    if generator.random() < 0.3:
        rooms[:] = 9 * layers
    return replace(
        problem,
        layer_s=times.mean(axis=1),
        unequal=UnequalLayers(
            done_s=np.concatenate([np.zeros((devices, 1)), np.cumsum(times, axis=1)], axis=1),
            earliest=np.stack([earliest_within(sizes, room.tolist()) for room in rooms]),
        ),
    )


def random_instance(
    generator: np.random.Generator, *, devices: int, layers: int, alike: bool, micro_batches: int = 0
) -> PartitionProblem:
    """Any times and rooms; links of one kind where ``alike``."""
    most = generator.integers(0, layers + 1, (devices, 1)) + np.array([2, 1, 1, 0])
    if generator.random() < 0.3:
        most[:] = layers
    tables = [generator.uniform(0, high, (devices, devices)) for high in (3, 4, 2)]
    if alike:
        tables = [np.full_like(table, table[0, 0]) for table in tables]
    return PartitionProblem(
        num_layers=layers,
        micro_batches=micro_batches or int(generator.integers(1, 7)),
        base_s=generator.uniform(0, 1, devices),
        layer_s=generator.uniform(0.1, 2, devices),
        head_s=generator.uniform(0, 3, devices),
        most_layers=np.clip(most, 0, layers),
        upload_s=tables[0],
        latency_s=tables[1],
        closing_s=tables[2],
    )
