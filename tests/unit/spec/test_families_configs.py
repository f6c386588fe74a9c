"""Published config.json of the named models: what is read of each, and what one changed field does."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from itertools import takewhile
from math import inf, log, nan, prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.errors import ArchitectureUnsupported, ModelInvalid
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.config import gguf_config, hf_config
from edgepipe.spec.config_json import config_from_json, config_to_json
from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.families import FAMILIES
from edgepipe.spec.layer_spec import DeltaNet, Mamba2, ShortConv, Temperature
from edgepipe.spec.layout import model_tensors, stored_shapes
from edgepipe.spec.naming import NAMINGS, settled_naming
from tests.support.models.specs import attention_of

FOLDER = Path(__file__).parents[2] / "data" / "configs"
SOURCES: dict[str, dict[str, str]] = json.loads((FOLDER / "sources.json").read_text())
CONFIGS: dict[str, dict[str, Any]] = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in SOURCES}
DELETED = object()
CHANGES = (DELETED, None, "text", "", 0, -1, 3, 7, 1 << 70, 0.5, True, inf, nan, [], {}, [1], [[1]], [{}], {"a": 1})
# A changed number may be right by itself and contradict another one, which the error then names.
CONTRADICTED = {
    "num_attention_heads": ("head_dim", "num_key_value_heads", "short_factor"),
    "partial_rotary_factor": ("short_factor",),
    "quant_method": ("quantised as",),
    "fmt": ("FP8",),
    "type": ("rotary embedding",),
    "hidden_size": ("head_dim", "mamba_n_heads"),
    "num_hidden_layers": ("layer_types", "hybrid_override_pattern", "full_attn_idxs"),
    "linear_num_key_heads": ("linear_num_value_heads",),
    "mamba_num_heads": ("n_groups",),
    "mamba_d_head": ("mamba_n_heads",),
    "mamba_expand": ("mamba_n_heads",),
    "use_bias": ("mamba_proj_bias",),
    "attention_head_dim": ("head_dim",),
    "vocab_size": ("token_id",),
    "rope_type": ("rotary embedding",),
    "n_group": ("experts",),
    "topk_group": ("experts",),
    "text_config": ("hidden_size_per_layer_input",),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), ("experts",)),
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a model's publishers say of it. Billions of weights are those of the text model, without MTP."""

    layers: int
    kv_heads: int
    weights_b: float
    windowed: int = 0  # layers
    window: int = 0
    experts: int = 0
    used: int = 0
    dense: int = 0  # layers without experts, of a model with experts
    rotates: int = 128  # dimensions of a head
    head: int = 128
    tied: bool = False
    context: int = 131_072
    recurrent: int = 0  # layers
    state_mb: float = 0.0  # of a sequence, in float32
    without_mixer: int = 0  # layers


