"""config.json of every family and spelling to one ModelConfig; M16's cases are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import ArchitectureUnsupported, ModelInvalid
from edgepipe.spec.config import gguf_config, hf_config, read_hf_config
from edgepipe.spec.config_json import config_from_json, config_to_json
from edgepipe.weights.gguf_header import read_gguf_header
from tests.support.models.files import hf_values, smollm2_gguf
from tests.support.models.specs import first_attention, first_dense, first_rope, windows_of

QWEN2 = ["Qwen2ForCausalLM"]
QWEN3 = ["Qwen3ForCausalLM"]
MISTRAL = ["MistralForCausalLM"]

REFUSED = {
    "layers 0": {"num_hidden_layers": 0},
    "layers -1": {"num_hidden_layers": -1},
    "layers 1e9": {"num_hidden_layers": 10**9},
    "layers as text": {"num_hidden_layers": "3"},
    "layers as float": {"num_hidden_layers": 3.0},
    "layers true": {"num_hidden_layers": True},
    "layers list": {"num_hidden_layers": [3]},
    "layers missing": {"num_hidden_layers": None},
    "hidden 0": {"hidden_size": 0},
    "hidden 2^40": {"hidden_size": 1 << 40},
    "heads do not divide hidden": {"num_attention_heads": 5, "num_key_value_heads": 1},
    "kv heads do not divide heads": {"num_key_value_heads": 3},
    "head size odd": {"head_dim": 7},
    "head size 0": {"head_dim": 0},
    "eps NaN": {"rms_norm_eps": math.nan},
    "eps negative": {"rms_norm_eps": -1.0},
    "eps text": {"rms_norm_eps": "1e-5"},
    "theta infinite": {"rope_theta": math.inf},
    "theta 0": {"rope_theta": 0},
    "theta 1, whose logarithm is 0": {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
    "vocabulary 10^12": {"vocab_size": 10**12},
    "eos beyond vocabulary": {"eos_token_id": 300},
    "eos text": {"eos_token_id": "</s>"},
    "tie as text": {"tie_word_embeddings": "yes"},
    "auto_map": {"auto_map": {"AutoModelForCausalLM": "evil.Model"}},
    "quantised": {"quantization_config": {"quant_method": "awq"}},
    "architectures as text": {"architectures": "LlamaForCausalLM"},
    "rope no object": {"rope_scaling": "linear"},
    "rope without factor": {"rope_scaling": {"type": "linear"}},
    "rope factor NaN": {"rope_scaling": {"type": "linear", "factor": math.nan}},
    "rope factor below 1": {"rope_scaling": {"type": "linear", "factor": 0.5}},
    "llama3 factors": {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}
    },
    "longrope lengths": {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
    "layer types": {"architectures": QWEN2, "use_sliding_window": True, "layer_types": ["full_attention"]},
}

NO_WINDOWS = (None,) * 3


@pytest.mark.parametrize("case", REFUSED)
def test_m16_is_refused(case: str) -> None:
    with pytest.raises(ModelInvalid) as caught:
        hf_config(hf_values(**REFUSED[case]))
    assert caught.value.fact


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["GPT2LMHeadModel"]},
        {"architectures": None, "model_type": "bert"},
        {"architectures": None},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "mrope"}},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_what_is_unsupported_is_named_in_three_lines(changes: dict[str, Any]) -> None:
    with pytest.raises(ArchitectureUnsupported) as caught:
        hf_config(hf_values(**changes))
    assert len(caught.value.lines()) == 3
    assert "supported:" in caught.value.fact


def test_nan_in_the_file_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_values(rms_norm_eps=math.nan)))
    with pytest.raises(ModelInvalid, match="NaN"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', "\ud800", '{"a":' * 100_000])
def test_what_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelInvalid, match=r"config\.json"):
        read_hf_config(tmp_path)


def test_llama_with_defaults() -> None:
    config = hf_config(hf_values(num_key_value_heads=None))
    attention, bias = first_attention(config), first_dense(config).bias
    assert (config.architecture, attention.num_kv_heads, attention.head_dim) == ("llama", 4, 8)
    assert (attention.qkv_bias, attention.output_bias, bias, attention.qk_norm) == (False, False, False, "")
    assert windows_of(config) == NO_WINDOWS
    assert first_rope(config).scaling == "default"
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)


def test_llama_biases_and_a_head_size_of_its_own() -> None:
    config = hf_config(hf_values(attention_bias=True, mlp_bias=True, head_dim=20, tie_word_embeddings=True))
    attention, bias = first_attention(config), first_dense(config).bias
    assert (attention.qkv_bias, attention.output_bias, bias) == (True, True, True)
    assert (attention.head_dim, config.tied_embeddings) == (20, True)


def test_mistral_slides_everywhere_unless_told_not_to() -> None:
    assert windows_of(hf_config(hf_values(architectures=MISTRAL, sliding_window=16))) == (16,) * 3
    assert windows_of(hf_config(hf_values(architectures=MISTRAL))) == NO_WINDOWS


def test_a_window_as_large_as_the_context_is_none() -> None:
    assert windows_of(hf_config(hf_values(architectures=MISTRAL, sliding_window=128))) == NO_WINDOWS


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 16}, NO_WINDOWS),
        ({"sliding_window": 16, "use_sliding_window": True}, NO_WINDOWS),
        ({"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, (None, 16, 16)),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 1}, NO_WINDOWS),
        (
            {
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (16, None, 16),
        ),
        ({"sliding_window": 16, "layer_types": ["sliding_attention"] * 3}, NO_WINDOWS),
    ],
)
def test_qwen_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert windows_of(hf_config(hf_values(architectures=QWEN2, **changes))) == windows


def test_qwen2_and_qwen3_differ_in_biases_and_norms() -> None:
    two = first_attention(hf_config(hf_values(architectures=QWEN2, attention_bias=True)))
    three = first_attention(hf_config(hf_values(architectures=QWEN3, head_dim=None)))
    assert (two.qkv_bias, two.output_bias, two.qk_norm) == (True, False, "")
    assert (three.qkv_bias, three.output_bias, three.qk_norm, three.head_dim) == (False, False, "head", 128)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_rope(key: str) -> None:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    rope = first_rope(hf_config(hf_values(**{key: llama3})))
    assert (rope.theta, rope.scaling, rope.factor, rope.original_context) == (500000.0, "llama3", 8.0, 64)


def test_rope_parameters_nested_per_layer_type() -> None:
    same = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    nested = {"full_attention": same, "sliding_attention": dict(same)}
    assert first_rope(hf_config(hf_values(rope_parameters=nested))).theta == 1e6
    nested["full_attention"] = {**same, "factor": 4.0}
    with pytest.raises(ModelInvalid, match="rope_parameters"):
        hf_config(hf_values(rope_parameters=nested))


def test_the_other_scalings() -> None:
    def rope(**scaling: Any):
        return first_rope(hf_config(hf_values(rope_scaling=scaling)))

    assert rope(type="linear", factor=2).factor == 2.0
    assert rope(type="dynamic", factor=2.0).original_context == 128
    yarn = rope(type="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16, mscale=1.0, truncate=False)
    assert (yarn.original_context, yarn.beta_fast, yarn.mscale, yarn.truncate) == (32, 16.0, 1.0, False)
    long = rope(type="su", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=32)
    assert (long.scaling, long.factor, long.long_factor) == ("longrope", 4.0, (2.0,) * 4)


def test_eos_ids_come_from_both_files() -> None:
    assert hf_config(hf_values(eos_token_id=[5, 2]), {"eos_token_id": [2, 7]}).eos_token_ids == (5, 2, 7)
    assert hf_config(hf_values(eos_token_id=None), {"eos_token_id": 9}).eos_token_ids == (9,)


def test_the_real_gguf_metadata(tmp_path: Path) -> None:
    header = read_gguf_header(smollm2_gguf(tmp_path))
    config = gguf_config(header.metadata, {"token_embd.weight": (49152, 576)})
    assert (
        config.num_layers,
        config.hidden_size,
        first_attention(config).num_heads,
        first_attention(config).num_kv_heads,
    ) == (30, 576, 9, 3)
    assert (first_dense(config).inner, config.context_length, first_rope(config).theta) == (1536, 8192, 100000.0)
    assert (config.tied_embeddings, first_attention(config).head_dim, config.eos_token_ids) == (True, 64, (2,))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CHANGED_KEYS = [
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "eos_token_id",
    "architectures",
    "layer_types",
    "sliding_window",
]


@given(
    st.dictionaries(st.sampled_from(CHANGED_KEYS), json_values, max_size=3), st.sampled_from([MISTRAL, QWEN2, QWEN3])
)
def test_any_config_is_a_config_or_refused(changes: dict[str, Any], architectures: list[str]) -> None:
    try:
        config = hf_config({**hf_values(architectures=architectures), "use_sliding_window": True, **changes})
    except ModelInvalid:
        return
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"architectures": QWEN2, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
    ],
)
def test_a_config_survives_its_own_json(changes: dict[str, Any]) -> None:
    config = hf_config(hf_values(**changes))
    assert config_from_json(config_to_json(config)) == config
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
