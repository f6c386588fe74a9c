"""Tiny models whose layers have the parts of well-known families, to count what a decode step launches per layer."""

from __future__ import annotations

from dataclasses import replace

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import DeltaNet, Experts, LayerSpec, Router
from edgepipe.testing.tiny_model import tiny_config
from tests.support.models.packed import PackedTinyModel

HIDDEN = 256  # a block of a K type

_PLAIN = tiny_config(num_layers=1, hidden_size=HIDDEN, intermediate_size=HIDDEN, head_dim=64)
_LLAMA = _PLAIN.layers[0]
_EXPERTS = Experts(count=16, used=8, inner=HIDDEN, router=Router())
DELTA = DeltaNet(key_heads=8, value_heads=16, key_dim=16, value_dim=32, taps=4)

LAYERS: dict[str, LayerSpec] = {
    "Llama": _LLAMA,
    "Qwen3-30B-A3B": replace(_LLAMA.with_attention(qk_norm="head"), dense=None, experts=_EXPERTS),
    "Qwen3.6-35B-A3B": LayerSpec(recurrent=DELTA, experts=replace(_EXPERTS, shared_inner=HIDDEN, shared_gated=True)),
}
"""Layers by model; of Qwen3.6 one with gated DeltaNet, as three of four are."""

_FLOATS = {f"{name}.weight": "F32" for name in ("router", "shared_expert_gate", "conv1d")}
FILES: dict[str, dict[str, str]] = {
    "Q4_K": _FLOATS | {"": "Q4_K"},
    "Q4_K_M": _FLOATS | {"v_proj.weight": "Q6_K", "down_proj.weight": "Q6_K", "in_proj_qkv.weight": "Q6_K", "": "Q4_K"},
}
"""Types of weights: all of one type, or as in the layers of a Q4_K_M file that have the most bits."""


def counted_model(layer: str, num_layers: int, *, file: str = "Q4_K") -> PackedTinyModel:
    """Return a model of equal layers."""
    config: ModelConfig = replace(_PLAIN, layers=(LAYERS[layer],) * num_layers)
    return PackedTinyModel(config, FILES[file])
