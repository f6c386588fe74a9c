"""The layer that predicts one token more: its tensors, what it adds to a model, and files that lack a part."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgepipe.daemon.files.model_parts import part_tensors
from edgepipe.errors import ConfigInvalid, ModelInvalid
from edgepipe.planner.copies import ModelParts
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.config import hf_config
from edgepipe.spec.config_json import changed_values, config_from_json, config_to_json
from edgepipe.spec.drafting import drafting
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.layout import is_norm, slice_tensors
from edgepipe.spec.memory_classes import kv_bytes
from edgepipe.store.store import tensor_names
from edgepipe.weights.mixes import mix_table, named_model
from edgepipe.weights.resident import resident_sizes
from edgepipe.weights.weights import Weights, open_weights
from tests.support.models.family_files import write_family_folder, write_family_gguf
from tests.support.models.mtp_files import VALUES, mtp_in_gguf, mtp_shapes, random_model, write_mtp_folder
from tests.support.models.recurrent_files import write_recurrent_folder, write_recurrent_gguf
from tests.support.numerics.spec_reference import float_weights

QWEN = [family for family in VALUES if family.startswith("qwen3") and "tied" not in family]


def last(config: ModelConfig, *, mtp: bool, embedding: bool = False) -> Slice:
    """The last layer, the head, and maybe the layer behind."""
    count = config.num_layers
    return Slice(index=1, layers=LayerRange(count - 1, count + mtp), embedding=embedding, head=True)


def with_mtp(weights: Weights) -> Weights:
    return weights.holding([last(weights.config, mtp=True)])


@pytest.mark.parametrize("family", VALUES)
def test_a_slice_reads_the_layer_only_if_it_ends_behind_the_others(family: str, tmp_path: Path) -> None:
    config = open_weights(write_mtp_folder(tmp_path, family)).config
    own, count = set(mtp_shapes(family)), config.num_layers
    assert not config.has_mtp
    without = tensor_names(config, (last(config, mtp=False),))
    found = tensor_names(config, (last(config, mtp=True),))
    assert not own & set(without)
    embedding = {name for name in found if "embed_tokens" in name}
    assert set(found) - set(without) - embedding == own
    assert embedding, "the layer reads embeddings"
    assert config.with_mtp().num_layers == count + 1
    assert config.with_mtp().layers[:-1] == config.layers
    assert config.holding([last(config, mtp=False)]) is config


@pytest.mark.parametrize("family", VALUES)
def test_configs_are_restored_from_json_with_and_without_the_layer(family: str) -> None:
    config = hf_config(VALUES[family])
    assert config.mtp is not None
    for each in (config, config.with_mtp(), replace(config, mtp=None)):
        assert config_from_json(config_to_json(each)) == each
    assert "mtp" not in changed_values(replace(config, mtp=None)), "digests of cards without the layer stay"
    twice = config_to_json(config.with_mtp()) | {"mtp": config_to_json(config)["mtp"]}
    moved = config_to_json(config.with_mtp())
    moved["layers"] = [moved["layers"][-1], *moved["layers"][:-1]]
    for bad in (twice, moved, config_to_json(config) | {"mtp": {}}):
        with pytest.raises(ModelInvalid):
            config_from_json(bad)


@pytest.mark.parametrize("family", QWEN)
def test_a_file_of_llama_cpp_s_converter_holds_the_layer_of_the_folder(family: str, tmp_path: Path) -> None:
    tensors = random_model(family)
    folder = with_mtp(open_weights(write_mtp_folder(tmp_path, family)))
    path = write_recurrent_gguf(tmp_path / "m.gguf", family, mtp=mtp_in_gguf(family, tensors))
    file = with_mtp(open_weights(path))
    assert file.config.layers[-1] == folder.config.layers[-1]
    check_layer(folder, file)


def test_glm_s_file_holds_the_layer_of_the_folder(tmp_path: Path) -> None:
    folder = with_mtp(open_weights(write_family_folder(tmp_path, "glm4_moe")))
    file = with_mtp(open_weights(write_family_gguf(tmp_path / "m.gguf", "glm4_moe")))
    check_layer(folder, file)


def check_layer(folder: Weights, file: Weights) -> None:
    prefix = f"model.layers.{folder.config.num_layers - 1}."
    expected, found = float_weights(folder), float_weights(file)
    assert list(found) == list(expected)
    names = [name for name in expected if name.startswith(prefix)]
    assert f"{prefix}eh_proj.weight" in names
    for name in names:
        added = 1 if is_norm(name) and folder.config.norm.plus_one else 0
        np.testing.assert_array_equal(found[name], expected[name] + np.float32(added), err_msg=name)


@pytest.mark.parametrize("family", VALUES)
@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_a_model_with_a_damaged_layer_is_read_without_it(
    family: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = random_model(family)
    name = next(name for name in mtp_shapes(family) if name.endswith("o_proj.weight"))
    damaged = {**tensors, name: tensors[name][:-1]} if damage == "shape" else dict(tensors)
    if damage == "missing":
        del damaged[name]
    with caplog.at_level(logging.WARNING):
        weights = open_weights(write_mtp_folder(tmp_path, family, damaged))
    assert weights.config.mtp is None
    assert [name in record.getMessage() for record in caplog.records] == [True]
    assert float_weights(weights).keys() == float_weights(open_weights(write_mtp_folder(tmp_path / "w", family))).keys()
    with pytest.raises(ConfigInvalid, match="cannot draft"):
        drafting(weights.config, "m")


@pytest.mark.parametrize("family", ["qwen3next", "qwen35"])
def test_a_model_without_the_layer_is_read_quietly(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        weights = open_weights(write_recurrent_folder(tmp_path, family))
    assert weights.config.mtp is None
    assert not caplog.records


@pytest.mark.parametrize("name", ["qwen3.6-27b:q4_k_m", "glm-4.5-air:q4_k_m", "deepseek-v3:q8_0", "qwen3.6-35b-a3b"])
def test_plans_of_known_models_count_the_layer(name: str) -> None:
    plain, weights = named_model(name)
    config = drafting(plain, name)
    for kind in ("torch-cuda", "mlx", "emulated"):
        without = resident_sizes(plain, weights, kind=kind, dtype="bfloat16")
        found = resident_sizes(config, weights, kind=kind, dtype="bfloat16")
        assert found.layers[:-1] == without.layers
        more = found.of_slice(last(plain, mtp=True)) - without.of_slice(last(plain, mtp=False))
        assert more == found.layers[-1] + (0 if plain.tied_embeddings else found.embedding)
        whole = found.of_slice(last(plain, mtp=True, embedding=True))
        assert whole - without.of_slice(last(plain, mtp=False, embedding=True)) == found.layers[-1]
        attending = max(size for size, spec in zip(without.layers, plain.layers, strict=True) if spec.attention)
        assert attending < found.layers[-1] < 1.5 * attending, "it is packed as the others are"
    assert kv_bytes(config, 4096, form="bfloat16")[-1] > 0
    assert named_shape("llama-3.1-8b").mtp is None


def test_tables_of_forms_have_the_layer_whether_it_is_used_or_not() -> None:
    config = named_shape("qwen3.6-27b")
    table = mix_table(config, "q4_k_m")
    assert table.layer(config.num_layers).keys() > {"eh_proj.weight", "self_attn.q_proj.weight"}


@pytest.mark.parametrize("family", ["qwen35", "qwen35, tied", "glm4_moe"])
def test_copies_of_the_head_include_the_layer(family: str, tmp_path: Path) -> None:
    config = open_weights(write_mtp_folder(tmp_path, family)).config
    parts = part_tensors(config)
    assert len(parts) == config.num_layers + 2
    assert set(mtp_shapes(family)) <= set(parts[-1])
    sizes = ModelParts(sizes=(1,) * len(parts), tied=config.tied_embeddings)
    needed = {name for part in sizes.of([last(config, mtp=True)]) for name in parts[part]}
    assert needed == set(slice_tensors(config.with_mtp(), last(config, mtp=True)))
