"""Plans for nodes that keep experts in host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgepipe.backend.cost import CostModel
from edgepipe.backend.devices import named_device, parse_devices
from edgepipe.errors import NoFeasiblePlacement
from edgepipe.model.expert_places import with_share
from edgepipe.model.mixes import named_model
from edgepipe.planner.cluster import known_cluster
from edgepipe.planner.demand import Demand
from edgepipe.planner.plan import Plan, plan
from edgepipe.planner.profiles import TableSpeed
from edgepipe.units import parse_link

MODEL = "qwen3-30b-a3b:q8_0"  # 32 GB


def planned(devices: str, percent: int) -> Plan:
    """The plan for devices, the first of which keeps so many percent of the layers' experts in RAM."""
    config, weights = named_model(MODEL)
    there = known_cluster(parse_devices(devices), config, link=parse_link("1gbit,0.3ms"), weights=weights)
    kind = with_share("torch-cuda", percent)
    first = there.machines[0]
    own = replace(
        first,
        room=replace(first.room, packing=kind),
        speed=TableSpeed(CostModel(config, named_device(parse_devices(devices)[0]), weights=weights, kind=kind)),
    )
    demand = Demand(config=config, weights=weights)
    return plan(demand, [own, *there.machines[1:]], there.links, explain=False)


def test_a_model_fits_a_device_that_is_too_small_for_its_experts() -> None:
    with pytest.raises(NoFeasiblePlacement):
        planned("rtx4090", 0)
    for percent in (60, 100):
        assert len(planned("rtx4090", percent).stages) == 1


def test_two_devices_beat_one_that_reads_experts_from_ram() -> None:
    assert len(planned("2x rtx4090", 0).stages) == 2
    assert planned("rtx4090", 100).tokens_per_s < planned("2x rtx4090", 0).tokens_per_s
