"""Mixtures of experts: the weights of a folder and of a GGUF file, and files that contradict themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgepipe.errors import ModelInvalid
from edgepipe.spec.config import hf_config
from edgepipe.spec.config_json import config_from_json, config_to_json
from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import StoredTensor
from edgepipe.weights.weights import open_weights
from tests.support.models.experts import (
    QWEN3_MOE,
    expert_config,
    stored_tensors,
    whole_weights,
    write_expert_folder,
    write_expert_gguf,
)

WHOLE = Slice(index=0, layers=LayerRange(0, 2), embedding=True, head=True)
GATE = "model.layers.1.mlp.experts.gate_proj.weight"


def test_a_folder_and_a_gguf_file_hold_the_same_weights(tmp_path: Path) -> None:
    folder = open_weights(write_expert_folder(tmp_path / "folder"))
    weights = whole_weights(expert_config(), stored_tensors(expert_config()))
    file = open_weights(write_expert_gguf(tmp_path / "m.gguf", weights))
    assert replace(folder.config, naming="") == file.config
    assert [info.name for info in folder.weights(WHOLE)] == [info.name for info in file.weights(WHOLE)]
    for info in folder.weights(WHOLE):
        found = [source.load(info.name) for source in (folder, file)]
        ours, theirs = (raw for raw in found if isinstance(raw, StoredTensor))
        assert np.array_equal(ours.data, theirs.data), info.name
        assert ours.info.shape == theirs.info.shape == info.shape == weights[info.name].shape


def test_all_experts_of_a_quantised_file_are_one_packed_weight(tmp_path: Path) -> None:
    weights = whole_weights(expert_config(), stored_tensors(expert_config()))
    file = open_weights(write_expert_gguf(tmp_path / "m.gguf", weights, scheme="Q8_0"))
    found = file.load(GATE)
    assert isinstance(found, Packed)
    assert found.shape == (4 * 32, 64)
    third = found.rows(slice(64, 96)).float32()
    np.testing.assert_allclose(third, weights[GATE][64:96], atol=2e-3)


def test_a_slice_needs_every_expert_s_tensors(tmp_path: Path) -> None:
    source = open_weights(write_expert_folder(tmp_path))
    part = Slice(index=1, layers=LayerRange(1, 2), embedding=False, head=True)
    names = [info.name for info in source.tensors(part)]
    assert sum("experts" in name for name in names) == 3 * 4
    assert all(".1." in name or "norm" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"num_experts_per_tok": 5}, "each token uses 5 of 4"),
        ({"num_experts": 0}, "num_experts"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(changes: dict[str, Any], fact: str) -> None:
    with pytest.raises(ModelInvalid) as caught:
        hf_config(QWEN3_MOE | changes)
    assert fact in f"{caught.value} {caught.value.fact}"


def test_a_count_of_experts_unlike_the_tensors_is_refused(tmp_path: Path) -> None:
    folder = write_expert_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if ".experts.3." not in name}, folder / "model.safetensors"
    )
    with pytest.raises(ModelInvalid, match=r"missing: model\.layers\.0\.mlp\.experts\.3"):
        open_weights(folder)


def test_a_card_restores_the_layers() -> None:
    config = expert_config(mlp_only_layers=[1])
    values = config_to_json(config)
    assert [values["kinds"][place].get("experts") is None for place in values["layers"]] == [False, True]
    assert config_from_json(values) == config


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["kinds"][0]["experts"].update(used=9),
        lambda values: values["kinds"][0]["experts"].update(router={"score": "best"}),
        lambda values: values["kinds"][0]["attention"].update(head_dim=7),
        lambda values: [values["kinds"][0].pop(part) for part in ("attention", "experts")],
        lambda values: values.update(layers=[0, 1]),
        lambda values: values.update(layers=[]),
        lambda values: values.update(naming="../x"),
        lambda values: values["norm"].update(kind="none"),
    ],
)
def test_a_card_with_impossible_layers_is_refused(change: Any) -> None:
    values = config_to_json(expert_config())
    change(values)
    with pytest.raises(ModelInvalid):
        config_from_json(values)
