"""Folders of recurrent families as mlx-lm converts them: its own ``sanitize`` gives names, orders and norms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.core as mx
from mlx_lm.models import granitemoehybrid, lfm2, lfm2_moe, nemotron_h, qwen3_5, qwen3_5_moe, qwen3_next

from edgepipe.spec.facts import LayerRange, Slice
from edgepipe.spec.layout import is_norm, is_plain_norm
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import WeightSource
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.weights import open_weights
from tests.support.models.quantised_folders import write_folder
from tests.support.models.quantised_weights import Tensor
from tests.support.models.recurrent_files import TINY, random_stored, tiny_values, write_recurrent_folder


def sanitized(family: str, weights: dict[str, Any]) -> Mapping[str, Any]:
    """The weights as mlx-lm keeps them. Its functions need only numbers of the model."""
    values = tiny_values(family)
    args = SimpleNamespace(**{"num_hidden_layers": 4, **values}, use_moe=bool(values.get("num_local_experts")))
    model: Any = SimpleNamespace(args=args)
    text: Any = SimpleNamespace(args=args, sanitize=lambda own: qwen3_5.TextModel.sanitize(model, own))
    several: Any = SimpleNamespace(language_model=text)
    match family.partition(" ")[0]:
        case "qwen3next":
            return qwen3_next.Model.sanitize(model, weights)
        case "qwen35":
            return qwen3_5.Model.sanitize(several, weights)
        case "qwen35moe":
            return qwen3_5_moe.Model.sanitize(several, joined_experts(weights))
        case "nemotron_h" | "nemotron_h_moe":
            return nemotron_h.Model.sanitize(model, weights)
        case "granitehybrid":
            return granitemoehybrid.Model.sanitize(model, weights)
        case "lfm2":
            return lfm2.Model.sanitize(model, weights)
        case _:
            return lfm2_moe.Model.sanitize(model, weights)


def joined_experts(weights: Mapping[str, Any]) -> dict[str, Any]:
    """All experts' gates and ups in one tensor, as Qwen3.5's own files have them."""
    found = {name: weight for name, weight in weights.items() if ".experts." not in name}
    for before in {name.partition(".experts.")[0] for name in weights if ".experts." in name}:
        gates, ups, downs = (
            mx.stack([weights[f"{before}.experts.{expert}.{part}_proj.weight"] for expert in range(4)])
            for part in ("gate", "up", "down")
        )
        found |= {f"{before}.experts.gate_up_proj": mx.concatenate([gates, ups], axis=1)}
        found |= {f"{before}.experts.down_proj": downs}
    return found


def weights_of(source: WeightSource) -> Mapping[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    whole = Slice(index=0, layers=LayerRange(0, source.config.num_layers), embedding=True, head=True)
    for info in source.weights(whole):
        weight = source.load(info.name)
        assert not isinstance(weight, Packed)
        found[info.name] = as_float32(weight).reshape(info.shape)
    return found


@pytest.mark.parametrize("family", TINY)
def test_a_folder_of_mlx_holds_the_model_of_the_original(family: str, tmp_path: Path) -> None:
    stored = {name: mx.array(weight) for name, weight in random_stored(family).items()}
    written = {name: Tensor("F32", np.array(weight)) for name, weight in sanitized(family, stored).items()}
    write_folder(tmp_path / "mlx", tiny_values(family), written)
    mlx, original = open_weights(tmp_path / "mlx"), open_weights(write_recurrent_folder(tmp_path, family))
    assert not mlx.config.norm.plus_one
    shifted = original.config.norm.plus_one
    expected, found = weights_of(original), weights_of(mlx)
    assert set(found) == set(expected)
    for name, weight in expected.items():
        added = np.float32(shifted and is_norm(name) and not is_plain_norm(name))
        assert np.array_equal(found[name], weight + added), name
