"""``--kv 8bit``: from the flag to the stage's backend, and the memory that a node sets aside for it."""

from __future__ import annotations

import pytest

from edgepipe.backend.types import DeviceProfile
from edgepipe.cli.serve import serve_request
from edgepipe.daemon.device.device import _load_command
from edgepipe.daemon.device.device_memory import DeviceMemory
from edgepipe.errors import ConfigInvalid, NoFeasiblePlacement
from edgepipe.ids import EngineId, Epoch, PipelineId
from edgepipe.model.facts import LayerRange, make_slices
from edgepipe.testing.tiny_model import tiny_config
from edgepipe.wire.children import LoadShard, PrepareRequest
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.v1 import node_pb2
from edgepipe.workers.stage import _options
from tests.support.stage_settings import STAGE_SETTINGS

CONFIG = tiny_config(num_kv_heads=2, head_dim=64)
SLICES = make_slices([LayerRange(0, CONFIG.num_layers)], CONFIG.num_layers)


def prepare(kv: str) -> PrepareRequest:
    request = PrepareRequest(
        pipeline_id=PipelineId("p"), epoch=Epoch(1, EngineId("e")), slices=SLICES, kv_tokens=1000, kv=kv
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
    made = DeviceMemory(node_name="a", limit_bytes=0, kills=lambda: 0)
    made.measured(profile)
    return made


def test_the_flag_reaches_the_backend_s_settings() -> None:
    spec = serve_request("m", kv="8bit").options
    assert from_wire(to_wire(spec, node_pb2.ServeSpec), ServeSpec).kv == "8bit"
    command = _load_command(prepare("8bit"), "/m")
    load = from_wire(to_wire(command, node_pb2.LoadShard), LoadShard)
    assert _options(STAGE_SETTINGS, load).settings == {**STAGE_SETTINGS.backend_options, "kv": "8bit"}


def test_without_the_flag_nothing_changes() -> None:
    assert serve_request("m").options.kv == ""
    assert _options(STAGE_SETTINGS, _load_command(prepare(""), "/m")).settings == STAGE_SETTINGS.backend_options


def test_another_form_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="--kv cannot be '4bit'"):
        serve_request("m", kv="4bit")


def test_a_node_sets_aside_fewer_bytes_for_8_bits() -> None:
    reserved: list[int] = []
    for kv in ("", "8bit"):
        ledger = memory("8bit")
        ledger.reserve(prepare(kv), CONFIG)
        reserved.append(ledger.loaded("p", weight_bytes=0).num_bytes)
    wide, packed = reserved
    assert wide - packed == 1000 * 2 * CONFIG.num_layers * 2 * (2 * 64 - 66)  # weights take the same


def test_a_node_whose_backend_lacks_the_form_refuses_the_stage() -> None:
    with pytest.raises(NoFeasiblePlacement, match="cannot keep KV as 8bit"):
        memory().reserve(prepare("8bit"), CONFIG)
