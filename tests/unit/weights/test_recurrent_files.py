"""Folders and GGUF files of the families with recurrent layers hold the same model, whatever their names and orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.errors import ArchitectureUnsupported, ModelInvalid
from edgepipe.spec.config import gguf_config, hf_config
from edgepipe.spec.config_json import config_from_json, config_to_json
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.layer_spec import DeltaNet
from edgepipe.spec.layout import check_layout, is_norm, is_plain_norm, stored_shapes
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import WeightSource
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.gguf_file import JoinedGguf, gguf_names, open_gguf
from edgepipe.weights.stored_weight import stored_weights
from edgepipe.weights.weights import open_weights
from tests.support.models.quantised_folders import write_folder
from tests.support.models.quantised_weights import RECIPES, Tensor
from tests.support.models.recurrent_files import (
    TINY,
    random_stored,
    tiled,
    tiny_values,
    write_recurrent_folder,
    write_recurrent_gguf,
)

Weights = Mapping[str, np.ndarray]
GATED = "model.layers.0.linear_attn."


def whole(config: ModelConfig) -> Slice:
    return Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)


def weights_of(source: WeightSource) -> Weights:
    found = {}
    for info in source.weights(whole(source.config)):
        weight = source.load(info.name)
        values = weight.float32() if isinstance(weight, Packed) else as_float32(weight)
        found[info.name] = values.reshape(info.shape)
    return found


def grouped(spec: DeltaNet, name: str, weight: np.ndarray) -> np.ndarray:
    """Undo the order of value heads: ``tiled`` is its own inverse with both counts' quotient."""
    heads = spec.value_heads // spec.key_heads, spec.value_heads
    keys = 2 * spec.key_heads * spec.key_dim
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate([weight[:keys], tiled(weight[keys:], heads)])
    if name.endswith("out_proj.weight"):
        return tiled(weight, heads, axis=1)
    return weight if "norm" in name else tiled(weight, heads)


def without_file_facts(config: ModelConfig, like: ModelConfig) -> ModelConfig:
    """The config without what a GGUF file says otherwise: its family's name, names, norms, the order of heads."""
    layers = tuple(
        replace(spec, recurrent=replace(spec.recurrent, tiled=False)) if isinstance(spec.recurrent, DeltaNet) else spec
        for spec in config.layers
    )
    return replace(config, architecture=like.architecture, naming=like.naming, norm=like.norm, layers=layers)


@pytest.mark.parametrize("family", TINY)
def test_a_folder_and_the_converter_s_file_hold_the_same_model(family: str, tmp_path: Path) -> None:
    folder = open_weights(write_recurrent_folder(tmp_path, family))
    file = open_weights(write_recurrent_gguf(tmp_path / "m.gguf", family))
    wanted, found = folder.config, file.config
    assert without_file_facts(found, wanted) == wanted
    assert found.norm == replace(wanted.norm, plus_one=False)
    assert config_from_json(config_to_json(wanted)) == wanted
    assert config_from_json(config_to_json(found)) == found
    expected, read = weights_of(folder), weights_of(file)
    assert set(read) == set(expected)
    for name, weight in expected.items():
        spec = found.layers[int(name.split(".")[2])].recurrent if ".linear_attn." in name else None
        own = grouped(spec, name, read[name]) if isinstance(spec, DeltaNet) and spec.tiled else read[name]
        added = 1 if is_norm(name) and not is_plain_norm(name) and wanted.norm.plus_one else 0
        if name.endswith("A_log"):
            np.testing.assert_allclose(own, weight, atol=1e-6)
        else:
            assert np.array_equal(own, weight + np.float32(added)), name