FACTS = {
    "qwen3-30b-a3b": Facts(layers=48, kv_heads=4, experts=128, used=8, weights_b=30.53, context=40_960),
    "qwen3-coder-30b-a3b": Facts(layers=48, kv_heads=4, experts=128, used=8, weights_b=30.53, context=262_144),
    "qwen3-235b-a22b": Facts(layers=94, kv_heads=4, experts=128, used=8, weights_b=235.1, context=262_144),
    "mixtral-8x7b": Facts(layers=32, kv_heads=8, experts=8, used=2, weights_b=46.7, context=32_768),
    "gpt-oss-20b": Facts(
        layers=24, kv_heads=8, windowed=12, window=128, experts=32, used=4, rotates=64, head=64, weights_b=20.9
    ),
    "gpt-oss-120b": Facts(
        layers=36, kv_heads=8, windowed=18, window=128, experts=128, used=4, rotates=64, head=64, weights_b=116.8
    ),
    "glm-4.5-air": Facts(layers=46, kv_heads=8, experts=128, used=8, dense=1, rotates=64, weights_b=106.85),
    "glm-4.5": Facts(layers=92, kv_heads=8, experts=160, used=8, dense=3, rotates=64, weights_b=352.8),
    "glm-4.7-flash": Facts(
        layers=47, kv_heads=1, experts=64, used=4, dense=1, rotates=64, head=576, weights_b=29.94, context=202_752
    ),
    "deepseek-v2-lite": Facts(
        layers=27, kv_heads=1, experts=64, used=6, dense=1, rotates=64, head=576, weights_b=15.71, context=163_840
    ),
    "deepseek-v3": Facts(
        layers=61, kv_heads=1, experts=256, used=8, dense=3, rotates=64, head=576, weights_b=671.0, context=163_840
    ),
    "minimax-m2.5": Facts(layers=62, kv_heads=8, experts=256, used=8, rotates=64, weights_b=228.7, context=196_608),
    "gemma-3-1b-it": Facts(
        layers=26, kv_heads=1, windowed=22, window=512, rotates=256, head=256, tied=True, weights_b=1.0, context=32_768
    ),
    "gemma-3-4b-it": Facts(
        layers=34, kv_heads=4, windowed=29, window=1024, rotates=256, head=256, tied=True, weights_b=3.88
    ),
    "gemma-3-12b-it": Facts(
        layers=48, kv_heads=8, windowed=40, window=1024, rotates=256, head=256, tied=True, weights_b=11.77
    ),
    "gemma-3-27b-it": Facts(layers=62, kv_heads=16, windowed=52, window=1024, tied=True, weights_b=27.01),
    "gemma-4-31b-it": Facts(
        layers=60,
        kv_heads=16,
        windowed=50,
        window=1024,
        rotates=512,
        head=512,
        tied=True,
        weights_b=30.7,
        context=262_144,
    ),
    "gemma-4-26b-a4b-it": Facts(
        layers=30,
        kv_heads=8,
        windowed=25,
        window=1024,
        experts=128,
        used=8,
        rotates=512,
        head=512,
        tied=True,
        weights_b=25.2,
        context=262_144,
    ),
    "mistral-small-3.2-24b": Facts(layers=40, kv_heads=8, weights_b=23.57),
    "ministral-3-8b": Facts(layers=34, kv_heads=8, weights_b=8.49, context=262_144),
    "phi-3-mini-4k": Facts(
        layers=32, kv_heads=32, windowed=32, window=2047, rotates=96, head=96, weights_b=3.82, context=4096
    ),
    "phi-4": Facts(layers=40, kv_heads=10, weights_b=14.66, context=16_384),
    "phi-4-mini": Facts(layers=32, kv_heads=8, rotates=96, tied=True, weights_b=3.84),
    "granite-3.3-8b": Facts(layers=40, kv_heads=8, tied=True, weights_b=8.17),
    "olmo-2-7b": Facts(layers=32, kv_heads=32, weights_b=7.3, context=4096),
    "olmo-3-7b": Facts(layers=32, kv_heads=32, windowed=24, window=4096, weights_b=7.3, context=65_536),
    "olmo-3.1-32b": Facts(layers=64, kv_heads=8, windowed=48, window=4096, weights_b=32.2, context=65_536),
    "command-r7b": Facts(layers=32, kv_heads=8, windowed=24, window=4096, tied=True, weights_b=8.03, context=8192),
    "llama-3.1-8b": Facts(layers=32, kv_heads=8, weights_b=8.03),
    "qwen2.5-7b": Facts(layers=28, kv_heads=4, weights_b=7.62, context=32_768),
    "qwen3-8b": Facts(layers=36, kv_heads=8, weights_b=8.19, context=40_960),
    "mistral-7b-v0.3": Facts(layers=32, kv_heads=8, weights_b=7.25, context=32_768),
    "qwen3.6-35b-a3b": Facts(
        layers=40,
        kv_heads=2,
        experts=256,
        used=8,
        rotates=64,
        head=256,
        recurrent=30,
        state_mb=65.86,  # 30 times 32 heads of 128 x 128, and 3 inputs of 8,192 channels
        weights_b=34.66,
        context=262_144,
    ),
    "qwen3.6-27b": Facts(
        layers=64, kv_heads=4, rotates=64, head=256, recurrent=48, state_mb=156.89, weights_b=26.9, context=262_144
    ),
    "qwen3.5-0.8b": Facts(
        layers=24,
        kv_heads=2,
        rotates=64,
        head=256,
        recurrent=18,
        state_mb=20.2,
        weights_b=0.75,
        tied=True,
        context=262_144,
    ),
    "qwen3-coder-next": Facts(
        layers=48,
        kv_heads=2,
        experts=512,
        used=10,
        rotates=64,
        head=256,
        recurrent=36,
        state_mb=79.04,
        weights_b=79.67,
        context=262_144,
    ),
    "nemotron-3-nano": Facts(
        layers=52,
        kv_heads=2,
        experts=128,
        used=6,
        dense=29,
        rotates=0,
        recurrent=23,
        state_mb=49.93,
        without_mixer=23,
        weights_b=31.58,
        context=262_144,
    ),
    "nemotron-3-super": Facts(
        layers=88,
        kv_heads=2,
        experts=512,
        used=22,
        dense=48,
        rotates=0,
        recurrent=40,
        state_mb=172.69,
        without_mixer=40,
        weights_b=120.6,
        context=262_144,
    ),
    "nemotron-h-8b": Facts(
        layers=52, kv_heads=8, rotates=0, recurrent=24, state_mb=103.61, without_mixer=24, weights_b=8.1, context=8192
    ),
    "granite-4.0-h-350m": Facts(
        layers=32,
        kv_heads=4,
        rotates=0,
        head=64,
        recurrent=28,
        state_mb=22.62,
        weights_b=0.34,
        tied=True,
        context=32_768,
    ),
    "granite-4.0-h-tiny": Facts(
        layers=40,
        kv_heads=4,
        experts=64,
        used=6,
        rotates=0,
        head=128,
        recurrent=36,
        state_mb=58.06,
        weights_b=6.94,
        tied=True,
    ),
    "lfm2-1.2b": Facts(
        layers=16,
        kv_heads=8,
        rotates=64,
        head=64,
        recurrent=10,
        state_mb=0.16,
        weights_b=1.17,
        tied=True,
        context=128_000,
    ),
    "lfm2-8b-a1b": Facts(
        layers=24,
        kv_heads=8,
        experts=32,
        used=4,
        dense=2,
        rotates=64,
        head=64,
        recurrent=18,
        state_mb=0.29,
        weights_b=8.34,
        tied=True,
        context=128_000,
    ),
}


