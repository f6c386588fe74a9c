"""``quantization_config`` is read for the known formats; every other one is refused by name, before any download."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.errors import ModelInvalid
from edgepipe.spec.quantisation import Quantisation, WeightFormat
from edgepipe.spec.quantisation_config import check_quantisation
from tests.support.models.quantised_weights import RECIPES


def read(config: Mapping[str, Any], key: str = "quantization_config") -> Quantisation:
    found = check_quantisation({key: dict(config)})
    assert found is not None
    return found


def test_a_plain_model_has_no_quantisation() -> None:
    assert check_quantisation({"hidden_size": 32}) is None
    assert check_quantisation({"quantization_config": None}) is None


@pytest.mark.parametrize("name", RECIPES)
def test_every_known_format_is_read(name: str) -> None:
    assert read(RECIPES[name].config, RECIPES[name].key).default.kind


# Configs as published repositories have them.
PUBLISHED: Mapping[str, tuple[dict[str, Any], WeightFormat]] = {
    "AutoAWQ": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
            "backend": "autoawq",
            "do_fuse": False,
        },
        WeightFormat(kind="awq", group=128, zeros=True),
    ),
    "AutoGPTQ": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "damp_percent": 0.1,
            "desc_act": True,
            "sym": True,
            "true_sequential": True,
            "model_name_or_path": None,
            "model_file_base_name": "model",
        },
        WeightFormat(kind="gptq", group=128, indexed=True, ordered=True),
    ),
    "GPTQModel": (
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": -1,
            "desc_act": False,
            "sym": True,
            "lm_head": False,
            "checkpoint_format": "gptq",
            "pack_dtype": "int32",
            "meta": {"quantizer": ["gptqmodel:2.0.0"]},
        },
        WeightFormat(kind="gptq", bits=8, indexed=True),
    ),
    "Qwen3-FP8": (
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
        },
        WeightFormat(kind="fp8_inv", bits=8, rows=128, group=128, scale="F32"),
    ),
    "MiniMax-M2": (
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
        WeightFormat(kind="fp8_inv", bits=8, rows=128, group=128, scale="F32"),
    ),
    "Ministral 3, Devstral 2": (
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "dequantize": False,
            "weight_block_size": None,
            "modules_to_not_convert": ["lm_head"],
        },
        WeightFormat(kind="fp8", bits=8, rows=0, scale="F32"),
    ),
    "RedHatAI FP8-dynamic": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": {"dynamic": True, "num_bits": 8, "strategy": "token", "type": "float"},
                    "weights": {
                        "actorder": None,
                        "block_structure": None,
                        "dynamic": False,
                        "group_size": None,
                        "num_bits": 8,
                        "observer": "minmax",
                        "strategy": "channel",
                        "symmetric": True,
                        "type": "float",
                    },
                }
            },
            "ignore": ["lm_head", "re:.*gate$"],
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
        },
        WeightFormat(kind="fp8", bits=8, scale="F32"),
    ),
    "Unsloth bnb-4bit": (
        {
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "llm_int8_skip_modules": ["lm_head"],
            "load_in_4bit": True,
            "load_in_8bit": False,
            "quant_method": "bitsandbytes",
        },
        WeightFormat(kind="nf4", group=64, scale="U8"),
    ),
    "AutoRound": (
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
            "autoround_version": "0.5.1",
        },
        WeightFormat(kind="gptq", group=128, indexed=True),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str) -> None:
    config, expected = PUBLISHED[name]
    assert read(config).default == expected


def test_mlx_names_formats_by_module() -> None:
    config = {
        "group_size": 64,
        "bits": 4,
        "lm_head": {"group_size": 64, "bits": 6},
        "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 8},
        "model.layers.1.mlp.down_proj": False,
        "model.layers.2.mlp.down_proj": True,
    }
    found = check_quantisation({"quantization": config, "quantization_config": config})
    assert found is not None
    bits = {module: stored and stored.bits for module, stored in found.others}
    assert bits == {
        "model.embed_tokens": 4,
        "lm_head": 6,
        "model.layers.0.mlp.down_proj": 8,
        "model.layers.1.mlp.down_proj": None,
        "model.layers.2.mlp.down_proj": 4,
    }
    assert found.of("model.layers.5.mlp.down_proj") == WeightFormat(kind="mlx", group=64)


def test_gptq_names_formats_by_pattern() -> None:
    dynamic = {"+:.*down.*": {"bits": 8}, r"-:.*\.0\..*": {}, r"model\.layers\.3\..*": {"group_size": 32}}
    found = read({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "dynamic": dynamic})
    assert {(stored.bits, stored.group) for stored in found.formats} == {(4, 128), (8, 128), (4, 32)}


REFUSED: Mapping[str, dict[str, Any]] = {
    "'exl2'": {"quant_method": "exl2", "bits": 4.0},
    "'exl3'": {"quant_method": "exl3"},
    "'hqq'": {"quant_method": "hqq"},
    "'aqlm'": {"quant_method": "aqlm"},
    "'quark'": {"quant_method": "quark"},
    "bitsandbytes int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "bitsandbytes 'fp4'": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "layout 'gemv'": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMV"},
    "AWQ without zeros": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False},
    "AWQ of 8 bits": {"quant_method": "awq", "bits": 8, "group_size": 128},
    "GPTQ of 5 bits": {"quant_method": "gptq", "bits": 5, "group_size": 128},
    "groups of 100": {"quant_method": "gptq", "bits": 4, "group_size": 100},
    "layout 'marlin'": {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
    "not e4m3": {"quant_method": "fp8", "fmt": "e5m2"},
    "'auto_round:llm_compressor'": {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
    "MLX 'nvfp8'": {"group_size": 16, "bits": 8, "mode": "nvfp8"},
    "MLX of 7 bits": {"group_size": 64, "bits": 7},
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_formats_are_refused_by_name(name: str) -> None:
    with pytest.raises(ModelInvalid) as caught:
        read(REFUSED[name])
    assert name in caught.value.what
    assert "edgepipe reads" in (caught.value.fact or "")
    assert caught.value.next_step


def _compressed(layout: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    args = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": args}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


@pytest.mark.parametrize(
    "config",
    [
        _compressed("marlin-24"),
        _compressed("nvfp4-pack-quantized", type="float"),
        _compressed(num_bits=2),
        _compressed(strategy="token"),
        _compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        _compressed() | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
        {**_compressed(), "config_groups": {"group_0": {"targets": ["Linear"], "weights": None}}},
    ],
)
def test_other_compressed_tensors_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ModelInvalid) as caught:
        read(config)
    assert "compressed-tensors" in caught.value.what


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 0},
        {"quant_method": "awq", "bits": "4", "group_size": 128},
        {"quant_method": "awq", "group_size": 128},
        {"quant_method": "gptq", "bits": 4, "group_size": -2},
        {"quant_method": "gptq", "bits": True, "group_size": 128},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": 4},
        {"group_size": 0, "bits": 4},
        "awq",
        [],
    ],
)
def test_values_that_cannot_be_right_are_refused(config: Any) -> None:
    with pytest.raises(ModelInvalid):
        check_quantisation({"quantization_config": config})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150)
@given(data=st.data(), name=st.sampled_from(sorted(RECIPES)), value=JSON)
def test_a_broken_config_is_read_or_refused_but_never_fails(data: st.DataObject, name: str, value: object) -> None:
    config: dict[str, Any] = copy.deepcopy(dict(RECIPES[name].config))
    target = config
    while True:  # walk down to any depth of the config
        key = data.draw(st.sampled_from(sorted(target)))
        if not isinstance(target[key], dict) or data.draw(st.booleans()):
            break
        target = target[key]
    target[key] = value
    with contextlib.suppress(ModelInvalid):
        check_quantisation({RECIPES[name].key: config})
