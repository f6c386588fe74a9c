"""Tiny model folders with quantised weights: ``config.json`` and safetensors, as people download them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgepipe.spec.config import hf_config
from edgepipe.spec.layout import model_tensors
from tests.support.models.files import hf_values, safetensors_bytes
from tests.support.models.quantised_weights import RECIPES, Recipe, Tensor

SHAPE: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 304,
}
"""Hidden and intermediate sizes that every format's groups divide."""

_TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def quantised_config(recipe: Recipe | str, **changes: Any) -> dict[str, Any]:
    """Return a good ``config.json`` of a recipe with changes; None removes a key."""
    found = RECIPES[recipe] if isinstance(recipe, str) else recipe
    return hf_values(**{**SHAPE, found.key: dict(found.config), **changes})


def quantised_tensors(
    recipe: Recipe | str, values: Mapping[str, Any], *, seed: int = 0, plain: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], dict[str, npt.NDArray[np.float32]]]:
    """Return all stored tensors of a model, and the float32 values of all its weights by name.

    ``plain``: weights that stay float32 besides the norms, and the tables if the format leaves them out.
    """
    found = RECIPES[recipe] if isinstance(recipe, str) else recipe
    draw = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    weights: dict[str, npt.NDArray[np.float32]] = {}
    shape_only = replace(hf_config(values), quantisation=None)
    for name, shape in model_tensors(shape_only).items():
        if len(shape) != 2 or name in plain or (name in _TABLES and not found.tables):
            weights[name] = draw.normal(1.0 if name.endswith("norm.weight") else 0.0, 0.05, shape).astype(np.float32)
            tensors[name] = Tensor("F32", weights[name])
            continue
        made = found.make(draw, *shape)
        weights[name] = made.values
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in made.parts.items()}
    return tensors, weights


def write_quantised_folder(
    folder: Path, recipe: Recipe | str, *, seed: int = 0, plain: tuple[str, ...] = (), **changes: Any
) -> dict[str, npt.NDArray[np.float32]]:
    """Write a model folder and return its weights' values. ``changes``: keys of ``config.json``."""
    values = quantised_config(recipe, **changes)
    tensors, weights = quantised_tensors(recipe, values, seed=seed, plain=plain)
    write_folder(folder, values, tensors)
    return weights


def write_folder(folder: Path, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``config.json`` and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    header: dict[str, Any] = {}
    chunks: list[bytes] = []
    position = 0
    for name, tensor in tensors.items():
        data = np.ascontiguousarray(tensor.array).tobytes()
        offsets = [position, position + len(data)]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.array.shape), "data_offsets": offsets}
        chunks.append(data)
        position = offsets[1]
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header, b"".join(chunks)))
