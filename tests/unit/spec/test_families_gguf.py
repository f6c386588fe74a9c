"""GGUF files of every family: gguf-py's names, and that a folder and the converter's file hold the same model."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.errors import ArchitectureUnsupported, ModelInvalid
from edgepipe.spec.config import gguf_config, hf_config
from edgepipe.spec.config_json import config_from_json, config_to_json
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.families import FAMILIES
from edgepipe.spec.layout import K_B, KV_B, V_B, check_layout, is_norm, stored_shapes
from edgepipe.spec.naming import settled_naming
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import WeightSource
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.gguf_file import JoinedGguf, gguf_names, hugging_face_name, open_gguf
from edgepipe.weights.weights import open_weights
from tests.support.models.family_files import ARCHS, TINY, arch_of, tiny_values, write_family_folder, write_family_gguf
from tests.support.models.recurrent_files import TINY as RECURRENT
from tests.support.models.specs import attention_of

UNREAD = {
    *("rope_freqs", "rope_factors_long", "rope_factors_short"),  # read as a part of the config
    "blk.{bid}.attn_rot_embd",  # the converter never writes it
    *(
        "per_layer_token_embd",
        "per_layer_model_proj",
        "per_layer_proj_norm",
    ),  # of Gemma 4 E2B and E4B, which are refused
    *("blk.{bid}.inp_gate", "blk.{bid}.proj", "blk.{bid}.post_norm"),
}


def whole(config: ModelConfig) -> Slice:
    return Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)


def weights_of(source: WeightSource) -> dict[str, np.ndarray]:
    found = {}
    for info in source.weights(whole(source.config)):
        weight = source.load(info.name)
        assert not isinstance(weight, Packed)
        found[info.name] = as_float32(weight).reshape(info.shape)
    return found


def stored_in_gguf(family: str) -> set[str]:
    """The tensors that edgepipe expects of a GGUF file, by their translated names."""
    config = hf_config(tiny_values(family))
    own = next(each.gguf_naming for each in FAMILIES if each.name == config.architecture)
    table = [f"{gguf.TENSOR_NAMES[tensor]}.weight" for tensor in gguf.MODEL_TENSORS[arch_of(family)]]
    naming = settled_naming(own, table)  # Gemma 4's table has gates and ups of experts only as one
    return set(stored_shapes(replace(config, naming=naming)))


@pytest.mark.parametrize("family", TINY)
def test_a_folder_and_the_converter_s_file_hold_the_same_model(family: str, tmp_path: Path) -> None:
    folder = open_weights(write_family_folder(tmp_path, family))
    file = open_weights(write_family_gguf(tmp_path / "m.gguf", family))
    wanted, found = folder.config, file.config
    assert found == replace(wanted, architecture=found.architecture, naming=found.naming, norm=found.norm)
    assert found.norm == replace(wanted.norm, plus_one=False)
    expected, read = weights_of(folder), weights_of(file)
    assert list(read) == list(expected)
    for name, weight in expected.items():
        added = 1 if is_norm(name) and wanted.norm.plus_one else 0
        assert np.array_equal(read[name], weight + np.float32(added)), name


@pytest.mark.parametrize("family", TINY)
def test_every_name_of_gguf_py_s_table_is_a_weight(family: str) -> None:
    arch = arch_of(family)
    kind = gguf.MODEL_ARCH_NAMES[arch]
    names = gguf_names({"general.architecture": kind, f"{kind}.attention.head_count": 4}, file="m.gguf").parts
    every = {name.replace(".1.", ".0.") for other in TINY for name in stored_in_gguf(other)}
    every |= {f"model.layers.0.{K_B}", f"model.layers.0.{V_B}"}  # or one tensor for both
    every.add("model.layers.0.mlp.experts.gate_up_proj.weight")  # also for gates and ups
    mapped: set[str] = set()
    for tensor in gguf.MODEL_TENSORS[arch]:
        name = gguf.TENSOR_NAMES[tensor]
        suffix = "bias" if tensor == gguf.MODEL_TENSOR.FFN_EXP_PROBS_B else "weight"
        if name not in UNREAD and ".nextn." not in name:
            mapped.add(hugging_face_name(f"{name.format(bid=0)}.{suffix}", names))
        if arch == gguf.MODEL_ARCH.GEMMA4:  # the converter adds these to the table's names
            mapped.add(hugging_face_name(f"{name.format(bid=0)}.scale", names))
    assert {name for name in mapped if not name.endswith(".scale")} <= every
    own = {name for name in stored_in_gguf(family) if ".0." in name or "layers" not in name}
    assert {name for name in own if not name.endswith(".bias")} <= mapped


def test_every_family_with_an_architecture_is_written_here() -> None:
    recurrent = {name.partition(" ")[0] for name in RECURRENT}
    assert {family.gguf for family in FAMILIES if family.gguf} == {ARCHS.get(name, name) for name in TINY} | recurrent


def test_a_tensor_for_each_expert_is_read_as_one_for_all(tmp_path: Path) -> None:
    whole_file = open_weights(write_family_gguf(tmp_path / "whole.gguf", "mixtral"))
    early = open_weights(write_family_gguf(tmp_path / "early.gguf", "mixtral", stacked=False))
    assert early.config == replace(whole_file.config, naming="each expert")
    assert config_from_json(config_to_json(early.config)) == early.config
    expected, found = weights_of(whole_file), weights_of(early)
    assert list(found) == list(expected)
    for name, weight in expected.items():
        assert np.array_equal(found[name], weight), name


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen3_moe", "glm4_moe", "minimax_m2", "gpt_oss", "deepseek_v3", "gemma4_moe"]
)
def test_gates_and_ups_of_all_experts_may_be_one_tensor(family: str, tmp_path: Path) -> None:
    apart = write_family_gguf(tmp_path / "apart.gguf", family)
    joined = write_family_gguf(tmp_path / "joined.gguf", family, joined=True)
    assert any("ffn_gate_up_exps" in name for name in open_gguf(joined)[0].tensors)
    expected, found = weights_of(open_weights(apart)), weights_of(open_weights(joined))
    assert list(found) == list(expected)
    for name, weight in expected.items():
        assert np.array_equal(found[name], weight), name
    config = open_weights(joined).config
    assert config_from_json(config_to_json(config)) == config


def test_a_stored_model_keeps_the_name_of_joined_gates_and_ups(tmp_path: Path) -> None:
    joined = open_weights(write_family_gguf(tmp_path / "joined.gguf", "gemma4_moe", joined=True))
    assert joined.config.naming == "experts' gates and ups", "cards on disk, their digests and other nodes have it"


def test_kv_b_of_latent_attention_may_be_split_for_keys_and_values(tmp_path: Path) -> None:
    joined = open_weights(write_family_gguf(tmp_path / "joined.gguf", "deepseek_v3"))
    split = open_weights(write_family_gguf(tmp_path / "split.gguf", "deepseek_v3", kv_b="split"))
    both = open_weights(write_family_gguf(tmp_path / "both.gguf", "deepseek_v3", kv_b="both"))
    expected, found = weights_of(joined), weights_of(split)
    assert both.config == joined.config
    assert list(weights_of(both)) == list(expected)
    assert config_from_json(config_to_json(split.config)) == split.config
    latent = attention_of(split.config.layers[0]).latent
    assert latent is not None
    assert not latent.joined
    for layer in range(2):
        kv_b = expected.pop(f"model.layers.{layer}.{KV_B}").reshape(4, -1, 32)
        keys = found.pop(f"model.layers.{layer}.{K_B}").reshape(4, 32, latent.nope_dim).swapaxes(1, 2)
        values = found.pop(f"model.layers.{layer}.{V_B}").reshape(4, latent.value_dim, 32)
        assert np.array_equal(np.concatenate([keys, values], axis=1), kv_b)
    assert all(np.array_equal(found[name], weight) for name, weight in expected.items())


CUT = ("attn_qkv.weight", "ffn_up.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight")


@pytest.mark.parametrize("family", ["phi3", "mixtral"])
def test_packed_parts_of_matrices_are_cut_and_joined(family: str, tmp_path: Path) -> None:
    floats = open_weights(write_family_gguf(tmp_path / "m.gguf", family))
    packed = open_weights(write_family_gguf(tmp_path / "q.gguf", family, packed=CUT, stacked=False))
    kinds: set[str] = set()
    for name, weight in weights_of(floats).items():
        found = packed.load(name)
        kinds |= {name.rpartition("0.")[2]} if isinstance(found, Packed) else set()
        values = found.float32() if isinstance(found, Packed) else as_float32(found).reshape(weight.shape)
        np.testing.assert_allclose(values, weight, atol=0.005)
    assert (
        kinds
        >= {
            "phi3": {
                f"{name}_proj.weight" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
            },
            "mixtral": {"mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"},
        }[family]
    )
    sizes = [info.num_bytes for info in packed.weights(whole(packed.config))]
    assert sum(sizes) == sum(info.num_bytes for info in packed.tensors(whole(packed.config)))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_head_counts_of_every_layer_may_be_a_list(family: str, tmp_path: Path) -> None:
    plain = open_weights(write_family_gguf(tmp_path / "plain.gguf", family))
    listed = open_weights(write_family_gguf(tmp_path / "listed.gguf", family, per_layer_heads=True))
    assert listed.config == plain.config
    for name, weight in weights_of(plain).items():
        assert np.array_equal(weights_of(listed)[name], weight)


def changed(tmp_path: Path, family: str, **changes: object) -> ModelConfig:
    """A file's config with changed metadata; a key's dots are underscores twice."""
    joined, _ = open_gguf(write_family_gguf(tmp_path / "m.gguf", family))
    arch = joined.metadata["general.architecture"]
    own = {f"{arch}.{key.replace('__', '.')}": value for key, value in changes.items()}
    config = gguf_config({**joined.metadata, **own}, joined.shapes)
    check_layout(config, joined.infos)
    return config


def test_layers_with_other_head_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureUnsupported, match="head_count_kv"):
        changed(tmp_path, "qwen3", attention__head_count_kv=[2, 4])
    with pytest.raises(ModelInvalid, match="heads"):
        gguf_names({"general.architecture": "llama", "llama.attention.head_count": np.array([4, 2])}, file="m.gguf")


@pytest.mark.parametrize(
    ("family", "changes", "word"),
    [
        ("qwen3_moe", {"expert_gating_func": 2}, "expert_gating_func"),
        ("glm4_moe", {"expert_gating_func": 1}, "expert_gating_func"),
        ("qwen3", {"attention__value_length": 8}, "value_length"),
        ("mistral3", {"attention__temperature_scale": 0.1}, "original_context_length"),
        ("olmo3", {"attention__sliding_window_pattern": [True]}, "sliding_window_pattern"),
        ("cohere2", {"logit_scale": None}, "logit_scale"),
        ("glm4_moe", {"expert_group_count": 3}, "groups"),
        ("minimax_m2", {"rope__dimension_count": 7}, "rope.dimension_count"),
    ],
)
def test_metadata_of_another_computation_is_refused_by_name(
    family: str, changes: dict[str, object], word: str, tmp_path: Path
) -> None:
    with pytest.raises((ModelInvalid, ArchitectureUnsupported)) as caught:
        changed(tmp_path, family, **changes)
    assert word in f"{caught.value.what} {caught.value.fact}"


VALUES = (None, "text", 0, -1, 3, 7, 1 << 70, 0.5, True, inf, nan, [], [1], ["a"], np.array([2, 2]), np.array([1.5, 2]))


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JoinedGguf]:
    folder = tmp_path_factory.mktemp("families")
    return {family: open_gguf(write_family_gguf(folder / f"{family}.gguf", family))[0] for family in TINY}


@settings(max_examples=300, deadline=None)
@given(family=st.sampled_from(sorted(TINY)), number=st.integers(0, 40), value=st.sampled_from(VALUES))
def test_changed_metadata_is_read_or_refused(
    family: str, number: int, value: Any, headers: dict[str, JoinedGguf]
) -> None:
    joined = headers[family]
    keys = sorted(joined.metadata)
    metadata = {**joined.metadata, keys[number % len(keys)]: value}
    try:
        gguf_names(metadata, file="m.gguf")
        config = gguf_config(metadata, joined.shapes)
    except (ModelInvalid, ArchitectureUnsupported):
        pass
    else:
        assert config_from_json(config_to_json(config)) == config


def test_keys_of_newer_converters_are_read(tmp_path: Path) -> None:
    gemma = changed(tmp_path, "gemma3", rope__freq_base_swa=20_000.0, final_logit_softcapping=30.0)
    local = attention_of(gemma.layers[0]).rope
    assert local is not None
    assert (local.theta, gemma.logit_softcap) == (20_000.0, 30.0)
    period = changed(tmp_path, "gemma3", attention__sliding_window_pattern=3)
    assert [attention_of(layer).window for layer in period.layers] == [32, 32, None, 32, 32, None, 32]
    whole_context = changed(tmp_path, "gemma3", attention__sliding_window=0)
    ropes = [attention_of(layer).rope for layer in whole_context.layers]
    assert {rope.factor for rope in ropes if rope} == {8.0}
    without_positions = changed(tmp_path, "granite", rope__scaling__finetuned=False)
    assert attention_of(without_positions.layers[0]).rope is None
    unscaled = changed(tmp_path, "granite", attention__scale=None).layers[0]
    assert attention_of(unscaled).logit_scale == pytest.approx(8**-0.5)