def test_value_heads_of_qwen35_keep_the_file_s_order_and_say_so(tmp_path: Path) -> None:
    file = open_weights(write_recurrent_gguf(tmp_path / "m.gguf", "qwen35"))
    folder = open_weights(write_recurrent_folder(tmp_path, "qwen35"))
    spec = file.config.layers[0].recurrent
    assert isinstance(spec, DeltaNet)
    assert spec.tiled
    gates, own = weights_of(folder)[f"{GATED}in_proj_z.weight"], weights_of(file)[f"{GATED}in_proj_z.weight"]
    heads, size = spec.value_heads // spec.key_heads, spec.value_dim
    for key in range(spec.key_heads):  # of the file, value head v uses key head v % key_heads
        for value in range(heads):
            place = value * spec.key_heads + key
            expected = gates[(key * heads + value) * size :][:size]
            assert np.array_equal(own[place * size :][:size], expected)


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("qwen3next", "early"),
        *((family, "joined") for family in ("qwen35moe", "qwen3next", "granitehybrid with experts", "lfm2moe")),
    ],
)
def test_tensors_of_other_converters_hold_the_same_weights(family: str, variant: str, tmp_path: Path) -> None:
    usual = open_weights(write_recurrent_gguf(tmp_path / "usual.gguf", family))
    path = write_recurrent_gguf(tmp_path / "other.gguf", family, early=variant == "early", joined=variant == "joined")
    other = open_weights(path)
    assert other.config.naming != usual.config.naming
    expected, found = weights_of(usual), weights_of(other)
    assert all(np.array_equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize(
    ("family", "packed"),
    [
        ("qwen3next", ("ssm_in.weight", "ssm_ba.weight", "ssm_out.weight")),
        ("qwen35", ("attn_qkv.weight", "attn_gate.weight", "ssm_out.weight")),
        ("nemotron_h", ("ssm_in.weight", "ssm_out.weight")),
        ("lfm2", ("shortconv.in_proj.weight",)),
    ],
)
def test_packed_rows_are_moved_as_they_are(family: str, packed: tuple[str, ...], tmp_path: Path) -> None:
    early = family == "qwen3next"
    floats = open_weights(write_recurrent_gguf(tmp_path / "f.gguf", family, early=early))
    file = open_weights(write_recurrent_gguf(tmp_path / "q.gguf", family, early=early, packed=packed))
    kinds: set[str] = set()
    for name, weight in weights_of(floats).items():
        found = file.load(name)
        kinds |= {name.rpartition("proj")[0]} if isinstance(found, Packed) else set()
        values = found.float32() if isinstance(found, Packed) else as_float32(found).reshape(weight.shape)
        np.testing.assert_allclose(values, weight, atol=0.005)
    assert kinds
    sizes = [info.num_bytes for info in file.weights(whole(file.config))]
    assert sum(sizes) == sum(info.num_bytes for info in file.tensors(whole(file.config)))


def by_key_head(values: np.ndarray, delta: DeltaNet, parts: tuple[int, ...]) -> list[np.ndarray]:
    """Split a projection that has each key head's rows side by side, as transformers does with its output."""
    ends = np.cumsum(parts)[:-1]
    heads = values.reshape(delta.key_heads, sum(parts), -1)
    return [part.reshape(-1, values.shape[1]) for part in np.split(heads, ends, axis=1)]


def test_qwen3_next_s_rows_are_split_by_key_head(tmp_path: Path) -> None:
    source = open_weights(write_recurrent_folder(tmp_path, "qwen3next"))
    stored, delta = random_stored("qwen3next"), source.config.layers[0].recurrent
    assert isinstance(delta, DeltaNet)
    heads = delta.value_heads // delta.key_heads
    inner = heads * delta.value_dim
    q, k, v, z = by_key_head(stored[f"{GATED}in_proj_qkvz.weight"], delta, (delta.key_dim, delta.key_dim, inner, inner))
    b, a = by_key_head(stored[f"{GATED}in_proj_ba.weight"], delta, (heads, heads))
    found = weights_of(source)
    for name, rows in {"qkv": np.concatenate([q, k, v]), "z": z, "b": b, "a": a}.items():
        assert np.array_equal(found[f"{GATED}in_proj_{name}.weight"], rows), name


LARGE: dict[str, Any] = {  # sizes that the groups of all formats divide
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "linear_key_head_dim": 64,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
FLOATS_IN_ALL_FORMATS = ("conv1d", "in_proj_a", "in_proj_b", "in_proj_ba", "mlp.gate", "shared_expert_gate")


def write_quantised(folder: Path, values: dict[str, Any], recipe: str, *, naming: str = "") -> dict[str, np.ndarray]:
    """Write a folder of random weights in a format, and return the values of its tensors by their stored names."""
    own, draw = RECIPES[recipe], np.random.default_rng(0)
    values = values | {own.key: dict(own.config)}
    plain = replace(hf_config(values), quantisation=None)
    shapes = stored_shapes(replace(plain, naming=naming or plain.naming))
    tensors: dict[str, Tensor] = {}
    stored: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        module, table = name.removesuffix(".weight"), name.endswith(("embed_tokens.weight", "lm_head.weight"))
        if len(shape) == 2 and not module.endswith(FLOATS_IN_ALL_FORMATS) and (own.tables or not table):
            made = own.make(draw, *shape)
            stored[name] = made.values
            tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in made.parts.items()}
        else:
            stored[name] = draw.normal(0, 1, shape).astype(np.float32)
            tensors[name] = Tensor("F32", stored[name])
    write_folder(folder, values, tensors)
    return stored


@pytest.mark.parametrize("recipe", ["mlx4", "awq", "gptq-act-order", "fp8-static"])
def test_qwen3_next_s_rows_are_split_by_key_head_in_every_format(recipe: str, tmp_path: Path) -> None:
    stored = write_quantised(tmp_path, tiny_values("qwen3next") | LARGE, recipe)
    source = open_weights(tmp_path)
    delta = source.config.layers[0].recurrent
    assert isinstance(delta, DeltaNet)
    heads = delta.value_heads // delta.key_heads
    inner = heads * delta.value_dim
    q, k, v, z = by_key_head(stored[f"{GATED}in_proj_qkvz.weight"], delta, (delta.key_dim, delta.key_dim, inner, inner))
    b, a = by_key_head(stored[f"{GATED}in_proj_ba.weight"], delta, (heads, heads))
    expected = {"qkv": np.concatenate([q, k, v]), "z": z, "b": b, "a": a}
    for name, rows in expected.items():
        found = source.load(f"{GATED}in_proj_{name}.weight")
        assert isinstance(found, Packed) == (name in ("qkv", "z"))
        read = found.float32() if isinstance(found, Packed) else as_float32(found).reshape(rows.shape)
        assert np.array_equal(read, rows), name


@pytest.mark.parametrize(
    ("recipe", "naming"),
    [
        ("mlx4", "qwen3_5 of several, stacked"),
        ("awq", ""),
        ("gptq", ""),
        ("fp8-block", ""),
    ],
)
def test_quantised_qwen3_5_with_pictures_is_read_in_every_format(recipe: str, naming: str, tmp_path: Path) -> None:
    text = tiny_values("qwen35moe") | LARGE
    del text["architectures"]
    values = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    stored = write_quantised(tmp_path, values, recipe, naming=naming)
    source = open_weights(tmp_path)
    prefix = "language_model.model." if naming else "model.language_model."
    rows = source.load("model.layers.0.linear_attn.in_proj_qkv.weight")
    assert isinstance(rows, Packed)
    assert np.array_equal(rows.float32(), stored[f"{prefix}layers.0.linear_attn.in_proj_qkv.weight"])
    downs = source.load("model.layers.1.mlp.experts.down_proj.weight")
    assert isinstance(downs, Packed)
    each = [f"{prefix}layers.1.mlp.experts.{expert}.down_proj.weight" for expert in range(4)]
    names = [f"{prefix}layers.1.mlp.switch_mlp.down_proj.weight"] if naming else each
    assert np.array_equal(downs.float32(), np.concatenate([stored[name] for name in names]))
    floats = {
        info.name.rpartition("linear_attn.")[2]
        for info in source.weights(whole(source.config))
        if info.form is None and "linear_attn" in info.name
    }
    small = {"in_proj_a.weight", "in_proj_b.weight", "conv1d.weight"}
    assert floats == small | {"dt_bias", "A_log", "norm.weight"}


@pytest.mark.parametrize("family", ["qwen35", "qwen3next"])
def test_weights_of_a_file_that_become_floats_have_the_same_values(tmp_path: Path, family: str) -> None:
    """Decays, whose stored values are not the weight's, and rows in another order, too."""
    source = open_weights(write_recurrent_gguf(tmp_path / "m.gguf", family))
    for weight in stored_weights(source, whole(source.config)):
        floats = weight.without_form().floats
        np.testing.assert_array_equal(floats, as_float32(source.load(weight.info.name)), err_msg=weight.info.name)


def test_decays_that_are_not_below_zero_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.models.recurrent_files.np.exp", np.zeros_like)
    source = open_weights(write_recurrent_gguf(tmp_path / "m.gguf", "qwen35"))
    with pytest.raises(ModelInvalid, match="A_log"):
        source.load(f"{GATED}A_log")


def test_a_sibling_of_pictures_and_the_predicted_tokens_are_skipped(tmp_path: Path) -> None:
    values = tiny_values("qwen35moe")
    hf_class = values.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: Tensor("F32", tensor)
        for name, tensor in random_stored("qwen35moe").items()
    }
    vector = np.ones(4, np.float32)
    more = {"model.visual.blocks.0.norm1.weight": Tensor("F32", vector), "mtp.fc.weight": Tensor("F32", vector)}
    write_folder(tmp_path / "several", {"architectures": [hf_class], "text_config": values}, tensors | more)
    expected = weights_of(open_weights(write_recurrent_folder(tmp_path, "qwen35moe")))
    found = weights_of(open_weights(tmp_path / "several"))
    assert list(found) == list(expected)
    assert all(np.array_equal(found[name], weight) for name, weight in expected.items())


