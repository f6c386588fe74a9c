"""Mixtures of experts on MLX: routers beside torch's, products of every form, and Qwen3 beside transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")
pytest.importorskip("torch", reason="transformers computes with torch, which is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import mlx.core as mx
import torch
from edgepipe_mlx import experts as mlx_experts
from edgepipe_mlx.experts import PackedStack, WideStack
from edgepipe_mlx.matrices import Linear, WideMatrix
from edgepipe_mlx.packing import lay_out, mlx_form
from edgepipe_torch.layers import routing as torch_routing
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.layer_spec import Experts, Router
from edgepipe.spec.layout import is_expert, model_tensors, shares
from edgepipe.spec.packed import Packed
from edgepipe.spec.tensors import WeightSource
from edgepipe.weights.dequantise import as_float32
from edgepipe.weights.weights import open_weights
from tests.support.backends.mlx_models import Chain, Float32s, cpu_options, row
from tests.support.models.experts import (
    QWEN3_MOE,
    expert_config,
    stored_tensors,
    whole_weights,
    write_expert_folder,
    write_expert_gguf,
)
from tests.support.models.packed import PackedTinyModel, exact_float32, random_packed
from tests.support.models.quantised_folders import write_folder
from tests.support.models.quantised_weights import RECIPES, Tensor

TOKENS = np.random.default_rng(1).integers(0, 96, 40).tolist()
COUNT, ROWS, INPUTS = 5, 48, 256  # experts, and the shape of each matrix
KINDS = ("wide", "wide, inputs first", "Q4_K", "Q8_0", "Q6_K", "MXFP4")


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with mx.stream(mx.Device(mx.cpu)):
        yield


@st.composite
def routers(draw: st.DrawFn) -> Experts:
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    size = draw(st.integers(2, 6))
    groups_used = draw(st.integers(1, groups))
    router = Router(
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalised=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        bias=draw(st.booleans()),
        correction=draw(st.booleans()),
        groups=groups,
        groups_used=groups_used,
        group_score=draw(st.sampled_from(["max", "top2"])),
    )
    return Experts(count=groups * size, used=draw(st.integers(1, groups_used * size)), inner=8, router=router)


@settings(max_examples=50)
@given(spec=routers(), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_rows_choose_the_experts_that_torch_chooses(spec: Experts, seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    weight, x = (rng.normal(0, 1, (rows, 16)).astype(np.float32) for rows in (spec.count, 7))
    bias, correction = (
        rng.normal(0, 0.3, spec.count).astype(np.float32) if used else None
        for used in (spec.router.bias, spec.router.correction)
    )
    mlx_weights = mlx_experts.RouterWeights(Linear(WideMatrix(mx.array(weight)), _mlx(bias)), _mlx(correction))
    torch_weights = torch_routing.RouterWeights(torch.from_numpy(weight), _torch(bias), _torch(correction))
    chosen, factors = mlx_experts.route(spec, mlx_weights, mx.array(x).astype(getattr(mx, dtype)))
    wanted, shares_of = torch_routing.route(spec, torch_weights, torch.from_numpy(x).to(getattr(torch, dtype)))
    found, expected = np.zeros((2, 7, spec.count))
    np.put_along_axis(found, np.array(chosen).astype(np.int64), np.array(factors), axis=1)
    np.put_along_axis(expected, wanted.numpy(), shares_of.numpy(), axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert factors.dtype == mx.float32


def _mlx(values: Float32s | None) -> mx.array | None:
    return None if values is None else mx.array(values)


def _torch(values: Float32s | None) -> torch.Tensor | None:
    return None if values is None else torch.from_numpy(values)


def stack(kind: str, dtype: mx.Dtype) -> tuple[WideStack | PackedStack, Float32s]:
    """A stack, and its values [E, O, I]."""
    if kind in ("wide", "wide, inputs first"):
        values = np.random.default_rng(0).normal(0, 0.02, (COUNT, ROWS, INPUTS)).astype(np.float32)
        weight = mx.array(values).astype(dtype)
        if kind != "wide":
            weight = mx.contiguous(weight.swapaxes(-1, -2)).swapaxes(-1, -2)
        return WideStack(weight, in_float32=True), values
    packed = random_packed(kind, (COUNT * ROWS, INPUTS), np.random.default_rng(0))
    form = mlx_form(packed.form, INPUTS)
    assert form is not None
    planes = lay_out(packed, form, narrow=dtype == mx.bfloat16)
    values = packed.float32().reshape(COUNT, ROWS, INPUTS)
    return PackedStack(planes, count=COUNT, dtype=dtype, in_float32=True), values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_each_row_is_multiplied_by_its_expert(kind: str, dtype: mx.Dtype) -> None:
    made, values = stack(kind, dtype)
    rng = np.random.default_rng(1)
    x, chosen = rng.normal(0, 1, (6, INPUTS)).astype(np.float32), rng.integers(0, COUNT, (6, 3))
    rows = mx.array(x).astype(dtype)
    expected = np.einsum("ti,tkoi->tko", np.array(rows.astype(mx.float32)), values[chosen])
    experts = mx.array(chosen.astype(np.uint32))
    found = made.multiply_by(rows[:, None, None], experts, is_sorted=False)
    assert (found.dtype, found.shape) == (dtype, (6, 3, 1, ROWS))
    bound = (0.01 if kind == "Q6_K" else 1e-5) if dtype == mx.float32 else 0.02
    found_rows = np.array(found.astype(mx.float32))[:, :, 0]
    np.testing.assert_allclose(found_rows, expected, rtol=0, atol=bound * float(np.abs(expected).max()))
    order = np.argsort(chosen.reshape(-1), kind="stable")
    turned = made.multiply_by(rows[mx.array(order // 3)][:, None], experts.flatten()[mx.array(order)], is_sorted=True)
    np.testing.assert_array_equal(np.array(turned.astype(mx.float32))[:, 0], found_rows.reshape(-1, ROWS)[order])


def reference(folder: Path, config: ModelConfig, weights: Mapping[str, npt.NDArray[np.float32]]) -> Float32s:
    """transformers' logits [T, V] in float32 of a checkpoint with these weights, by edgepipe's names."""
    tensors = {
        name: own
        for weight, values in weights.items()
        for name, own in zip(_stored_names(config, weight), np.split(values, len(shares(config, weight))), strict=True)
    }
    write_expert_folder(folder)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    sizes = {"hidden_size": config.hidden_size, "moe_intermediate_size": _experts(config).inner}
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, **sizes)
    with torch.inference_mode():
        return model.eval()(torch.tensor([TOKENS])).logits[0].numpy()


def _stored_names(config: ModelConfig, weight: str) -> list[str]:
    return [name for share in shares(replace(config, quantisation=None), weight) for name in share.parts]


def _experts(config: ModelConfig) -> Experts:
    experts = config.layers[0].experts
    assert experts is not None
    return experts


def logits(source: WeightSource, **options: Any) -> Float32s:
    """Logits of all tokens: a prompt whose rows are sorted by expert, then single tokens, over two slices."""
    chain = Chain(source, ranges=[(0, 1), (1, 2)], options=cpu_options(**options))
    steps = [(0, 35), *((at, 1) for at in range(35, 40))]
    parts = [chain.run(TOKENS[at : at + count], [row(at, count, (7, 1), (4, 2))]) for at, count in steps]
    return np.concatenate(parts)


def assert_equal(found: Float32s, expected: Float32s) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
    np.testing.assert_array_equal(found.argmax(axis=1), expected.argmax(axis=1))


@pytest.mark.parametrize("changes", [{}, {"norm_topk_prob": False}, {"mlp_only_layers": [1]}], ids=str)
def test_floats_give_transformers_logits(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_expert_folder(tmp_path, **changes)
    tensors = {
        name: tensor + np.random.default_rng(7).normal(0, 0.3, tensor.shape).astype(np.float32) * (tensor.ndim == 2)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([TOKENS])).logits[0].numpy()
    assert_equal(logits(open_weights(folder)), expected)


def test_a_gguf_file_of_q8_0_gives_transformers_logits(tmp_path: Path) -> None:
    weights = whole_weights(expert_config(), stored_tensors(expert_config()))
    source = open_weights(write_expert_gguf(tmp_path / "m.gguf", weights, scheme="Q8_0"))
    loaded = {name: source.load(name) for name in model_tensors(source.config)}
    values = {name: raw.float32() if isinstance(raw, Packed) else as_float32(raw) for name, raw in loaded.items()}
    router = "model.layers.1.mlp.router.weight"
    np.testing.assert_array_equal(values[router], weights[router])  # other floats of GGUF are rounded to bf16
    assert_equal(logits(source), reference(tmp_path / "reference", expert_config(), values))


def test_experts_of_q4_k_give_transformers_logits(tmp_path: Path) -> None:
    config = expert_config(hidden_size=256, moe_intermediate_size=256)
    schemes = {"experts.gate_proj.weight": "Q4_K", "experts.up_proj.weight": "Q4_K", "_proj.weight": "Q8_0"}
    source = PackedTinyModel(config, schemes)
    values = {name: exact_float32(source.load(name)) for name in model_tensors(config)}
    assert_equal(logits(source), reference(tmp_path, config, values))


@pytest.mark.parametrize("stacked", [False, True], ids=["one tensor per expert", "as MLX writes them"])
def test_a_folder_of_4_bit_experts_gives_transformers_logits(tmp_path: Path, *, stacked: bool) -> None:
    """MLX's format; the router is packed, too."""
    recipe, draw = RECIPES["mlx4"], np.random.default_rng(0)
    plain = expert_config(moe_intermediate_size=64)
    tensors: dict[str, Tensor] = {}
    values: dict[str, npt.NDArray[np.float32]] = {}
    for weight, shape in model_tensors(plain).items():
        if len(shape) != 2:
            values[weight] = draw.normal(1.0, 0.05, shape).astype(np.float32)
            tensors[weight] = Tensor("F32", values[weight])
            continue
        made = {share.module: recipe.make(draw, *share.shape) for share in shares(plain, weight)}
        values[weight] = np.concatenate([each.values for each in made.values()])
        parts = {f"{module}.{suffix}": part for module, each in made.items() for suffix, part in each.parts.items()}
        tensors |= _stack(parts) if stacked and is_expert(weight) else parts
    changes = {"moe_intermediate_size": 64, recipe.key: dict(recipe.config)}
    write_folder(tmp_path / "packed", QWEN3_MOE | changes, tensors)
    source = open_weights(tmp_path / "packed")
    whole = Slice(index=0, layers=LayerRange(0, 2), embedding=True, head=True)
    assert all(info.form is not None for info in source.weights(whole) if is_expert(info.name))
    assert_equal(logits(source), reference(tmp_path / "reference", plain, values))


def _stack(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The experts' tensors in one for each matrix and suffix."""
    names = list(dict.fromkeys(re.sub(r"experts\.\d+", "switch_mlp", name) for name in parts))
    found: dict[str, Tensor] = {}
    for stacked in names:
        own = [part for name, part in parts.items() if re.sub(r"experts\.\d+", "switch_mlp", name) == stacked]
        found[stacked] = replace(own[0], array=np.stack([each.array for each in own]))
    return found


def test_bf16_stays_near_float32(tmp_path: Path) -> None:
    source = open_weights(write_expert_folder(tmp_path))
    assert np.corrcoef(logits(source).ravel(), logits(source, dtype="bfloat16").ravel())[0, 1] > 0.99
