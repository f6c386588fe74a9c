"""Packed folders of models with latent attention: block-FP8 as DeepSeek publishes it, and MLX's names and stacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgepipe.errors import ModelInvalid
from edgepipe.spec.config import hf_config
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.layout import is_expert, is_of_heads, is_router, model_tensors, shares
from edgepipe.spec.packed import Packed
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.settling import settled_latent
from edgepipe.weights.weights import open_weights
from tests.support.models.family_files import tiny_values
from tests.support.models.quantised_folders import write_folder
from tests.support.models.quantised_weights import Recipe, Tensor, fp8_block, mlx
from tests.support.models.specs import attention_of

SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "v_head_dim": 16}
MTP = {"eh_proj.weight": (64, 128), "enorm.weight": (64,), "self_attn.kv_b_proj.weight": (192, 32)}
Floats = dict[str, np.ndarray]


def make(config: ModelConfig, recipe: Recipe) -> tuple[dict[str, Tensor], Floats]:
    """Stored tensors, and the values of all weights by edgepipe's names."""
    draw, tensors, values = np.random.default_rng(0), {}, dict[str, np.ndarray]()
    for weight in model_tensors(config):
        parts: list[np.ndarray] = []
        for share in shares(config, weight):
            (name,) = share.parts
            if len(share.shape) == 2 and not is_router(weight) and ("layers" in name or recipe.tables):
                made = recipe.make(draw, *share.shape)
                parts.append(made.values)
                count = stacked(config, weight) if share.shape[0] == model_tensors(config)[weight][0] else 0
                for suffix, each in made.parts.items():
                    array = each.array.reshape(count, -1, each.array.shape[-1]) if count else each.array
                    tensors[f"{share.module}.{suffix}"] = Tensor(each.dtype, array)
            else:
                parts.append(draw.normal(0.0, 0.1, share.shape).astype(np.float32))
                tensors[name] = Tensor("F32", parts[-1])
        values[weight] = np.concatenate(parts)
    return tensors, values


def stacked(config: ModelConfig, weight: str) -> int:
    """The matrices of one stored tensor, of a weight that MLX stacks."""
    if "stacked" not in config.naming:
        return 0
    if is_expert(weight):
        return 4
    return 4 if is_of_heads(weight) else 0


def loaded(path: Path) -> tuple[ModelConfig, Floats]:
    source = open_weights(path)
    whole = Slice(index=0, layers=LayerRange(0, 2), embedding=True, head=True)
    found: Floats = {}
    for info in source.weights(whole):
        weight = source.load(info.name)
        found[info.name] = weight.float32() if isinstance(weight, Packed) else as_float32(weight).reshape(info.shape)
    return source.config, found


def assert_equal(found: Floats, expected: Floats) -> None:
    assert list(found) == list(expected)
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=1e-6, atol=1e-7, err_msg=name)


def test_block_fp8_of_deepseek_v3_is_packed_and_mtp_is_skipped(tmp_path: Path) -> None:
    recipe = fp8_block(block=(16, 16))
    values: dict[str, Any] = tiny_values("deepseek_v3") | SIZES
    tensors, expected = make(hf_config(values), recipe)
    for name, shape in MTP.items():
        tensors[f"model.layers.2.{name}"] = Tensor("F32", np.zeros(shape, np.float32))
    write_folder(tmp_path, values | {"quantization_config": recipe.config}, tensors)
    assert "model.layers.1.self_attn.kv_b_proj.weight_scale_inv" in tensors
    assert "model.layers.1.mlp.experts.3.down_proj.weight_scale_inv" in tensors
    config, found = loaded(tmp_path)
    assert_equal(found, expected)
    assert attention_of(config.layers[0]).latent == attention_of(hf_config(values).layers[0]).latent


def test_mlx_s_stacks_of_heads_and_experts_are_read(tmp_path: Path) -> None:
    recipe = mlx(4, 32)
    values: dict[str, Any] = tiny_values("deepseek_v3") | SIZES
    plain = replace(hf_config(values), naming="glm4_moe, stacked")
    split = settled_latent(plain, ["model.layers.0.self_attn.embed_q.weight"])
    tensors, expected = make(split, recipe)
    assert tensors["model.layers.0.self_attn.embed_q.scales"].array.shape == (4, 32, 1)
    assert tensors["model.layers.1.mlp.switch_mlp.up_proj.weight"].array.ndim == 3
    write_folder(tmp_path, values | {"quantization": recipe.config}, tensors)
    config, found = loaded(tmp_path)
    assert_equal(found, expected)
    assert config.layers == split.layers


def test_a_folder_without_kv_b_is_refused(tmp_path: Path) -> None:
    values: dict[str, Any] = tiny_values("deepseek_v3") | SIZES
    tensors, _ = make(hf_config(values), fp8_block(block=(16, 16)))
    floats = {
        name: Tensor("F32", tensor.array.astype(np.float32))
        for name, tensor in tensors.items()
        if "scale_inv" not in name and "kv_b" not in name
    }
    write_folder(tmp_path, values, floats)
    with pytest.raises(ModelInvalid) as caught:
        open_weights(tmp_path)
    assert "kv_b_proj" in caught.value.fact
