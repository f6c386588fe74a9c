"""What only a model's stored tensors tell of its config: parts of latent attention, the head, whole norms."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import LayerSpec
from edgepipe.spec.layout import K_B, mtp_fault, stores_mtp
from edgepipe.spec.naming import NAMINGS, PLAIN
from edgepipe.spec.tensors import TensorInfo

logger = logging.getLogger(__name__)

_FIRST_LAYER = "model.layers.0."


def settled(config: ModelConfig, infos: Mapping[str, TensorInfo]) -> ModelConfig:
    """Return the config as a Hugging Face folder's tensors settle it."""
    return settled_head(settled_latent(_settled_norm(config, infos), infos), infos)


def settled_latent(config: ModelConfig, stored: Iterable[str]) -> ModelConfig:
    """Return the config whose layers have kv_b as the files do: one weight, or one each for keys and values."""
    module = NAMINGS[config.naming].stored(f"{_FIRST_LAYER}{K_B}").removesuffix("weight")
    latent = any(spec.attention is not None and spec.attention.latent is not None for spec in config.layers)
    if not latent or not any(name.startswith(module) for name in stored):
        return config

    def split(spec: LayerSpec) -> LayerSpec:
        if spec.attention is None or spec.attention.latent is None:
            return spec
        return replace(spec, attention=replace(spec.attention, latent=replace(spec.attention.latent, joined=False)))

    mtp = None if config.mtp is None else split(config.mtp)
    return replace(config, layers=tuple(map(split, config.layers)), mtp=mtp)


def settled_mtp(config: ModelConfig, infos: Mapping[str, TensorInfo]) -> ModelConfig:
    """Return the config without ``mtp`` if the files do not hold that layer whole. Logs what is wrong with it."""
    fault = mtp_fault(config, infos)
    if fault and stores_mtp(config, infos):
        logger.warning(
            "the layer that predicts one token more cannot be used (%s). The model is read without it", fault
        )
    return replace(config, mtp=None) if fault else config


def settled_head(config: ModelConfig, stored: Collection[str]) -> ModelConfig:
    """Return a config whose head is that of the files, if they hold one.

    The class of a text model among several declares its head tied where the config says nothing, as transformers does.
    """
    head = NAMINGS[config.naming].head
    if not config.tied_embeddings or head == PLAIN.head or not any(name.startswith(f"{head}.") for name in stored):
        return config
    return replace(config, tied_embeddings=False)


def _settled_norm(config: ModelConfig, infos: Mapping[str, TensorInfo]) -> ModelConfig:
    """Return a config whose norms are those of the files: MLX's add the one where layers are recurrent.

    In such files the last dimension of a convolution is 1.
    """
    convolutions = (info.shape for name, info in infos.items() if name.endswith(".linear_attn.conv1d.weight"))
    if not config.norm.plus_one or not any(len(shape) == 3 and shape[2] == 1 for shape in convolutions):
        return config
    return replace(config, norm=replace(config.norm, plus_one=False))