def test_experts_of_a_matrix_in_one_tensor_are_read(tmp_path: Path) -> None:
    """Qwen3.5's own files hold gates and ups of all experts in one tensor, copies of them one for each expert."""
    tensors: dict[str, Tensor] = {}
    experts: dict[str, dict[str, list[np.ndarray]]] = {}
    for name, tensor in random_stored("qwen35moe").items():
        if ".experts." not in name:
            tensors[name] = Tensor("F32", tensor)
            continue
        before, _, after = name.partition(".experts.")
        experts.setdefault(before, {}).setdefault(after.split(".")[1], []).append(tensor)
    for before, parts in experts.items():
        gates, ups, downs = (np.stack(parts[f"{part}_proj"]) for part in ("gate", "up", "down"))
        tensors[f"{before}.experts.gate_up_proj"] = Tensor("F32", np.concatenate([gates, ups], axis=1))
        tensors[f"{before}.experts.down_proj"] = Tensor("F32", downs)
    write_folder(tmp_path / "joined", tiny_values("qwen35moe"), tensors)
    joined = open_weights(tmp_path / "joined")
    assert joined.config.naming == "qwen3_5, joined"
    expected, found = weights_of(open_weights(write_recurrent_folder(tmp_path, "qwen35moe"))), weights_of(joined)
    assert all(np.array_equal(found[name], weight) for name, weight in expected.items())