def facts_of(config: ModelConfig) -> Facts:
    """What edgepipe reads."""
    attention = [layer.attention for layer in config.layers if layer.attention]
    mixtures = [layer.experts for layer in config.layers if layer.experts]
    (experts,) = {(part.count, part.used) for part in mixtures} or {(0, 0)}
    return Facts(
        layers=config.num_layers,
        kv_heads=max(part.num_kv_heads for part in attention),
        weights_b=sum(map(prod, model_tensors(config).values())) / 1e9,
        windowed=sum(part.window is not None for part in attention),
        window=max(part.window or 0 for part in attention),
        experts=experts[0],
        used=experts[1],
        dense=config.num_layers - len(mixtures) if mixtures else 0,
        rotates=max(part.rotated for part in attention),
        head=max(part.head_dim for part in attention),
        tied=config.tied_embeddings,
        context=config.context_length,
        recurrent=sum(layer.recurrent is not None for layer in config.layers),
        state_mb=round(config.state_bytes() / 1e6, 2),
        without_mixer=sum(not layer.mixes for layer in config.layers),
    )


@pytest.mark.parametrize("name", FACTS)
def test_a_published_config_is_read(name: str) -> None:
    found, expected = facts_of(hf_config(CONFIGS[name])), FACTS[name]
    assert found.weights_b == pytest.approx(expected.weights_b, rel=0.01)
    assert found == replace(expected, weights_b=found.weights_b)


