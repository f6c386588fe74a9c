"""``--experts-in-ram``: from the flag to the stage's backend, and the host memory that a node sets aside for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edgepipe_emulated import EmulatedBackend

from edgepipe.backend.types import DEFAULT_SETTINGS, BackendOptions, DeviceProfile
from edgepipe.cli.serve import serve_request
from edgepipe.daemon.device.device import _load_command
from edgepipe.daemon.device.device_memory import DeviceMemory, as_loaded
from edgepipe.daemon.device.memory import DiskLedger
from edgepipe.daemon.serving.capacity import rooms_of, stages_of
from edgepipe.daemon.serving.replanning import placed_of
from edgepipe.errors import ConfigInvalid, NoFeasiblePlacement
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.planner.placement import Placed
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.weights.mixes import named_model
from edgepipe.weights.resident import resident_sizes
from edgepipe.wire.children import LoadShard, PrepareRequest
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.engines import ServeSpec, StagePlacement
from edgepipe.wire.nodes import DeviceState, NodeState
from edgepipe.wire.v1 import node_pb2
from edgepipe.workers.stage import _options
from tests.support.daemon.stage_settings import STAGE_SETTINGS

CONFIG, WEIGHTS = named_model("qwen3-30b-a3b:q8_0")
SLICES = make_slices([LayerRange(0, 48)], 48)
IN_RAM = sum(resident_sizes(CONFIG, WEIGHTS, kind="emulated/40", dtype="bfloat16").in_ram)


def prepare(percent: int, pipeline: str = "p") -> PrepareRequest:
    request = PrepareRequest(
        pipeline_id=PipelineId(pipeline),
        epoch=Epoch(1, EngineId("e")),
        placement=StagePlacement(node_id=NodeId("a"), slices=SLICES, ram_percent=percent),
        settings=DEFAULT_SETTINGS,
        kv_tokens=512,
    )
    return from_wire(to_wire(request, node_pb2.PrepareRequest), PrepareRequest)


def options_of(load: LoadShard) -> BackendOptions:
    return _options(STAGE_SETTINGS, load.settings, load.placement.ram_percent)


def profile(**settings: str) -> DeviceProfile:
    return EmulatedBackend(BackendOptions(device="h100", settings=settings)).profile()


def memory(measured: DeviceProfile) -> DeviceMemory:
    made = DeviceMemory(
        node_name="a", limit_bytes=0, kills=lambda: 0, disk=DiskLedger(free=lambda: 0, written=dict[str, int])
    )
    made.measured(measured)
    return made


def test_the_flag_travels_to_the_planner_and_a_stage_s_share_to_its_backend() -> None:
    spec = serve_request("m", experts_in_ram="auto").options
    assert from_wire(to_wire(spec, node_pb2.ServeSpec), ServeSpec).experts_in_ram == "auto"
    placed = (Placed(node_id=NodeId("a"), part=SLICES[0], ram_percent=40),)
    spec = from_wire(to_wire(replace(spec, stages=stages_of(placed)), node_pb2.ServeSpec), ServeSpec)
    assert placed_of(spec) == placed
    load = from_wire(to_wire(_load_command(prepare(40), "/m", ""), node_pb2.LoadShard), LoadShard)
    assert options_of(load).settings == {**STAGE_SETTINGS.backend_options, "experts_in_ram": "40%"}
    assert options_of(_load_command(prepare(0), "/m", "")).settings == STAGE_SETTINGS.backend_options
    assert as_loaded(profile(), 40).packing == "emulated/40"


@pytest.mark.parametrize(("given", "kept"), [("none", ""), ("all", "100%"), ("0%", ""), ("40%", "40%")])
def test_the_flag_s_values(given: str, kept: str) -> None:
    assert serve_request("m", experts_in_ram=given).options.experts_in_ram == kept


@pytest.mark.parametrize("given", ["40", "101%", "some", ""])
def test_other_values_are_refused(given: str) -> None:
    with pytest.raises(ConfigInvalid, match="--experts-in-ram cannot be"):
        serve_request("m", experts_in_ram=given)


def test_two_pipelines_do_not_get_the_same_ram() -> None:
    held = memory(profile(ram="30GB", memory="200GB"))
    held.reserve(prepare(40), CONFIG, WEIGHTS)
    state = held.in_state(DeviceState(profile=profile()))
    assert [reservation.ram_bytes for reservation in state.reserved] == [IN_RAM]
    free = state.ram_free_bytes
    held.reserve(prepare(40), CONFIG, WEIGHTS)  # the same pipeline again: instead of the former
    held.reserve(prepare(40, "q"), CONFIG, WEIGHTS)
    with pytest.raises(NoFeasiblePlacement, match=r"lacks .* of RAM for experts"):
        held.reserve(prepare(40, "r"), CONFIG, WEIGHTS)
    assert held.in_state(state).ram_free_bytes == free - IN_RAM
    held.release("p")
    held.release("q")
    assert held.in_state(state).ram_free_bytes == free + IN_RAM


def test_the_device_s_memory_is_counted_without_those_experts() -> None:
    held = memory(profile(memory="26GB"))
    with pytest.raises(NoFeasiblePlacement, match="node a lacks"):
        held.reserve(prepare(0), CONFIG, WEIGHTS)
    held.reserve(prepare(40), CONFIG, WEIGHTS)


def test_a_node_that_reports_no_ram_refuses_a_share() -> None:
    with pytest.raises(NoFeasiblePlacement, match="keeps no experts in RAM"):
        memory(profile(ram="0GB", memory="200GB")).reserve(prepare(40), CONFIG, WEIGHTS)


def test_a_room_has_the_free_ram_and_that_of_the_pipeline_placed_again() -> None:
    held = memory(profile())
    held.reserve(prepare(40), CONFIG, WEIGHTS)
    state = held.in_state(DeviceState(profile=profile(), state="serving"))
    node = NodeState(node_id=NodeId("a"), name="a", devices=(state,))
    (others,), (own,) = rooms_of(node, DEFAULT_SETTINGS), rooms_of(node, DEFAULT_SETTINGS, own=frozenset("p"))
    assert others.ram_bytes == state.ram_free_bytes
    assert own.ram_bytes == others.ram_bytes + IN_RAM
