"""Folders of quantised weights are opened, described, hashed, adopted and loaded; contradictions are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.daemon.files.model_parts import model_parts, part_tensors
from edgepipe.errors import ModelInvalid
from edgepipe.spec.config import hf_config
from edgepipe.spec.config_json import config_from_json, config_to_json
from edgepipe.spec.facts import LayerRange, ModelConfig, make_slices
from edgepipe.spec.layout import check_layout, slice_tensors
from edgepipe.spec.packed import Packed
from edgepipe.spec.quantisation import Quantisation, WeightFormat
from edgepipe.spec.tensors import TensorInfo, WeightSource
from edgepipe.store.install import install
from edgepipe.text.template import ChatTemplate
from edgepipe.weights.card import ModelCard, read_card
from edgepipe.weights.dequantise import as_bf16_bits, as_float32
from edgepipe.weights.manifest import CARD_FILE, MANIFEST_FILE, Manifest
from edgepipe.weights.tensor_folder import TENSOR_FOLDER, ShardWriter
from edgepipe.weights.weights import open_weights
from tests.support.models.files import hf_values
from tests.support.models.quantised_folders import (
    quantised_config,
    quantised_tensors,
    write_folder,
    write_quantised_folder,
)
from tests.support.models.quantised_weights import RECIPES, Tensor, mlx

SLICES = make_slices([LayerRange(0, 1), LayerRange(1, 2)], 2)
UP = "model.layers.0.mlp.up_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"


def values_of(source: WeightSource, name: str) -> np.ndarray:
    loaded = source.load(name)
    return loaded.float32() if isinstance(loaded, Packed) else as_float32(loaded)


def settled(config: ModelConfig) -> Quantisation:
    assert config.quantisation is not None
    return config.quantisation


def installed(folder: Path) -> Manifest:
    return install(folder, model_id="tiny", source="here", on_progress=lambda progress: None)


@pytest.mark.parametrize("name", RECIPES)
def test_every_weight_of_a_folder_has_its_values(name: str, tmp_path: Path) -> None:
    expected = write_quantised_folder(tmp_path, name)
    source = open_weights(tmp_path)
    weights = [info for part in SLICES for info in source.weights(part)]
    assert {info.name for info in weights} == set(expected)
    for info in weights:
        assert info.shape == expected[info.name].shape
        assert (info.form is not None) == (info.name not in plain_names(source.config))
        assert np.array_equal(values_of(source, info.name), expected[info.name])
    stored = [tensor for part in SLICES for tensor in source.tensors(part)]
    assert sum(info.num_bytes for info in weights) == sum(tensor.num_bytes for tensor in stored)


def plain_names(config: ModelConfig) -> set[str]:
    names = {name for part in SLICES for name in slice_tensors(replace(config, quantisation=None), part)}
    return {name for name in names if "norm" in name or settled(config).of(name.removesuffix(".weight")) is None}


@pytest.mark.parametrize("name", ["mlx4", "awq", "gptq-act-order", "fp8-static", "nf4", "w4a16-asym", "int8"])
def test_a_node_adopts_and_fetches_the_stored_tensors_of_its_layers(name: str, tmp_path: Path) -> None:
    expected = write_quantised_folder(tmp_path / "source", name)
    manifest = installed(tmp_path / "source")
    read = Manifest.from_json(manifest.to_json())
    assert read == manifest
    source = open_weights(tmp_path / "source")

    copy = tmp_path / "copy"
    (copy / TENSOR_FOLDER).mkdir(parents=True)
    (copy / CARD_FILE).write_bytes((tmp_path / "source" / CARD_FILE).read_bytes())
    (copy / MANIFEST_FILE).write_bytes(manifest.to_json())
    card = read_card(copy)
    assert card.config == source.config
    check_layout(card.config, {entry.info.name: entry.info for entry in read.tensors})

    writer = ShardWriter(copy, read)
    wanted = slice_tensors(card.config, SLICES[1])
    for tensor in writer.missing(wanted):
        with writer.open(tensor.name) as sink:
            sink.write(source.read(tensor.name).data.tobytes())
            assert sink.finish()
    fetched = open_weights(copy)
    for info in fetched.weights(SLICES[1]):
        assert np.array_equal(values_of(fetched, info.name), expected[info.name])
    with pytest.raises(ModelInvalid):
        fetched.load(f"{UP}.weight")


def test_parts_count_the_bytes_of_stored_tensors(tmp_path: Path) -> None:
    write_quantised_folder(tmp_path, "awq")
    manifest = installed(tmp_path)
    config = read_card(tmp_path).config
    names = part_tensors(config)
    assert f"{UP}.qzeros" in names[1]
    assert sum(model_parts(config, manifest).sizes) == sum(entry.info.num_bytes for entry in manifest.tensors)


def test_mixed_formats_are_found_by_module(tmp_path: Path) -> None:
    """As mlx-lm's mixed recipes: another format for some modules, and a module that stays floats."""
    override = {UP: {"group_size": 32, "bits": 6}}
    plain = "model.layers.1.self_attn.k_proj.weight"
    values = quantised_config("mlx4", quantization={"group_size": 64, "bits": 4, **override})
    tensors, expected = quantised_tensors("mlx4", values, plain=(plain,))
    six = mlx(6, 32).make(np.random.default_rng(1), 256, 128)
    tensors |= {f"{UP}.{suffix}": tensor for suffix, tensor in six.parts.items()}
    write_folder(tmp_path, values, tensors)
    source = open_weights(tmp_path)
    assert np.array_equal(values_of(source, f"{UP}.weight"), six.values)
    assert np.array_equal(values_of(source, plain), expected[plain])
    found = dict(settled(source.config).others)
    assert set(found) == {"model.embed_tokens", "lm_head", UP, plain.removesuffix(".weight")}
    assert {info.scheme for info in source.weights(SLICES[0])} == {"MLX 4-bit", "MLX 6-bit", "F32"}


