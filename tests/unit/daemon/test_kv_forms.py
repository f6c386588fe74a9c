"""``--kv 8bit`` and ``--kv 4bit``: from the flag to the stage's backend, and the memory that a node sets aside."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from edgepipe.backend.loader import create_backend
from edgepipe.backend.types import BackendOptions, DeviceProfile, StageSettings
from edgepipe.cli.serve import serve_request
from edgepipe.daemon.device.device_memory import DeviceMemory
from edgepipe.daemon.device.memory import DiskLedger
from edgepipe.errors import ConfigInvalid, NoFeasiblePlacement
from edgepipe.ids import EngineId, Epoch, NodeId, PipelineId
from edgepipe.planner.layer_profile import LayerProfile
from edgepipe.spec.config_json import config_to_json
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.stage.compute import ComputeThread
from edgepipe.system import SystemClock
from edgepipe.testing.tiny_model import tiny_config
from edgepipe.wire.children import PrepareRequest, ProfileLayerRequest
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.engines import StagePlacement
from edgepipe.wire.v1 import node_pb2
from edgepipe.workers import stage as stage_worker
from tests.support.daemon.stage_settings import STAGE_SETTINGS

CONFIG = tiny_config(num_kv_heads=2, head_dim=64)
PROFILE = LayerProfile(base_s=0.0, decode=(), prefill=(), head=(), kv_token_s=0.0, decode_context=64)
SLICES = make_slices([LayerRange(0, CONFIG.num_layers)], CONFIG.num_layers)


def prepare(kv: str) -> PrepareRequest:
    request = PrepareRequest(
        pipeline_id=PipelineId("p"),
        epoch=Epoch(1, EngineId("e")),
        placement=StagePlacement(node_id=NodeId("a"), slices=SLICES),
        settings=StageSettings(kv=kv),
        kv_tokens=1000,
    )
    return from_wire(to_wire(request, node_pb2.PrepareRequest), PrepareRequest)


def memory(*kv_forms: str) -> DeviceMemory:
    profile = DeviceProfile(
        backend="torch",
        device="cuda:0",
        name="GPU",
        compute_dtype="bfloat16",
        memory_total_bytes=10**10,
        memory_free_bytes=10**10,
        bandwidth_bytes_per_s=0.0,
        flops=0.0,
        kv_forms=kv_forms,
    )
    made = DeviceMemory(
        node_name="a", limit_bytes=0, kills=lambda: 0, disk=DiskLedger(free=lambda: 0, written=dict[str, int])
    )
    made.measured(profile)
    return made


def test_the_flag_becomes_a_setting_of_all_stages() -> None:
    for kv in ("8bit", "4bit"):
        assert serve_request("m", kv=kv).options.settings == StageSettings(kv=kv)
    assert serve_request("m").options.settings == StageSettings()


def test_another_form_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="--kv cannot be '2bit'"):
        serve_request("m", kv="2bit")


@pytest.mark.parametrize(("form", "vector", "slots"), [("8bit", 64 + 2, 1000), ("4bit", 32 + 2, 1280)])
def test_a_node_sets_aside_fewer_bytes_for_fewer_bits(form: str, vector: int, slots: int) -> None:
    """With 4 bits a chat of 1,000 tokens takes 48 slots more, in whole blocks."""
    reserved: list[int] = []
    for kv in ("", form):
        ledger = memory(form)
        ledger.reserve(prepare(kv), CONFIG)
        reserved.append(ledger.loaded("p", weight_bytes=0).num_bytes)
    wide, packed = reserved
    saved = 2 * CONFIG.num_layers * 2 * (1000 * 2 * 64 - slots * vector)
    assert 0 <= saved - (wide - packed) < 1000, "weights take the same; each token's bytes are rounded up"


def test_a_node_whose_backend_lacks_the_form_refuses_the_stage() -> None:
    with pytest.raises(NoFeasiblePlacement, match="cannot keep KV as 8bit"):
        memory().reserve(prepare("8bit"), CONFIG)


@pytest.mark.parametrize(("kv", "measured"), [("", True), ("8bit", True), ("4bit", True), ("2bit", False)])
async def test_a_layer_is_measured_with_that_kv(kv: str, measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown form gives a profile without times, and the process lives."""
    backends: list[Any] = []

    def probe(backend: Any, *_: object, **__: object) -> LayerProfile:
        backends.append(backend)
        return PROFILE

    monkeypatch.setattr(stage_worker, "probe_layer", probe)
    reports: list[LayerProfile] = []
    link: Any = SimpleNamespace(report=reports.append)
    compute = ComputeThread(clock=SystemClock())
    backend = create_backend("emulated", BackendOptions())
    wanted = ProfileLayerRequest(model_config=json.dumps(config_to_json(CONFIG)), settings=StageSettings(kv=kv))
    wanted = from_wire(to_wire(wanted, node_pb2.ProfileLayerRequest), ProfileLayerRequest)
    settings = replace(STAGE_SETTINGS, backend="emulated")
    await stage_worker._profile(compute, backend, link, settings, wanted, backend.profile(), SystemClock())
    await compute.close()
    assert reports == [PROFILE if measured else replace(PROFILE, decode_context=0)]
    expected = CONFIG.kv_bytes_per_token(form=kv or "bfloat16") if measured else 0
    assert sum(each.kv_block_bytes(CONFIG, SLICES, 1) for each in backends) == expected
