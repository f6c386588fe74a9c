"""Conversions of what the planner is told: profiles of layers and links, surveys of a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterable

from edgepipe.backend.types import DeviceProfile
from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import NodeId
from edgepipe.model.config_json import config_from_json
from edgepipe.model.facts import ModelConfig
from edgepipe.planner.cluster import Cluster
from edgepipe.planner.placement import NodeRoom
from edgepipe.planner.profiles import LayerProfile, Links, Machine, MeasuredSpeed, Point, estimated_speed
from edgepipe.units import LinkShape
from edgepipe.wire.v1 import common_pb2
from edgepipe.wire.v1 import node_pb2 as pb


def layer_profile_to_wire(profile: LayerProfile) -> pb.LayerProfile:
    """A layer's times for the wire."""
    return pb.LayerProfile(
        base_s=profile.base_s,
        decode=_points_to_wire(profile.decode),
        prefill=_points_to_wire(profile.prefill),
        head=_points_to_wire(profile.head),
        kv_token_s=profile.kv_token_s,
        decode_context=profile.decode_context,
    )


def layer_profile_from_wire(told: pb.LayerProfile) -> LayerProfile:
    """A layer's times from the wire. Raises RemoteProtocolError where nothing was measured."""
    if not told.decode or not told.prefill or not told.head:
        raise RemoteProtocolError("a node told a layer's times without any")
    return LayerProfile(
        base_s=told.base_s,
        decode=_points_from_wire(told.decode),
        prefill=_points_from_wire(told.prefill),
        head=_points_from_wire(told.head),
        kv_token_s=told.kv_token_s,
        decode_context=told.decode_context,
        busy=told.busy,
        measured_s=told.measured_ms / 1e3,
    )


def device_profile_from_wire(told: common_pb2.DeviceProfile) -> DeviceProfile:
    """A device as its node tells of it."""
    return DeviceProfile(
        backend=told.backend,
        device=told.device,
        name=told.name,
        compute_dtype=told.compute_dtype,
        memory_total_bytes=told.memory_total_bytes,
        memory_free_bytes=told.memory_free_bytes,
        bandwidth_bytes_per_s=told.bandwidth_bytes_per_s,
        flops=told.flops,
        block_sizes=tuple(told.block_sizes),
        contiguous_kv=told.contiguous_kv,
    )


def cluster_from_wire(survey: pb.SurveyReply) -> Cluster:
    """What a plan is made of."""
    config = config_from_json(json.loads(survey.model_config))
    links = {
        (NodeId(one.sender), NodeId(one.receiver)): LinkShape(
            bytes_per_s=one.bytes_per_s or float("inf"), one_way_s=one.one_way_s
        )
        for one in survey.links
    }
    return Cluster(
        model=survey.model,
        config=config,
        machines=tuple(_machine(one, config) for one in survey.machines),
        links=Links(
            measured=links,
            broken=frozenset((NodeId(one.node_id), NodeId(one.other_id)) for one in survey.broken),
        ),
    )


def _machine(told: pb.SurveyedMachine, config: ModelConfig) -> Machine:
    device = device_profile_from_wire(told.device)
    size = told.value_bytes or 2
    if told.HasField("layer"):
        speed = MeasuredSpeed(layer_profile_from_wire(told.layer))
    else:
        speed = estimated_speed(device, config, bytes_per_weight=size)
    return Machine(
        room=NodeRoom(
            node_id=NodeId(told.node_id),
            name=told.name,
            free_bytes=told.free_bytes,
            bytes_per_weight=size,
            bytes_per_kv=size,
            shares_host_memory=told.shares_host_memory,
        ),
        device=device.name,
        speed=speed,
        total_bytes=device.memory_total_bytes,
        taken_bytes=told.taken_bytes,
    )


def _points_to_wire(points: Iterable[Point]) -> list[pb.ProfilePoint]:
    return [pb.ProfilePoint(size=one.size, seconds=one.seconds) for one in points]


def _points_from_wire(points: Iterable[pb.ProfilePoint]) -> tuple[Point, ...]:
    return tuple(Point(one.size, one.seconds) for one in points)