def test_every_config_says_where_it_is_from() -> None:
    assert set(FACTS) == set(SOURCES) == {path.stem for path in FOLDER.glob("*.json")} - {"sources"}
    assert all(source["origin"] in ("copied", "built") and "/" in source["model"] for source in SOURCES.values())


def test_recurrent_layers_are_as_published() -> None:
    qwen = hf_config(CONFIGS["qwen3.6-35b-a3b"])
    assert [layer.recurrent is None for layer in qwen.layers[:8]] == [False, False, False, True] * 2
    assert qwen.layers[0].recurrent == DeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4)
    attention, experts = qwen.layers[3].attention, qwen.layers[3].experts
    assert attention is not None
    assert experts is not None
    assert (attention.gated, attention.qk_norm, qwen.norm.plus_one) == (True, "head", True)
    assert (experts.shared_inner, experts.shared_gated, experts.router.normalised) == (512, True, True)
    nano = hf_config(CONFIGS["nemotron-3-nano"])
    state = Mamba2(heads=64, head_dim=64, groups=8, state_dim=128, taps=4, dt_limits=(0.001, inf))
    assert [layer.recurrent for layer in nano.layers[:3]] == [state, None, state]
    mixture = nano.layers[1].experts
    assert mixture is not None
    assert (mixture.gated, mixture.activation, mixture.shared_inner) == (False, "relu2", 3712)
    assert (mixture.router.score, mixture.router.correction, mixture.router.scale) == ("sigmoid", True, 2.5)
    narrow = hf_config(CONFIGS["nemotron-3-super"]).layers[1].experts
    assert narrow is not None
    assert (narrow.latent, mixture.latent, narrow.router.scale) == (1024, 0, 5.0)
    dense = hf_config(CONFIGS["nemotron-h-8b"]).layers[1]
    assert dense.dense is not None
    assert (dense.mixes, dense.dense.gated, dense.dense.activation) == (False, False, "relu2")
    granite = hf_config(CONFIGS["granite-4.0-h-tiny"])
    assert granite.layers[0].recurrent == Mamba2(heads=48, head_dim=64, groups=1, state_dim=128, taps=4)
    assert {layer.residual_scale for layer in granite.layers} == {0.22}
    lfm = hf_config(CONFIGS["lfm2-1.2b"])
    assert lfm.layers[0].recurrent == ShortConv(channels=2048, taps=3)
    assert lfm.layers[0].dense is not None
    assert lfm.layers[0].dense.inner == 8192


@pytest.mark.parametrize(
    ("name", "key", "value", "word"),
    [
        ("qwen3-coder-next", "attn_output_gate", False, "attn_output_gate"),
        ("qwen3-coder-next", "linear_num_value_heads", 24, "linear_num_value_heads"),
        ("qwen3-coder-next", "layer_types", ["full_attention"] * 47 + ["conv"], "layer_types"),
        ("qwen3-coder-next", "layer_types", ["full_attention"], "layer_types"),
        ("nemotron-3-super", "moe_latent_size", 0, "moe_latent_size"),
        ("nemotron-3-nano", "mlp_hidden_act", "silu", "mlp_hidden_act"),
        ("nemotron-3-nano", "mamba_hidden_act", "relu2", "mamba_hidden_act"),
        ("nemotron-3-nano", "sliding_window", 4096, "sliding_window"),
        ("nemotron-3-nano", "attention_bias", True, "attention_bias"),
        ("nemotron-3-nano", "mamba_proj_bias", True, "mamba_proj_bias"),
        ("nemotron-3-nano", "mlp_bias", True, "mlp_bias"),
        ("nemotron-3-nano", "hybrid_override_pattern", "M" * 51 + "X", "hybrid_override_pattern"),
        ("nemotron-3-nano", "n_groups", 3, "n_groups"),
        ("granite-4.0-h-tiny", "position_embedding_type", "alibi", "position_embedding_type"),
        ("granite-4.0-h-tiny", "mamba_n_heads", 40, "mamba_n_heads"),
        ("granite-4.0-h-tiny", "time_step_limit", [0.0], "time_step_limit"),
        ("lfm2-1.2b", "full_attn_idxs", [16], "full_attn_idxs"),
    ],
)
def test_a_state_that_is_not_computed_is_refused_by_name(name: str, key: str, value: object, word: str) -> None:
    with pytest.raises((ArchitectureUnsupported, ModelInvalid), match=word):
        hf_config(CONFIGS[name] | {key: value})


