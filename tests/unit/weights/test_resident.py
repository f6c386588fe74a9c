"""Sizes of weights in memory: tables of forms, mixes of types, and the bytes that follow."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgepipe.errors import ModelInvalid, ModelUnknown
from edgepipe.shapes.loader import named_shape, shape_names
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from edgepipe.spec.layout import (
    EMBEDDING,
    HEAD,
    is_exact,
    is_of_heads,
    layer_parameters,
    model_tensors,
    slice_parameters,
)
from edgepipe.spec.packed_form import PackedForm
from edgepipe.testing.tiny_model import tiny_config
from edgepipe.weights.mixes import mix_names, mix_table, mix_weights, named_model, split_mix
from edgepipe.weights.resident import WIDE, resident_sizes, slice_bytes, weight_bytes
from edgepipe.weights.weight_table import FLOATS, WeightTable, make_table, table_from_json, table_of

KINDS = (WIDE, "torch-cpu", "torch-cuda", "mlx", "mlx-blocks", "emulated")
GB = 1e9
Q4, Q8 = PackedForm(bits=4, group=32, offset="zero"), PackedForm(bits=8, group=32, offset="zero")


def whole(config: ModelConfig) -> Slice:
    return Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)


names = st.sampled_from(shape_names())
mixes = st.sampled_from(mix_names())
kinds = st.sampled_from(KINDS)
dtypes = st.sampled_from(("float32", "bfloat16"))


@pytest.mark.parametrize(
    ("name", "published_gb"),  # of the files on the hub
    [
        ("llama-3.3-70b:q3_k_m", 34.27),
        ("llama-3.3-70b:q4_k_m", 42.52),
        ("llama-3.3-70b:q5_k_m", 49.95),
        ("llama-3.3-70b:q6_k", 57.89),
        ("llama-3.3-70b:q8_0", 74.98),
        ("llama-3.1-8b:q4_k_m", 4.92),
        ("llama-3.1-8b:q8_0", 8.54),
        ("llama-3.2-3b:q4_k_m", 2.02),
        ("qwen2.5-7b:q4_k_m", 4.68),
        ("gpt-oss-20b", 13.76),
        ("gpt-oss-120b:mxfp4", 65.25),
    ],
)
def test_a_mix_has_the_size_of_the_published_file(name: str, published_gb: float) -> None:
    config, _ = named_model(name)
    weights = mix_weights(config, split_mix(name)[1], whole(config))
    assert sum(weight.num_bytes for weight in weights) / GB == pytest.approx(published_gb, rel=0.005)


def test_q4_k_m_has_more_bits_for_values_and_down_projections_of_half_the_layers() -> None:
    config = named_shape("llama-3.1-8b")
    types = {weight.name: weight.scheme for weight in mix_weights(config, "q4_k_m", whole(config))}
    more = [layer for layer in range(32) if types[f"model.layers.{layer}.mlp.down_proj.weight"] == "Q6_K"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert more == [layer for layer in range(32) if types[f"model.layers.{layer}.self_attn.v_proj.weight"] == "Q6_K"]
    assert types[HEAD] == "Q6_K"
    assert types[EMBEDDING] == types["model.layers.0.mlp.up_proj.weight"] == "Q4_K"
    assert types["model.norm.weight"] == "BF16"


def test_rows_of_no_whole_blocks_get_a_type_that_fits() -> None:
    config = named_shape("smollm2-135m")  # rows of 576
    types = {weight.name: weight.scheme for weight in mix_weights(config, "q4_k_m", whole(config))}
    assert types["model.layers.4.self_attn.q_proj.weight"] == "Q5_0"
    assert types["model.layers.0.self_attn.v_proj.weight"] == "Q8_0"
    assert types["model.layers.4.mlp.down_proj.weight"] in ("Q4_K", "Q6_K")  # rows of 1536
    assert types[EMBEDDING] == "Q8_0"  # tied: it is the output


@pytest.mark.parametrize("name", ["llama-3.3-70b:", "llama-3.3-70b:ud-q7_k_xl", "llama-3.3-70b:q9", ":", "a:b:c"])
def test_unknown_types_are_refused_with_the_list(name: str) -> None:
    with pytest.raises(ModelUnknown) as caught:
        named_model(name)
    assert all(mix in caught.value.fact for mix in mix_names())


def test_a_name_without_a_type_is_16_bit() -> None:
    assert named_model("qwen3-8b") == named_model("qwen3-8b:BF16") == (named_shape("qwen3-8b"), FLOATS)
    assert named_model("qwen3-8b:Q4_K_M")[1] == mix_table(named_shape("qwen3-8b"), "q4_k_m") != FLOATS


@example(name="mixtral-8x7b", mix="bf16", kind="torch-cpu", dtype="float32", cut=1)
@given(name=names, mix=mixes, kind=kinds, dtype=dtypes, cut=st.integers(1, 23))
def test_slices_add_up_and_packing_saves_memory(name: str, mix: str, kind: str, dtype: str, cut: int) -> None:
    config = named_shape(name)
    table = mix_table(config, mix)
    first, second = make_slices([LayerRange(0, cut), LayerRange(cut, config.num_layers)], config.num_layers)
    parts = [slice_bytes(config, table, part, kind=kind, dtype=dtype) for part in (first, second)]
    total = slice_bytes(config, table, whole(config), kind=kind, dtype=dtype)
    sizes = resident_sizes(config, table, kind=kind, dtype=dtype)
    assert sum(parts) == total + (sizes.head if config.tied_embeddings else 0)
    floats = slice_bytes(config, FLOATS, whole(config), kind=kind, dtype=dtype)
    assert total <= floats
    if kind == WIDE or mix == "bf16":
        assert total == floats
        value_bytes = 4 if dtype == "float32" else 2
        wider = sum(  # a CPU also pads routers of few experts
            weight_bytes(name, None, shape, kind=kind, dtype=dtype) - prod(shape) * value_bytes
            for name, shape in model_tensors(config).items()
            if is_exact(name)
        )
        assert total == slice_parameters(config, whole(config)) * value_bytes + wider
    elif mix == "q4_k_m":
        assert total < 0.75 * floats


@given(name=names, mix=mixes)
def test_a_packed_form_takes_about_the_file_s_bytes(name: str, mix: str) -> None:
    config = named_shape(name)
    for weight in mix_weights(config, mix, Slice(index=0, layers=LayerRange(0, 1), embedding=True, head=True)):
        size = weight_bytes(weight.name, weight.form, weight.shape, kind="torch-cuda", dtype="bfloat16")
        if is_of_heads(weight.name):
            assert size == 2 * prod(weight.shape)
            continue
        if weight.form is None:
            assert size == (4 if is_exact(weight.name) else 2) * prod(weight.shape)
            continue
        assert weight.num_bytes <= size * 1.01
        assert size <= 1.35 * weight.num_bytes  # 3 bits are kept in planes of 4


@given(name=names, mix=mixes)
def test_a_table_survives_its_way_to_another_process(name: str, mix: str) -> None:
    config = named_shape(name)
    table = mix_table(config, mix)
    text = table.to_json()
    assert table_from_json(text, config) == table
    assert len(text) < 2000 + 8 * config.num_layers
    assert bool(text) == table.packed == (mix != "bf16")
    forms = {info.name: info.form for info in mix_weights(config, mix, whole(config))}
    assert all(table.form(weight) == form for weight, form in forms.items())


def test_a_table_of_some_weights_takes_the_others_for_floats() -> None:
    config = tiny_config(num_layers=4)
    shapes = model_tensors(config)
    infos = mix_weights(config, "q8_0", Slice(index=1, layers=LayerRange(1, 2), embedding=False, head=False))
    table = table_of(infos)
    assert table.form("model.layers.1.mlp.up_proj.weight") == Q8
    assert {table.form(name) for name in shapes if not name.startswith("model.layers.1.")} == {None}
    assert table_from_json(table.to_json(), config) == table


@pytest.mark.parametrize(
    "change",
    [
        {"forms": [{"bits": 4}]},
        {"forms": [{"bits": 7, "group": 32}]},
        {"forms": [{"bits": 4, "group": 0}]},
        {"forms": [{"bits": 4, "group": 48}]},
        {"forms": [{"bits": 4, "group": 32, "span": 48}]},
        {"forms": [{"bits": 4, "group": 32, "codebook": "nf9"}]},
        {"forms": [{"bits": 4, "group": 32, "offset": "odd"}]},
        {"forms": ["x"]},
        {"forms": []},
        {"classes": [{"mlp.up_proj.weight": 5}]},
        {"classes": [{"mlp.up_proj.weight": True}]},
        {"classes": [{"mlp.other.weight": 0}]},
        {"classes": [{"input_layernorm.weight": 0}]},
        {"classes": [3]},
        {"layers": [0] * 5},
        {"layers": [-1]},
        {"layers": "0"},
        {"embedding": 9},
        {"float32_experts": [1]},
        {"float32_experts": 0},
    ],
)
def test_a_hostile_table_is_refused(change: dict[str, Any]) -> None:
    config = tiny_config(num_layers=4)
    good = json.loads(mix_table(config, "q8_0").to_json())
    with pytest.raises(ModelInvalid):
        table_from_json(json.dumps({**good, **change}), config)


@pytest.mark.parametrize("text", ["[]", "{", "0", " ", "[" * 100_000, "x" * (2 << 20)])
def test_a_text_that_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ModelInvalid):
        table_from_json(text, tiny_config())


def test_layers_may_differ() -> None:
    shape = named_shape("llama-3.1-8b")
    config = replace(shape, layers=shape.layers[:3])
    name = "mlp.down_proj.weight"
    table = make_table([((name, Q4),), ((name, Q8),)])
    assert table == WeightTable(classes=(((name, Q4),), ((name, Q8),)), layers=(0, 1))
    first, second, third = resident_sizes(config, table, kind="torch-cuda", dtype="bfloat16").layers
    assert first < second < third == 2 * layer_parameters(config, 0)