def test_a_tied_quantised_embedding_is_listed_once(tmp_path: Path) -> None:
    write_quantised_folder(tmp_path, "mlx4", tie_word_embeddings=True)
    source = open_weights(tmp_path)
    assert [info.name for info in source.weights(SLICES[1])][-1] == "model.embed_tokens.weight"
    assert not settled(source.config).of("lm_head")


def test_leftovers_that_mean_nothing_are_ignored(tmp_path: Path) -> None:
    values = quantised_config("gptq")
    tensors, _ = quantised_tensors("gptq", values)
    tensors[f"{UP}.bias"] = Tensor("F16", np.zeros(256, np.float16))
    tensors["model.layers.0.self_attn.k_scale"] = Tensor("F32", np.ones((), np.float32))
    write_folder(tmp_path, values, tensors)
    assert f"{UP}.bias" not in slice_tensors(open_weights(tmp_path).config, SLICES[0])


Change = Callable[[dict[str, Tensor]], None]


def _without(suffix: str) -> Change:
    return lambda tensors: tensors.__delitem__(f"{UP}.{suffix}")


def _as(suffix: str, change: Callable[[np.ndarray], np.ndarray], dtype: str = "") -> Change:
    def apply(tensors: dict[str, Tensor]) -> None:
        old = tensors[f"{UP}.{suffix}"]
        tensors[f"{UP}.{suffix}"] = Tensor(dtype or old.dtype, np.ascontiguousarray(change(old.array)))

    return apply


def _more(name: str) -> Change:
    return lambda tensors: tensors.update({name: Tensor("F32", np.zeros(4, np.float32))})


LIES: Mapping[str, tuple[str, dict[str, Any], Change | None]] = {
    "a part is missing": ("awq", {}, _without("qzeros")),
    "the index is missing": ("gptq-act-order", {}, _without("g_idx")),
    "scales are missing": ("mlx4", {}, _without("scales")),
    "a state is missing": ("nf4", {}, _without(STATE)),
    "a part is short": ("awq", {}, _as("scales", lambda array: array[:, :-8])),
    "a part is transposed": ("gptq", {}, _as("qweight", lambda array: array.T)),
    "a part has another type": ("awq", {}, _as("qweight", lambda array: array.view(np.float32), "F32")),
    "a scale is an integer": ("mlx4", {}, _as("scales", lambda array: array.astype(np.int32), "I32")),
    "a weight is e5m2": ("fp8-block", {}, _as("weight", lambda array: array, "F8_E5M2")),
    "a state is too long": ("nf4", {}, _as(STATE, lambda array: np.resize(array, 1 << 17))),
    "an unknown part": ("awq", {}, _more(f"{UP}.adapter")),
    "a bias without its key": ("mlx4", {}, _more(f"{UP}.bias")),
    "other groups": ("awq", {"quantization_config": {**RECIPES["awq"].config, "group_size": 64}}, None),
    "other bits": ("gptq", {"quantization_config": {**RECIPES["gptq"].config, "bits": 8}}, None),
    "another format": ("gptq", {"quantization_config": dict(RECIPES["awq"].config)}, None),
    "asymmetric": ("w4a16", {"quantization_config": dict(RECIPES["w4a16-asym"].config)}, None),
    "another block": ("fp8-block", {"quantization_config": dict(RECIPES["fp8-block-64"].config)}, None),
    "not said at all": ("fp8-block", {"quantization_config": None}, None),
    "groups that do not divide": ("awq", {"intermediate_size": 192}, None),
}


@pytest.mark.parametrize("case", LIES)
def test_a_config_that_the_tensors_contradict_is_refused(case: str, tmp_path: Path) -> None:
    recipe, changes, change = LIES[case]
    tensors, _ = quantised_tensors(recipe, quantised_config(recipe))
    if change:
        change(tensors)
    write_folder(tmp_path, quantised_config(recipe, **changes), tensors)
    with pytest.raises(ModelInvalid):
        open_weights(tmp_path)