@pytest.mark.parametrize(
    "name",
    ["qwen3.6-35b-a3b", "qwen3.6-27b", "qwen3-coder-next", "nemotron-3-nano", "nemotron-3-super", "granite-4.0-h-tiny"],
)
def test_a_named_shape_is_that_of_the_published_config(name: str) -> None:
    shape, published = named_shape(name), hf_config(CONFIGS[name])
    assert [prod(size) for size in model_tensors(shape).values()] == [
        prod(size) for size in model_tensors(published).values()
    ]
    assert [layer.recurrent for layer in shape.layers] == [layer.recurrent for layer in published.layers]
    assert (shape.context_length, shape.state_bytes()) == (published.context_length, published.state_bytes())


def test_time_steps_and_layers_are_read_as_newer_files_write_them() -> None:
    granite, nano = CONFIGS["granite-4.0-h-tiny"], CONFIGS["nemotron-3-nano"]
    for limits, limit in (([0.0, inf], inf), ([0.0, {"__float__": "Infinity"}], inf), ([0.0, 0.5], 0.5)):
        found = hf_config(granite | {"time_step_limit": limits}).layers[0].recurrent
        assert isinstance(found, Mamba2)
        assert found.dt_limits == (0.0, limit)
    names = {"M": "mamba", "E": "moe", "*": "attention"}
    kinds = [names[letter] for letter in nano["hybrid_override_pattern"]]
    listed = {key: value for key, value in nano.items() if key not in ("hybrid_override_pattern", "num_hidden_layers")}
    assert hf_config(listed | {"layers_block_type": kinds}) == hf_config(nano)


def test_layers_differ_as_published() -> None:
    gemma = hf_config(CONFIGS["gemma-3-27b-it"]).layers
    assert [index for index, layer in enumerate(gemma) if attention_of(layer).window is None] == list(range(5, 62, 6))
    local, whole = attention_of(gemma[0]), attention_of(gemma[5])
    assert local.rope is not None
    assert whole.rope is not None
    assert (local.rope.theta, local.rope.factor, whole.rope.theta, whole.rope.factor) == (10_000.0, 1.0, 1e6, 8.0)
    assert local.scale == pytest.approx(168**-0.5)
    gemma = hf_config(CONFIGS["gemma-4-31b-it"]).layers
    assert [index for index, layer in enumerate(gemma) if attention_of(layer).window is None] == list(range(5, 60, 6))
    parts = attention_of(gemma[0]), attention_of(gemma[5])
    heads = [(part.num_kv_heads, part.head_dim, part.values_from_keys) for part in parts]
    assert heads == [(16, 256, False), (4, 512, True)]
    cohere = hf_config(CONFIGS["command-r7b"]).layers
    assert [attention_of(layer).rope is None for layer in cohere[:4]] == [False, False, False, True]
    olmo = hf_config(CONFIGS["olmo-3-7b"]).layers
    ropes = [attention_of(layer).rope for layer in olmo[2:4]]
    assert [rope and rope.scaling for rope in ropes] == ["default", "yarn"]
    glm = hf_config(CONFIGS["glm-4.5"]).layers
    assert [layer.experts is None for layer in glm[:4]] == [True, True, True, False]
    assert glm[3].experts is not None
    assert (attention_of(glm[3]).qk_norm, attention_of(glm[3]).qkv_bias, glm[3].experts.router.scale) == (
        "head",
        True,
        2.5,
    )


