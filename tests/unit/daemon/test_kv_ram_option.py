"""``--kv-ram`` and ``--kv-disk``: from the flags to what a node sets aside for idle KV."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edgepipe_emulated import EmulatedBackend

from edgepipe.backend.types import BackendOptions, DeviceProfile, StageSettings
from edgepipe.cli.serve import serve_request
from edgepipe.daemon.device.device_memory import DeviceMemory
from edgepipe.daemon.device.memory import DiskLedger
from edgepipe.errors import ConfigInvalid, NoFeasiblePlacement, PlanInvalid
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.weights.mixes import named_model
from edgepipe.wire.children import PrepareRequest
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.engines import StagePlacement
from edgepipe.wire.v1 import node_pb2

CONFIG, WEIGHTS = named_model("qwen3-8b:q4_k_m")
SLICES = make_slices([LayerRange(0, CONFIG.num_layers)], CONFIG.num_layers)
GPU = EmulatedBackend(BackendOptions(device="rtx4090")).profile()
CPU = replace(GPU, device="cpu", ram_total_bytes=0, ram_free_bytes=0)
GB = 10**9


def prepare(kv_ram: str, pipeline: str = "p", kv_disk: str = "") -> PrepareRequest:
    request = PrepareRequest(
        pipeline_id=PipelineId(pipeline),
        epoch=Epoch(1, EngineId("e")),
        placement=StagePlacement(node_id=NodeId("a"), slices=SLICES),
        settings=StageSettings(kv_ram=kv_ram, kv_disk=kv_disk),
        kv_tokens=512,
    )
    return from_wire(to_wire(request, node_pb2.PrepareRequest), PrepareRequest)


def memory(profile: DeviceProfile) -> DeviceMemory:
    made = DeviceMemory(
        node_name="a", limit_bytes=0, kills=lambda: 0, disk=DiskLedger(free=lambda: 50 * GB, written=dict[str, int])
    )
    made.measured(profile)
    return made


@pytest.mark.parametrize(("given", "kept"), [("off", ""), ("auto", "auto"), ("8GB", str(8 * GB)), ("0", "")])
def test_the_flag_s_values(given: str, kept: str) -> None:
    assert serve_request("m", kv_ram=given).options.settings.kv_ram == kept


def test_a_flag_that_is_no_size_says_what_to_give() -> None:
    with pytest.raises(ConfigInvalid, match="--kv-ram cannot be 'much'"):
        serve_request("m", kv_ram="much")


def test_auto_takes_a_third_of_what_is_free_and_engines_share_it() -> None:
    held = memory(GPU)
    held.reserve(prepare("auto"), CONFIG, WEIGHTS)
    first = held.tier_bytes("p")
    assert GPU.ram_free_bytes // 4 < first <= GPU.ram_free_bytes // 3
    held.reserve(prepare("auto", "q"), CONFIG, WEIGHTS)
    assert held.tier_bytes("q") == pytest.approx(2 / 3 * first, abs=1)
    held.reserve(prepare("auto"), CONFIG, WEIGHTS)
    assert held.tier_bytes("p") < first, "what another engine holds is not free"
    held.release("p")
    assert held.tier_bytes("p") == 0


def test_a_size_is_taken_whole_or_refused_with_what_is_free() -> None:
    held = memory(GPU)
    held.reserve(prepare(str(2 * GB)), CONFIG, WEIGHTS)
    assert held.tier_bytes("p") == 2 * GB
    with pytest.raises(NoFeasiblePlacement, match="lacks host memory") as refused:
        held.reserve(prepare(str(900 * GB), "q"), CONFIG, WEIGHTS)
    assert "--kv-ram" in refused.value.next_step
    assert held.tier_bytes("q") == 0
    with pytest.raises(PlanInvalid):
        held.reserve(prepare("lots"), CONFIG, WEIGHTS)


def test_where_the_device_s_memory_is_the_host_s_only_a_size_takes_some() -> None:
    held = memory(CPU)
    held.reserve(prepare("auto"), CONFIG, WEIGHTS)
    assert held.tier_bytes("p") == 0
    held.reserve(prepare(str(GB)), CONFIG, WEIGHTS)
    assert held.tier_bytes("p") == GB
    with pytest.raises(NoFeasiblePlacement):
        held.reserve(prepare(str(100 * GB)), CONFIG, WEIGHTS)


def test_a_stage_that_is_replaced_keeps_its_host_memory_until_then() -> None:
    held = memory(GPU)
    held.reserve(prepare(str(2 * GB)), CONFIG, WEIGHTS)
    assert held.reserve_beside(prepare(str(3 * GB)), CONFIG, WEIGHTS)
    assert held.tier_bytes("p") == 3 * GB
    assert held.tier_bytes("p before") == 2 * GB
    held.keep_before("p")
    assert held.tier_bytes("p") == 2 * GB
    assert held.reserve_beside(prepare(str(3 * GB)), CONFIG, WEIGHTS)
    held.release_before("p")
    assert (held.tier_bytes("p"), held.tier_bytes("p before")) == (3 * GB, 0)


@pytest.mark.parametrize(("given", "kept"), [("off", ""), ("100GB", str(100 * GB)), ("0", "")])
def test_the_values_of_the_disk_s_flag(given: str, kept: str) -> None:
    assert serve_request("m", kv_ram="auto", kv_disk=given).options.settings.kv_disk == kept


@pytest.mark.parametrize(
    ("ram", "disk", "said", "to_type"),
    [
        ("auto", "much", "--kv-disk cannot be 'much'", "100GB, or off"),
        ("auto", "auto", "--kv-disk cannot be 'auto'", "100GB, or off"),
        ("off", "100GB", "--kv-disk needs RAM above it", "add --kv-ram auto"),
    ],
)
def test_a_disk_s_flag_that_cannot_be_says_what_to_give(ram: str, disk: str, said: str, to_type: str) -> None:
    with pytest.raises(ConfigInvalid, match=said) as refused:
        serve_request("m", kv_ram=ram, kv_disk=disk)
    assert to_type in refused.value.next_step


def test_a_disk_is_taken_whole_or_refused_with_what_is_free() -> None:
    held = memory(GPU)
    held.reserve(prepare("auto", kv_disk=str(40 * GB)), CONFIG, WEIGHTS)
    with pytest.raises(NoFeasiblePlacement, match="lacks disk") as refused:
        held.reserve(prepare("auto", kv_disk=str(60 * GB)), CONFIG, WEIGHTS)
    assert refused.value.next_step == "give --kv-disk 50000MB or less"
    with pytest.raises(PlanInvalid):
        held.reserve(prepare("auto", kv_disk="lots"), CONFIG, WEIGHTS)


def test_engines_share_the_disk_s_free_space() -> None:
    """Of 50 GB, 40 are promised; 10 of them have been written, so that 40 are free and 10 are left for others."""
    free, written = [50 * GB], dict[str, int]()
    held = DeviceMemory(
        node_name="a", limit_bytes=0, kills=lambda: 0, disk=DiskLedger(free=lambda: free[0], written=lambda: written)
    )
    held.measured(GPU)
    held.reserve(prepare("1000000000", kv_disk=str(40 * GB)), CONFIG, WEIGHTS)
    free[0], written["p"] = 40 * GB, 10 * GB
    with pytest.raises(NoFeasiblePlacement, match="lacks disk") as refused:
        held.reserve(prepare("1000000000", "q", kv_disk=str(11 * GB)), CONFIG, WEIGHTS)
    assert refused.value.fact.endswith("10.0 GB are free beside the 30.0 GB that other models may still fill")
    assert refused.value.next_step == "give --kv-disk 10000MB or less"
    held.reserve(prepare("1000000000", "q", kv_disk=str(10 * GB)), CONFIG, WEIGHTS)
    with pytest.raises(NoFeasiblePlacement, match="lacks disk"):
        held.reserve(prepare("1000000000", "r", kv_disk=str(GB)), CONFIG, WEIGHTS)
    assert held.reserve_beside(prepare("1000000000", "q", kv_disk=""), CONFIG, WEIGHTS)
    held.release_before("q")
    held.reserve(prepare("1000000000", "r", kv_disk=str(10 * GB)), CONFIG, WEIGHTS)
    held.release("r")
    held.reserve(prepare("1000000000", kv_disk=str(50 * GB)), CONFIG, WEIGHTS)
    with pytest.raises(NoFeasiblePlacement, match="lacks disk"):
        held.reserve(prepare("1000000000", kv_disk=str(51 * GB)), CONFIG, WEIGHTS)


def test_a_disk_without_ram_above_it_is_refused() -> None:
    with pytest.raises(NoFeasiblePlacement, match="has no RAM") as refused:
        memory(CPU).reserve(prepare("auto", kv_disk=str(GB)), CONFIG, WEIGHTS)
    assert "--kv-ram" in refused.value.next_step


@pytest.mark.parametrize("form", ["", "4bit"])
def test_a_promised_context_takes_more_than_the_usual_share_of_what_is_free(form: str) -> None:
    """Of what an RTX 4090 has beside the weights, KV takes nine tenths at most: a context of all of it would be cut."""
    config, weights = named_model("qwen3.6-35b-a3b:q4_k_m")
    whole = make_slices([LayerRange(0, config.num_layers)], config.num_layers)
    tokens = 262_144 if form else 70_000
    request = replace(
        prepare("1"),
        placement=StagePlacement(node_id=NodeId("a"), slices=whole),
        settings=StageSettings(kv=form, block_size=32, most_slots=4, context_length=tokens),
        kv_tokens=tokens,
    )
    assert not memory(GPU).reserve(request, config, weights)
    assert memory(GPU).reserve(replace(request, promised_tokens=tokens), config, weights)
    more = replace(request, kv_tokens=2 * tokens, promised_tokens=tokens)
    assert not memory(GPU).reserve(more, config, weights), "what is not promised gets no more"
