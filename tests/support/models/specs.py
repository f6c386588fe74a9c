"""Parts of layers that a test knows to be there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Attention, Dense, LayerSpec, Rope


def attention_of(layer: LayerSpec) -> Attention:
    """A layer's attention."""
    assert layer.attention is not None
    return layer.attention


def first_attention(config: ModelConfig) -> Attention:
    return attention_of(config.layers[0])


def first_rope(config: ModelConfig) -> Rope:
    rope = first_attention(config).rope
    assert rope is not None
    return rope


def first_dense(config: ModelConfig) -> Dense:
    dense = config.layers[0].dense
    assert dense is not None
    return dense


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    return tuple(layer.window for layer in config.layers)


def with_attention(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The config with these fields of all layers' attention changed."""
    return replace(config, layers=tuple(layer.with_attention(**changes) for layer in config.layers))
