"""Tiny models of every family whose files hold a layer that predicts one token more: folders, and GGUF files.

The names of that layer's tensors are written here by hand, as the published files have them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from edgepipe.spec.config import hf_config
from edgepipe.spec.layout import stored_shapes
from tests.support.models import family_files, recurrent_files

Array = npt.NDArray[np.float32]

_LATENT: dict[str, Any] = {
    **family_files.tiny_values("deepseek_v3"),
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "mlp_layer_types": ["dense", "sparse"],
    "rope_scaling": None,
}
VALUES: Mapping[str, dict[str, Any]] = {
    "qwen3next": recurrent_files.tiny_values("qwen3next"),
    "qwen35": recurrent_files.tiny_values("qwen35"),
    "qwen35moe": recurrent_files.tiny_values("qwen35moe"),
    "qwen35, tied": {**recurrent_files.tiny_values("qwen35"), "tie_word_embeddings": True},
    "glm4_moe": family_files.tiny_values("glm4_moe"),
    "glm4_moe_lite": {**_LATENT, "num_nextn_predict_layers": 1},
    "deepseek_v3": {**family_files.tiny_values("deepseek_v3"), "num_nextn_predict_layers": 1},
}
"""The ``config.json`` by family."""

_HIDDEN = 32
_QWEN_OWN: Mapping[str, tuple[int, ...]] = {
    "mtp.fc.weight": (_HIDDEN, 2 * _HIDDEN),
    "mtp.pre_fc_norm_embedding.weight": (_HIDDEN,),
    "mtp.pre_fc_norm_hidden.weight": (_HIDDEN,),
    "mtp.norm.weight": (_HIDDEN,),
}
_OTHERS_OWN: Mapping[str, tuple[int, ...]] = {
    "eh_proj.weight": (_HIDDEN, 2 * _HIDDEN),
    "enorm.weight": (_HIDDEN,),
    "hnorm.weight": (_HIDDEN,),
    "shared_head.norm.weight": (_HIDDEN,),
}
_NEXTN = {"mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm"}
_NEXTN |= {"mtp.norm": "shared_head_norm"}
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")


def mtp_shapes(family: str) -> dict[str, tuple[int, ...]]:
    """The stored tensors of the layer. Those of its block are named and shaped as in the layer of the same kind."""
    values = VALUES[family]
    own, count = stored_shapes(hf_config(values)), values["num_hidden_layers"]
    alike = f"model.layers.{count - 1}."  # full attention, with experts where the family has them
    block = {name.removeprefix(alike): shape for name, shape in own.items() if name.startswith(alike)}
    if family.startswith("qwen3"):
        return {**_QWEN_OWN, **{f"mtp.layers.0.{name}": shape for name, shape in block.items()}}
    return {f"model.layers.{count}.{name}": shape for name, shape in {**_OTHERS_OWN, **block}.items()}


def random_model(family: str) -> dict[str, Array]:
    """Random weights: every part matters, norms are near their neutral value, states remember tokens."""
    random, values = np.random.default_rng(7), VALUES[family]
    config = hf_config(values)
    shapes = stored_shapes(config) | mtp_shapes(family)

    def values_of(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        if name.endswith("A_log"):
            return random.uniform(-4.0, -1.0, shape)
        if len(shape) > 1:
            return random.normal(0.0, 1.2 / shape[-1] ** 0.5, shape)
        neutral = "norm" in name and not (config.norm.plus_one and "linear_attn" not in name)
        return random.normal(float(neutral), 0.2, shape)

    found = {name: values_of(name, shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: each[:, None, :] if "conv1d.weight" in name else each for name, each in found.items()}


def write_mtp_folder(folder: Path, family: str, tensors: Mapping[str, Array] | None = None) -> Path:
    """The folder of a tiny model; ``tensors``: others than the random ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(VALUES[family]), encoding="utf-8")
    save_file(dict(tensors or random_model(family)), folder / "model.safetensors")
    return folder


def mtp_in_gguf(family: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Qwen's tensors of the layer as llama.cpp's converter writes them into a file of 4 layers: norms plus one."""
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == family)
    table = gguf.get_tensor_name_map(arch, 5)
    found: dict[str, Array] = {}
    stacks: dict[str, dict[int, Array]] = {}
    for name, tensor in tensors.items():
        if not name.startswith("mtp."):
            continue
        module = name.removesuffix(".weight")
        own = tensor + 1 if "norm" in name else tensor
        if module in _NEXTN:
            found[f"blk.4.nextn.{_NEXTN[module]}.weight"] = own
        elif match := _EXPERT.fullmatch(name):
            part = match[3].removesuffix("_proj")
            stacks.setdefault(f"blk.4.ffn_{part}_exps.weight", {})[int(match[2])] = own
        else:
            plain = table.get_name(module.replace("mtp.layers.0", "model.layers.4"))
            assert plain is not None, name
            found[f"{plain}.weight"] = own
    return found | {name: np.stack([parts[index] for index in range(len(parts))]) for name, parts in stacks.items()}


def predictable_model(family: str) -> dict[str, Array]:
    """A model of Qwen's whose own layer knows the next token: its layers add nothing, so the last token decides."""
    tensors = random_model(family)
    random = np.random.default_rng(9)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensor)
        elif name in ("model.norm.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"):
            tensors[name] = np.zeros_like(tensor)  # one is added
    table = random.normal(0.0, 1.0, tensors["model.embed_tokens.weight"].shape).astype(np.float32)
    tensors["model.embed_tokens.weight"] = table
    tensors["lm_head.weight"] = np.roll(table, 7, axis=0)  # token n is followed by n + 7
    tensors["mtp.fc.weight"] = np.eye(_HIDDEN, 2 * _HIDDEN, dtype=np.float32)
    return tensors