def test_gemma_4_s_files_by_hugging_face_and_by_mlx() -> None:
    config = hf_config(CONFIGS["gemma-4-26b-a4b-it"])
    names = stored_shapes(config)
    layer = "model.language_model.layers.5."
    assert names[f"{layer}experts.gate_up_proj"] == (128 * 2 * 704, 2816)
    assert names[f"{layer}router.per_expert_scale"] == (128,)
    assert f"{layer}self_attn.v_proj.weight" not in names
    assert NAMINGS[config.naming].skips("model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight")
    assert not any(NAMINGS[config.naming].skips(name) for name in names)
    by_mlx = ("language_model.model.layers.0.experts.switch_glu.gate_proj.weight", "vision_tower.patch_embedder.weight")
    stacked = settled_naming(config.naming, by_mlx)
    assert set(by_mlx[:1]) <= set(stored_shapes(replace(config, naming=stacked)))
    assert [NAMINGS[stacked].skips(name) for name in by_mlx] == [False, True]
    assert settled_naming(config.naming, names) == config.naming


@pytest.mark.parametrize("key", ["hidden_size_per_layer_input", "num_kv_shared_layers"])
def test_small_gemma_4_is_refused_by_name(key: str) -> None:
    values = copy.deepcopy(CONFIGS["gemma-4-31b-it"])
    values["text_config"][key] = 2
    with pytest.raises(ArchitectureUnsupported, match=f"{key} .Gemma 4 E2B, E4B") as caught:
        hf_config(values)
    assert "Gemma 4 31B and 26B-A4B, of E4B's size Gemma 3 4B" in caught.value.fact


def test_queries_of_ministral_grow_and_a_part_of_phi_s_heads_rotates() -> None:
    ministral = attention_of(hf_config(CONFIGS["ministral-3-8b"]).layers[0])
    assert ministral.temperature == Temperature(growth=0.1, context=16_384)
    assert attention_of(hf_config(CONFIGS["mistral-small-3.2-24b"]).layers[0]).temperature is None
    phi = attention_of(hf_config(CONFIGS["phi-4-mini"]).layers[0]).rope
    assert phi is not None
    assert (phi.scaling, phi.factor, phi.original_context, len(phi.long_factor)) == ("longrope", 32.0, 4096, 48)


def test_latent_attention_is_scaled_and_kept_as_published() -> None:
    flash, lite, v3 = (hf_config(CONFIGS[name]) for name in ("glm-4.7-flash", "deepseek-v2-lite", "deepseek-v3"))
    scales = [attention_of(config.layers[0]).logit_scale for config in (flash, lite, v3)]
    yarn = [(0.1 * mscale * log(40) + 1) ** 2 for mscale in (0.707, 1.0)]
    assert scales == pytest.approx([256**-0.5, 192**-0.5 * yarn[0], 192**-0.5 * yarn[1]])
    assert v3.kv_bytes_per_token(form="bfloat16") == 61 * 576 * 2
    assert v3.kv_bytes_per_token(form="8bit") == 61 * (576 + 2)
    routers = [config.layers[-1].experts for config in (flash, lite, v3)]
    found = [(each.router.score, each.router.groups, each.router.groups_used) for each in routers if each]
    assert found == [("sigmoid", 1, 1), ("softmax", 1, 1), ("sigmoid", 8, 4)]


def test_ids_and_ties_come_from_the_top_where_the_text_s_config_has_none() -> None:
    values = copy.deepcopy(CONFIGS["gemma-3-12b-it"])
    assert hf_config(values).eos_token_ids == (1, 106)
    assert not hf_config(values | {"tie_word_embeddings": False}).tied_embeddings
    values["text_config"]["eos_token_id"] = 7
    assert hf_config(values).eos_token_ids == (7,)


PATHS = [
    (name, path)
    for name, values in CONFIGS.items()
    for key, value in values.items()
    for path in ((key,), *((key, inner) for inner in (value if isinstance(value, dict) else ())))
    if key != "vision_config"
]