def changed(tmp_path: Path, family: str, **changes: object) -> ModelConfig:
    """A file's config with changed metadata; a key's dots are underscores twice."""
    joined, _ = open_gguf(write_recurrent_gguf(tmp_path / "m.gguf", family))
    arch = joined.metadata["general.architecture"]
    own = {f"{arch}.{key.replace('__', '.')}": value for key, value in changes.items()}
    config = gguf_config({**joined.metadata, **own}, joined.shapes)
    check_layout(config, joined.infos)
    return config


@pytest.mark.parametrize(
    ("family", "changes", "word"),
    [
        ("qwen35", {"ssm__time_step_rank": 5}, "ssm.inner_size"),
        ("qwen35", {"ssm__group_count": 4}, "ssm.time_step_rank"),
        ("qwen35", {"ssm__state_size": 16}, "in_proj_qkv"),
        ("qwen35", {"ssm__conv_kernel": 3}, "conv1d"),
        ("qwen35", {"ssm__conv_kernel": None}, "ssm.conv_kernel"),
        ("nemotron_h", {"ssm__group_count": 3}, "ssm.group_count"),
        ("nemotron_h_moe", {"moe_latent_size": 64}, "latent_in"),
        ("nemotron_h_moe with narrow experts", {"moe_latent_size": 24}, "latent_in"),
        ("nemotron_h_moe with narrow experts", {"moe_latent_size": None}, "experts.up_proj"),
        ("nemotron_h", {"attention__head_count_kv": [0, 0, 2, 4]}, "head_count_kv"),
        ("nemotron_h", {"block_count": 5}, "block_count"),
        ("granitehybrid", {"logit_scale": None}, "logit_scale"),
        ("lfm2", {"shortconv__l_cache": 4}, "conv.conv"),
    ],
)
def test_sizes_of_states_that_do_not_match_are_refused_by_name(
    family: str, changes: dict[str, object], word: str, tmp_path: Path
) -> None:
    with pytest.raises((ModelInvalid, ArchitectureUnsupported)) as caught:
        changed(tmp_path, family, **changes)
    assert word in f"{caught.value.what} {caught.value.fact}"


def test_counts_of_every_layer_may_be_a_list_with_zeros(tmp_path: Path) -> None:
    """llama.cpp writes 0 key-value heads for layers without attention."""
    single = changed(tmp_path, "qwen35moe")
    assert changed(tmp_path, "qwen35moe", attention__head_count_kv=[0, 0, 0, 2]) == single


VALUES = (None, "text", 0, -1, 3, 7, 1 << 70, 0.5, True, inf, [], [1], ["a"], np.array([2, 2]), np.array([0, 2]))


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JoinedGguf]:
    folder = tmp_path_factory.mktemp("recurrent")
    return {family: open_gguf(write_recurrent_gguf(folder / f"{family}.gguf", family))[0] for family in TINY}


@settings(max_examples=200, deadline=None)
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
