"""Nodes whose backend computes no recurrent layers are left out of pipelines with them, and it is said why."""

from __future__ import annotations

from dataclasses import replace

from edgepipe_emulated import EmulatedBackend

from edgepipe.backend.types import DEFAULT_SETTINGS, BackendOptions
from edgepipe.daemon.serving.capacity import cannot_keep, rooms_of
from edgepipe.ids import NodeId
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.nodes import DeviceState, NodeState
from edgepipe.wire.v1 import node_pb2


def node(*, keeps_states: bool) -> NodeState:
    profile = replace(EmulatedBackend(BackendOptions(device="h100")).profile(), keeps_states=keeps_states)
    device = DeviceState(profile=profile, state="ready", free_bytes=1 << 30)
    return from_wire(to_wire(NodeState(node_id=NodeId("a"), devices=(device,)), node_pb2.NodeState), NodeState)


def test_a_node_that_knows_no_states_is_left_out_of_recurrent_models_only() -> None:
    other = node(keeps_states=False)
    assert rooms_of(other, DEFAULT_SETTINGS)
    assert not rooms_of(other, DEFAULT_SETTINGS, states=True)
    assert cannot_keep(other, DEFAULT_SETTINGS, states=True).startswith("cannot keep states of recurrent layers")
    assert cannot_keep(other, DEFAULT_SETTINGS, states=False) == ""


def test_the_emulated_backend_keeps_states() -> None:
    assert rooms_of(node(keeps_states=True), DEFAULT_SETTINGS, states=True)
    assert EmulatedBackend(BackendOptions(device="h100")).profile().keeps_states
    assert cannot_keep(node(keeps_states=True), DEFAULT_SETTINGS, states=True) == ""


def test_a_node_without_a_device_lacks_more_than_states() -> None:
    assert cannot_keep(NodeState(node_id=NodeId("a")), DEFAULT_SETTINGS, states=True) == ""
