"""Conversions of the planner's inputs: profiles of layers and links, surveys of a cluster."""

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
    """Convert a layer's times for the wire."""
    return pb.LayerProfile(
        base_s=profile.base_s,
        decode=_points_to_wire(profile.decode),
        prefill=_points_to_wire(profile.prefill),
        head=_points_to_wire(profile.head),
        kv_token_s=profile.kv_token_s,
        decode_context=profile.decode_context,
    )


def layer_profile_from_wire(message: pb.LayerProfile) -> LayerProfile:
    """Convert a layer's times from the wire. Raises RemoteProtocolError if they are empty."""
    if not message.decode or not message.prefill or not message.head:
        raise RemoteProtocolError("a node reported a layer profile without times")
    return LayerProfile(
        base_s=message.base_s,
        decode=_points_from_wire(message.decode),
        prefill=_points_from_wire(message.prefill),
        head=_points_from_wire(message.head),
        kv_token_s=message.kv_token_s,
        decode_context=message.decode_context,
        busy=message.busy,
        measured_s=message.measured_ms / 1e3,
    )


def device_profile_from_wire(message: common_pb2.DeviceProfile) -> DeviceProfile:
    """Convert a device's profile from the wire."""
    return DeviceProfile(
        backend=message.backend,
        device=message.device,
        name=message.name,
        compute_dtype=message.compute_dtype,
        memory_total_bytes=message.memory_total_bytes,
        memory_free_bytes=message.memory_free_bytes,
        bandwidth_bytes_per_s=message.bandwidth_bytes_per_s,
        flops=message.flops,
        block_sizes=tuple(message.block_sizes),
        contiguous_kv=message.contiguous_kv,
    )


def cluster_from_wire(survey: pb.SurveyReply) -> Cluster:
    """Convert a survey to the planner's cluster."""
    config = config_from_json(json.loads(survey.model_config))
    links = {
        (NodeId(link.sender), NodeId(link.receiver)): LinkShape(
            bytes_per_s=link.bytes_per_s or float("inf"), one_way_s=link.one_way_s
        )
        for link in survey.links
    }
    return Cluster(
        model=survey.model,
        config=config,
        machines=tuple(_machine(message, config) for message in survey.machines),
        links=Links(
            measured=links,
            broken=frozenset((NodeId(link.node_id), NodeId(link.other_id)) for link in survey.broken),
        ),
    )


def _machine(message: pb.SurveyedMachine, config: ModelConfig) -> Machine:
    device = device_profile_from_wire(message.device)
    size = message.value_bytes or 2
    if message.HasField("layer"):
        speed = MeasuredSpeed(layer_profile_from_wire(message.layer))
    else:
        speed = estimated_speed(device, config, bytes_per_weight=size)
    return Machine(
        room=NodeRoom(
            node_id=NodeId(message.node_id),
            name=message.name,
            free_bytes=message.free_bytes,
            bytes_per_weight=size,
            bytes_per_kv=size,
            shares_host_memory=message.shares_host_memory,
        ),
        device=device.name,
        speed=speed,
        total_bytes=device.memory_total_bytes,
        taken_bytes=message.taken_bytes,
    )


def _points_to_wire(points: Iterable[Point]) -> list[pb.ProfilePoint]:
    return [pb.ProfilePoint(size=point.size, seconds=point.seconds) for point in points]


def _points_from_wire(points: Iterable[pb.ProfilePoint]) -> tuple[Point, ...]:
    return tuple(Point(point.size, point.seconds) for point in points)