@settings(max_examples=300, deadline=None)
@given(place=st.sampled_from(PATHS), change=st.sampled_from(CHANGES))
def test_a_changed_field_is_read_or_refused_by_name(place: tuple[str, tuple[str, ...]], change: object) -> None:
    name, path = place
    values = copy.deepcopy(CONFIGS[name])
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = change
    if change is DELETED:
        del inner[path[-1]]
    try:
        config = hf_config(values)
    except (ModelInvalid, ArchitectureUnsupported) as exc:
        text = f"{exc.what} {exc.fact}"
        assert any(word in text for word in (*path, *CONTRADICTED.get(path[-1], ())) if word), text
    else:
        assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize(
    ("name", "more", "nearest"),
    [
        ("Qwen4ExpForConditionalGeneration", {"text_config": {"num_experts": 512}}, "Qwen3NextForCausalLM"),
        ("Lfm3ForCausalLM", {}, "Lfm2ForCausalLM"),
        ("NemotronForCausalLM", {}, "NemotronHForCausalLM"),
        ("Qwen2MoeForCausalLM", {"num_experts": 60}, "Qwen3MoeForCausalLM"),
        ("Llama4ForConditionalGeneration", {"text_config": {"num_local_experts": 16}}, "LlamaForCausalLM"),
        ("Gemma3nForConditionalGeneration", {}, "Gemma3ForConditionalGeneration"),
        ("Gemma2ForCausalLM", {}, "Gemma3ForCausalLM"),
        ("Glm4ForCausalLM", {}, "Glm4MoeForCausalLM"),
        ("PhimoeForCausalLM", {"num_local_experts": 16}, "Phi3ForCausalLM"),
        ("Phi4MMForCausalLM", {}, "Phi3ForCausalLM"),
        ("CohereForCausalLM", {}, "Cohere2ForCausalLM"),
        ("Qwen3VLMoeForConditionalGeneration", {}, "Qwen3MoeForCausalLM"),
        ("MambaForCausalLM", {"state_size": 16}, "NemotronHForCausalLM"),
        ("JambaForCausalLM", {"mamba_d_state": 16}, "NemotronHForCausalLM"),
        ("SmolLM3ForCausalLM", {}, ""),
        ("BertModel", {}, ""),
    ],
)
def test_an_unsupported_class_names_the_nearest(name: str, more: dict[str, Any], nearest: str) -> None:
    with pytest.raises(ArchitectureUnsupported) as caught:
        hf_config({"architectures": [name], **more})
    assert name in caught.value.what
    assert (f"the nearest is {nearest};" in caught.value.fact) == bool(nearest)
    named: set[str] = set()
    for group in caught.value.fact.partition("supported: ")[2].split(", "):
        first, *others = group.split("/")
        word = "".join(takewhile(str.isalpha, first))
        named |= {first, *(word + other for other in others)}
    assert named == {family.hf_class.partition("For")[0] for family in FAMILIES}
    assert len(caught.value.fact) < 300


@pytest.mark.parametrize(
    ("arch", "experts", "nearest"),
    [
        ("qwen4next", 512, "qwen3next"),
        ("gemma2", 0, "gemma3"),
        ("llama4", 16, "llama"),
        ("phimoe", 16, "phi3"),
        ("mamba", 0, ""),
    ],
)
def test_an_unsupported_gguf_architecture_names_the_nearest(arch: str, experts: int, nearest: str) -> None:
    with pytest.raises(ArchitectureUnsupported) as caught:
        gguf_config({"general.architecture": arch, f"{arch}.expert_count": experts}, {})
    assert arch in caught.value.what
    assert (f"the nearest is {nearest};" in caught.value.fact) == bool(nearest)


def test_code_in_the_folder_is_refused_unless_it_defines_the_family_s_own_class() -> None:
    other = CONFIGS["minimax-m2.5"] | {"auto_map": {"AutoModelForCausalLM": "modeling.OtherForCausalLM"}}
    llama = CONFIGS["llama-3.1-8b"] | {"auto_map": {"AutoModelForCausalLM": "modeling.LlamaForCausalLM"}}
    for values in (other, llama, CONFIGS["minimax-m2.5"] | {"auto_map": "text"}):
        with pytest.raises(ModelInvalid, match="auto_map"):
            hf_config(values)
