"""The planner's view of a survey."""

from __future__ import annotations

import json

from edgepipe.backend.types import StageSettings
from edgepipe.errors import EdgepipeError, RemoteProtocolError
from edgepipe.ids import NodeId
from edgepipe.planner.cluster import Cluster
from edgepipe.planner.placement import NodeRoom
from edgepipe.planner.profiles import Links, Machine, estimated_speed, measured_speed
from edgepipe.spec.config_json import config_from_json
from edgepipe.spec.drafting import drafting
from edgepipe.spec.facts import ModelConfig
from edgepipe.units import LinkShape
from edgepipe.weights.resident import dtype_of
from edgepipe.weights.weight_table import WeightTable, table_from_json
from edgepipe.wire.serving import SurveyedMachine, SurveyReply


def cluster_of(survey: SurveyReply, *, mtp: bool = False) -> Cluster:
    """Return a survey as the planner's cluster.

    ``mtp``: the model drafts with a layer of its own. Raises RemoteProtocolError for a profile without times,
    ConfigInvalid if the model has no such layer.
    """
    config = config_from_json(json.loads(survey.model_config))
    config = drafting(config, survey.model) if mtp else config
    weights = table_from_json(survey.model_weights, config)
    links = {
        (NodeId(link.sender), NodeId(link.receiver)): LinkShape(
            bytes_per_s=link.bytes_per_s or float("inf"), one_way_s=link.one_way_s
        )
        for link in survey.links
    }
    return Cluster(
        model=survey.model,
        config=config,
        weights=weights,
        kv=survey.settings.kv,
        machines=tuple(_machine(machine, config, weights, survey.settings) for machine in survey.machines),
        links=Links(
            measured=links,
            broken=frozenset((NodeId(link.node_id), NodeId(link.other_id)) for link in survey.broken),
        ),
    )


def _machine(surveyed: SurveyedMachine, config: ModelConfig, weights: WeightTable, settings: StageSettings) -> Machine:
    device = surveyed.device
    size = surveyed.value_bytes or 2
    if (layer := surveyed.layer) is not None:
        if not layer.decode or not layer.prefill or not layer.head:
            raise RemoteProtocolError(f"{surveyed.name} reported a layer profile without times")
        speed = measured_speed(layer, device, config, weights=weights, dtype=dtype_of(size))
    else:
        speed = estimated_speed(device, config, weights=weights, dtype=dtype_of(size), kv=settings.kv)
    return Machine(
        room=NodeRoom(
            node_id=surveyed.node_id,
            name=surveyed.name,
            free_bytes=surveyed.free_bytes,
            bytes_per_weight=size,
            shares_host_memory=surveyed.shares_host_memory,
            packing=device.packing,
            kv=settings.kv,
            most_slots=settings.most_slots,
            ram_bytes=surveyed.ram_free_bytes,
        ),
        device=device.name,
        speed=speed,
        total_bytes=device.memory_total_bytes,
        taken_bytes=surveyed.taken_bytes,
        obstacle=_in_one_line(surveyed.obstacle) if surveyed.obstacle is not None else "",
    )


def _in_one_line(error: EdgepipeError) -> str:
    """Return what is in the way, with the fact and the remedy."""
    what = f"{error.what} ({error.fact})" if error.fact else error.what
    return f"{what}: {error.next_step}" if error.next_step else what
