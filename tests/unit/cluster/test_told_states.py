"""What a member tells of itself is taken in as long as it is no larger than a home's machine has to tell."""

from __future__ import annotations

import pytest

from edgepipe.cluster.heartbeats import read_state
from edgepipe.cluster.reported_states import MAX_ENTRIES, MAX_STATE_BYTES, is_address
from edgepipe.errors import EdgepipeError
from edgepipe.wire.v1 import engine_pb2
from edgepipe.wire.v1 import node_pb2 as pb
from edgepipe.wire.v1.common_pb2 import LayerRange


def state(**fields: object) -> pb.NodeState:
    return pb.NodeState(node_id="n", name="studio", address="192.168.1.7:7070", **fields)  # pyright: ignore[reportArgumentType]


def test_a_large_home_s_node_is_taken_in() -> None:
    models = [
        pb.ModelOnDisk(model=f"org/model-{index}", manifest_hash="0" * 64, parts=[LayerRange(end=1)])
        for index in range(1000)
    ]
    serves = [pb.ServeRecord(body=bytes(1000), signature=bytes(72)) for _ in range(64)]
    engines = [engine_pb2.EngineState(stages=[engine_pb2.StageState()] * 32, certificate=bytes(800)) for _ in range(8)]
    taken = read_state(state(models=models, serves=serves, engines=engines))
    assert (len(taken.models), len(taken.serves), len(taken.engines)) == (1000, 64, 8)


@pytest.mark.parametrize(
    "message",
    [
        state(platform="x" * MAX_STATE_BYTES),
        state(engines=[{}] * 65),
        state(gateways=[b""] * 33),
        state(silent=["n"] * (MAX_ENTRIES + 1)),
        state(engines=[{"stages": [{"slices": [{"layers": {"end": 1}}] * 2000}] * 3}]),
        pb.NodeState(node_id="n", address="unix:/tmp/socket"),
        pb.NodeState(node_id="n"),
        state(models=[{"parts": [{"start": 3, "end": 1}]}]),
    ],
    ids=["bytes", "engines", "gateways", "entries", "entries far inside", "a path", "nowhere", "no range"],
)
def test_what_costs_other_nodes_too_much_is_not(message: pb.NodeState) -> None:
    with pytest.raises(EdgepipeError):
        read_state(message)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "studio.local:7070", "[fe80::1%en0]:7070"])
def test_addresses(text: str) -> None:
    assert is_address(text)


@pytest.mark.parametrize(
    "text", ["", "studio", "dns:///x:1", "unix:/tmp/x", "x:99999", "a b:1", "x:1\n", "x" * 300 + ":1"]
)
def test_no_addresses(text: str) -> None:
    assert not is_address(text)
