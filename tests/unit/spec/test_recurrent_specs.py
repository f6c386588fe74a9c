"""Layers without attention or without a feed-forward part: their weights, their JSON, their cost and memory."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from edgepipe.backend.cost import CostModel, StepWork
from edgepipe.backend.devices import named_device
from edgepipe.errors import ModelInvalid
from edgepipe.files.strict_json import parse_json_object
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.config import read_hf_config
from edgepipe.spec.config_json import config_from_json, config_to_json
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.spec.layer_json import layer_from_json, without_defaults
from edgepipe.spec.layer_spec import (
    Attention,
    DeltaNet,
    Dense,
    Experts,
    LayerSpec,
    Mamba2,
    Norm,
    Recurrent,
    Router,
    ShortConv,
)
from edgepipe.spec.layout import is_exact, is_norm, is_plain_norm, layer_parameters, norm_names, spec_tensors
from edgepipe.stage.made_up import spread
from edgepipe.weights.emulated_folder import EOS_TOKEN_ID, write_model_folder
from edgepipe.weights.mixes import mix_table, mix_weights
from edgepipe.weights.resident import resident_sizes, weight_bytes
from edgepipe.weights.weight_table import FLOATS

H = 32
DELTA = DeltaNet(key_heads=2, value_heads=6, key_dim=8, value_dim=16, taps=4)
MAMBA = Mamba2(heads=4, head_dim=16, groups=2, state_dim=8, taps=4)
CONV = ShortConv(channels=H, taps=3, bias=True)
ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=8, rope=None, gated=True, qk_norm="head")
DENSE = Dense(inner=40, activation="relu2", gated=False)
MIXED = Experts(
    count=4, used=2, inner=24, router=Router(correction=True), activation="relu2", gated=False, shared_inner=20
)
SPECS = {
    "delta": LayerSpec(recurrent=DELTA, dense=Dense(inner=48)),
    "mamba": LayerSpec(recurrent=MAMBA),
    "conv": LayerSpec(recurrent=CONV, experts=replace(MIXED, gated=True, activation="silu", shared_gated=True)),
    "attention": LayerSpec(attention=ATTENTION),
    "dense": LayerSpec(dense=DENSE),
    "experts": LayerSpec(experts=MIXED),
}


def config_of(*specs: LayerSpec) -> ModelConfig:
    return ModelConfig(
        architecture="nemotron_h",
        hidden_size=H,
        vocab_size=300,
        context_length=4096,
        layers=specs,
        norm=Norm(eps=1e-5),
    )


def test_weights_of_a_gated_delta_rule() -> None:
    shapes = spec_tensors(SPECS["delta"], H)
    inner, channels = 6 * 16, 2 * 2 * 8 + 6 * 16
    assert {name: shape for name, shape in shapes.items() if name.startswith("linear_attn.")} == {
        "linear_attn.in_proj_qkv.weight": (channels, H),
        "linear_attn.in_proj_z.weight": (inner, H),
        "linear_attn.in_proj_b.weight": (6, H),
        "linear_attn.in_proj_a.weight": (6, H),
        "linear_attn.conv1d.weight": (channels, 4),
        "linear_attn.dt_bias": (6,),
        "linear_attn.A_log": (6,),
        "linear_attn.norm.weight": (16,),
        "linear_attn.out_proj.weight": (H, inner),
    }
    assert next(iter(shapes)) == "input_layernorm.weight"
    assert "post_attention_layernorm.weight" in shapes


def test_a_layer_of_one_part_has_one_norm() -> None:
    assert norm_names(SPECS["mamba"]) == (("input_layernorm",), ())
    assert norm_names(SPECS["attention"]) == (("input_layernorm",), ())
    assert norm_names(SPECS["dense"]) == (("post_attention_layernorm",), ())
    mamba, dense = spec_tensors(SPECS["mamba"], H), spec_tensors(SPECS["dense"], H)
    assert {name: shape for name, shape in mamba.items() if "proj" not in name} == {
        "input_layernorm.weight": (H,),
        "mamba.conv1d.weight": (64 + 2 * 2 * 8, 4),
        "mamba.conv1d.bias": (64 + 2 * 2 * 8,),
        "mamba.dt_bias": (4,),
        "mamba.A_log": (4,),
        "mamba.D": (4,),
        "mamba.norm.weight": (64,),
    }
    assert mamba["mamba.in_proj.weight"] == (2 * 64 + 2 * 2 * 8 + 4, H)
    assert dense == {
        "post_attention_layernorm.weight": (H,),
        "mlp.up_proj.weight": (40, H),
        "mlp.down_proj.weight": (H, 40),
    }
    config = config_of(*SPECS.values())
    assert layer_parameters(config, 4) == H + 2 * 40 * H


def test_parts_without_a_gate_and_attention_with_one() -> None:
    experts, attention = spec_tensors(SPECS["experts"], H), spec_tensors(SPECS["attention"], H)
    assert [name for name in experts if "gate_proj" in name] == []
    assert experts["mlp.experts.up_proj.weight"] == (4 * 24, H)
    assert experts["mlp.shared_expert.down_proj.weight"] == (H, 20)
    assert attention["self_attn.q_proj.weight"] == (2 * 4 * 8, H)
    assert attention["self_attn.o_proj.weight"] == (H, 4 * 8)
    conv = spec_tensors(SPECS["conv"], H)
    assert (conv["conv.in_proj.weight"], conv["conv.in_proj.bias"]) == ((3 * H, H), (3 * H,))
    assert (conv["conv.conv.weight"], conv["conv.conv.bias"]) == ((H, 3), (H,))


def test_small_weights_stay_exact_and_inner_norms_plain() -> None:
    names = {name for spec in SPECS.values() for name in spec_tensors(spec, H)}
    exact = {name for name in names if is_exact(name) and not name.startswith("mlp.router")}
    assert exact == {
        *("linear_attn.conv1d.weight", "linear_attn.dt_bias", "linear_attn.A_log"),
        *("mamba.conv1d.weight", "mamba.conv1d.bias", "mamba.dt_bias", "mamba.A_log", "mamba.D"),
        *("conv.conv.weight", "conv.conv.bias"),
    }
    assert {name for name in names if is_plain_norm(name)} == {"linear_attn.norm.weight", "mamba.norm.weight"}
    assert all(is_norm(name) for name in names if is_plain_norm(name))
    for kind in ("torch-cpu", "torch-cuda", "mlx", "emulated", ""):
        assert weight_bytes("mamba.D", None, (4,), kind=kind, dtype="bfloat16") == 16


@pytest.mark.parametrize("name", SPECS)
def test_a_card_restores_every_kind_of_layer(name: str) -> None:
    assert layer_from_json(without_defaults(SPECS[name])) == SPECS[name]


@pytest.mark.parametrize(
    "mixer",
    [
        replace(DELTA, tiled=True),
        replace(MAMBA, dt_limits=(0.001, inf)),
        replace(MAMBA, dt_limits=(0.0, 0.5), bias=True, conv_bias=False),
        replace(CONV, bias=False),
    ],
)
def test_a_card_restores_every_field_of_a_mixer(mixer: Recurrent) -> None:
    config = config_of(LayerSpec(recurrent=mixer), SPECS["dense"])
    values = config_to_json(config)
    assert config_from_json(values) == config
    assert inf not in [limit for kind in values["kinds"] for limit in kind.get("recurrent", {}).get("dt_limits", ())]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("delta", {"recurrent": {"kind": "lstm"}}),
        ("delta", {"recurrent": {}}),
        ("delta", {"attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}}),
        ("mamba", {"recurrent": None}),
        ("mamba", {"norms": "both"}),
        ("dense", {"norms": "parallel"}),
        ("dense", {"dense": {"inner": 8, "activation": "relu2"}}),
        ("dense", {"dense": {"inner": 8, "activation": "silu", "gated": False}}),
    ],
)
def test_a_layer_that_cannot_be_is_refused(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(ModelInvalid):
        layer_from_json(without_defaults(SPECS[name]) | change)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("delta", {"value_heads": 5}),
        ("delta", {"taps": 1}),
        ("delta", {"key_dim": 1 << 20}),
        ("mamba", {"groups": 3}),
        ("mamba", {"dt_limits": [0.5]}),
        ("mamba", {"dt_limits": [0.5, 0.1]}),
        ("conv", {"channels": 0}),
    ],
)
def test_sizes_of_a_state_that_do_not_fit_are_refused(name: str, change: dict[str, Any]) -> None:
    values = without_defaults(SPECS[name])
    values["recurrent"] |= change
    with pytest.raises(ModelInvalid):
        layer_from_json(values)


def test_an_emulated_folder_holds_any_layers(tmp_path: Path) -> None:
    config = config_of(*SPECS.values())
    write_model_folder(tmp_path, config)
    read = read_hf_config(tmp_path)
    assert read == replace(config, eos_token_ids=(EOS_TOKEN_ID,), bos_token_id=read.bos_token_id)
    alone = replace(config, layers=(SPECS["mamba"],))
    write_model_folder(tmp_path / "alone", alone)
    assert read_hf_config(tmp_path / "alone").layers == alone.layers


def test_infinity_is_read_where_it_is_expected() -> None:
    text = b'{"time_step_limit": [0.0, Infinity]}'
    assert parse_json_object(text, what="config.json", infinite=True) == {"time_step_limit": [0.0, inf]}
    for data, infinite in ((text, False), (b'{"a": NaN}', True), (b'{"a": -Infinity}', True)):
        with pytest.raises(ModelInvalid, match="not a JSON number"):
            parse_json_object(data, what="config.json", infinite=infinite)


def test_a_row_reads_and_writes_its_state_and_a_prompt_multiplies_with_it() -> None:
    device = named_device("rtx4090")
    with_state = config_of(*(LayerSpec(recurrent=DELTA, dense=Dense(inner=48)) for _ in range(8)))
    tiny = replace(DELTA, key_dim=8, value_dim=16, taps=2)
    other = config_of(*(LayerSpec(recurrent=tiny, dense=Dense(inner=48)) for _ in range(8)))
    (part,) = make_slices([LayerRange(0, 8)], 8)
    cost, less = CostModel(with_state, device).slice_cost(part), CostModel(other, device).slice_cost(part)
    row_bytes = 2 * with_state.state_bytes()
    assert cost.state_row_s == pytest.approx(row_bytes / device.bandwidth_bytes_per_s)
    assert cost.state_row_s > less.state_row_s
    decode = StepWork.of_rows([5] * 4, [1] * 4, logit_rows=0)
    longer = decode.later(1000)
    assert cost.step_s(longer) == cost.step_s(decode)  # nothing is read per token of the context
    without = replace(cost, state_row_s=0.0, state_token_s=0.0)
    assert cost.step_s(decode) - without.step_s(decode) == pytest.approx(4 * cost.state_row_s)
    assert (CostModel(with_state, device).kv_bytes_per_token([part]), cost.attention[0].kv_token_s) == (0, 0.0)


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "nemotron-3-nano", "granite-4.0-h-tiny"])
def test_a_named_model_has_a_cost_a_size_and_made_up_layers(name: str) -> None:
    config = named_shape(name)
    table = mix_table(config, "q4_k_m")
    cost = CostModel(config, named_device("rtx4090"), weights=table, kind="torch-cuda")
    assert len(cost.kind_costs()) == max(cost.kinds) + 1
    assert all(each.attention for each in cost.kind_costs())
    assert len(resident_sizes(config, table, kind="torch-cuda", dtype="bfloat16").layers) == config.num_layers
    specs, _ = spread(config, table, 13)
    assert {spec.recurrent is None for spec in specs} == {True, False}
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    schemes = {info.name: info.scheme for info in mix_weights(config, "q4_k_m", whole)}
    assert {scheme for weight, scheme in schemes.items() if is_exact(weight)} == {"F32"}
    floats = resident_sizes(config, FLOATS, kind="torch-cuda", dtype="bfloat16").matrices
    assert floats > 2.5 * resident_sizes(config, table, kind="torch-cuda", dtype="bfloat16").matrices
