"""Surveys of nodes that say how they keep packed weights, and of nodes of earlier versions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from edgepipe.backend.types import DeviceProfile, StageSettings
from edgepipe.errors import ConfigInvalid, ModelInvalid
from edgepipe.ids import NodeId
from edgepipe.spec.config_json import config_to_json
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.layout import slice_parameters
from edgepipe.weights.mixes import named_model
from edgepipe.weights.weight_table import FLOATS
from edgepipe.wire.codec import from_wire, to_wire
from edgepipe.wire.serving import SurveyedMachine, SurveyReply
from edgepipe.wire.surveys import cluster_of
from edgepipe.wire.v1 import node_pb2
from tests.support.models.specs import first_attention

CONFIG, WEIGHTS = named_model("qwen3-8b:q4_k_m")
WHOLE = Slice(index=0, layers=LayerRange(0, 36), embedding=True, head=True)


def machine(name: str, packing: str) -> SurveyedMachine:
    profile = DeviceProfile(
        backend="torch",
        device="cuda:0",
        name="GPU",
        compute_dtype="bfloat16",
        memory_total_bytes=24 * 10**9,
        memory_free_bytes=24 * 10**9,
        bandwidth_bytes_per_s=1e12,
        flops=1e14,
        packing=packing,
    )
    return SurveyedMachine(node_id=NodeId(name), name=name, device=profile, free_bytes=20 * 10**9, value_bytes=2)


def survey(model_weights: str, *packings: str) -> SurveyReply:
    reply = SurveyReply(
        model="m",
        model_config=json.dumps(config_to_json(CONFIG)),
        model_weights=model_weights,
        machines=tuple(machine(f"node-{index}", packing) for index, packing in enumerate(packings)),
    )
    return from_wire(to_wire(reply, node_pb2.SurveyReply), SurveyReply)


def test_each_node_is_planned_by_the_way_it_keeps_weights() -> None:
    cluster = cluster_of(survey(WEIGHTS.to_json(), "torch-cuda", "", "of a later version"))
    assert cluster.weights == WEIGHTS
    packs, old, later = (machine.room.sizes(CONFIG, WEIGHTS).of_slice(WHOLE) for machine in cluster.machines)
    assert old == later == 2 * slice_parameters(CONFIG, WHOLE)
    assert packs == pytest.approx(5.1e9, rel=0.02)


def test_8_bit_kv_takes_a_byte_a_value_and_two_a_head() -> None:
    (plain,), (packed,) = (
        cluster_of(replace(survey("", "torch-cuda"), settings=StageSettings(kv=kv))).machines for kv in ("", "8bit")
    )
    values = 2 * 36 * first_attention(CONFIG).num_kv_heads
    assert plain.room.kv_bytes(CONFIG, WHOLE.layers, 1) == values * first_attention(CONFIG).head_dim * 2
    assert packed.room.kv_bytes(CONFIG, WHOLE.layers, 1) == values * (first_attention(CONFIG).head_dim + 2)
    with pytest.raises(ConfigInvalid, match="cannot be kept as '3bit'"):
        CONFIG.kv_bytes_per_token(form="3bit")


def test_a_survey_of_an_earlier_version_describes_floats() -> None:
    message = to_wire(survey(""), node_pb2.SurveyReply)
    assert node_pb2.SurveyReply.FromString(message.SerializeToString()).model_weights == ""
    cluster = cluster_of(survey("", "torch-cuda"))
    assert cluster.weights == FLOATS
    assert cluster.machines[0].room.sizes(CONFIG, FLOATS).of_slice(WHOLE) == 2 * slice_parameters(CONFIG, WHOLE)


def test_weights_that_are_not_the_model_s_are_refused() -> None:
    with pytest.raises(ModelInvalid):
        cluster_of(survey(named_model("llama-3.3-70b:q4_k_m")[1].to_json(), "torch-cuda"))