def test_floats_with_a_quantisation_are_refused(tmp_path: Path) -> None:
    values = quantised_config("awq")
    tensors, _ = quantised_tensors("awq", values, plain=tuple(slice_tensors_of_floats(values)))
    write_folder(tmp_path, values, tensors)
    with pytest.raises(ModelInvalid) as caught:
        open_weights(tmp_path)
    assert "fits none" in (caught.value.fact or "")


def slice_tensors_of_floats(values: Mapping[str, Any]) -> list[str]:
    config = replace(hf_config(values), quantisation=None)
    return [name for part in SLICES for name in slice_tensors(config, part)]


@pytest.mark.parametrize("recipe", ["awq", "w4a16-asym", "fp8-block"])
def test_quantised_weights_without_a_quantization_config_are_named_as_such(tmp_path: Path, recipe: str) -> None:
    tensors, _ = quantised_tensors(recipe, quantised_config(recipe))
    write_folder(tmp_path / "model", quantised_config(recipe, **{RECIPES[recipe].key: None}), tensors)
    with pytest.raises(ModelInvalid, match="does not say how") as caught:
        install(tmp_path / "model", model_id="x", source="folder:x", on_progress=lambda _: None)
    assert "no quantization_config" in caught.value.fact


@settings(max_examples=40, deadline=None)
@given(data=st.data(), recipe=st.sampled_from(["awq", "gptq-act-order", "mlx5", "nf4", "fp8-block", "w4a16-asym"]))
def test_any_change_of_a_part_is_refused_or_changes_only_values(data: st.DataObject, recipe: str) -> None:
    """Shapes and types in the header may say anything: ``check_layout`` passes only what ``load`` can read."""
    values = quantised_config(recipe)
    tensors, _ = quantised_tensors(recipe, values)
    infos = {
        name: TensorInfo(name=name, shape=tensor.array.shape, scheme=tensor.dtype, num_bytes=tensor.array.nbytes)
        for name, tensor in tensors.items()
    }
    described = [name for name in infos if ".quant_state." in name]  # JSON of any length, checked when it is read
    name = data.draw(st.sampled_from(sorted(infos.keys() - described)))
    shape = data.draw(st.lists(st.sampled_from([1, 2, 32, 128, 256]), max_size=3).map(tuple))
    scheme = data.draw(st.sampled_from(["F32", "F16", "I32", "U8", "I64", "F8_E4M3", "Q4_K"]))
    infos[name] = replace(infos[name], shape=shape, scheme=scheme)
    config = hf_config(values)
    try:
        check_layout(config, infos)
    except ModelInvalid:
        return
    right = tensors[name].array.shape
    squeezed = tuple(dim for dim in shape if dim != 1)
    joined = (math.prod(shape[:-1]), *shape[-1:])  # of experts that are stored side by side: the same values in order
    assert right in (shape, joined) or squeezed == tuple(dim for dim in right if dim != 1)


def test_stored_codes_are_never_read_as_floats(tmp_path: Path) -> None:
    write_quantised_folder(tmp_path, "fp8-block")
    source = open_weights(tmp_path)
    codes = source.read(f"{UP}.weight")
    for convert in (as_float32, as_bf16_bits):
        with pytest.raises(ModelInvalid):
            convert(codes)


def test_config_and_card_keep_the_quantisation(tmp_path: Path) -> None:
    write_quantised_folder(tmp_path, "mlx4")
    config = open_weights(tmp_path).config
    restored = config_from_json(json.loads(json.dumps(config_to_json(config))))
    assert restored == config
    card = ModelCard(config=config, template=ChatTemplate(sources={}, special_tokens={}))
    assert ModelCard.from_json(card.to_json()).config == config
    other = replace(config, quantisation=Quantisation(default=WeightFormat(kind="mlx", group=32)))
    assert replace(card, config=other).digest != card.digest


def test_a_plain_card_is_written_as_before() -> None:
    config = hf_config(hf_values())
    assert "quantisation" not in config_to_json(config)
    assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize(
    "value",
    [
        3,
        {},
        {"default": {"kind": "unheard of"}},
        {"default": {"kind": "awq", "bits": 7}},
        {"default": {"kind": "mlx"}},
        {"default": {"kind": "mlx", "group": 64}, "others": {"lm_head": {"kind": "mlx", "group": 0}}},
        {"default": {"kind": "mlx", "group": 64}, "others": {"x" * 300: None}},
    ],
)
def test_a_hostile_card_is_refused(value: object) -> None:
    values = config_to_json(hf_config(hf_values())) | {"quantisation": value}
    with pytest.raises(ModelInvalid):
        config_from_json(values)
