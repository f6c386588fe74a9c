"""Nemotron-H and Nemotron 3 in GGUF files: a layer's tensors say what it is."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from edgepipe.spec.families.reading import FamilySpec, GgufShape, unsupported
from edgepipe.spec.families.recurrent import gguf_attention, gguf_mamba2, layers_with
from edgepipe.spec.layer_spec import Dense, Experts, LayerSpec, Norm
from edgepipe.spec.shape_limits import MAX_INTERMEDIATE

LEAST_STEP = 0.001
"""Time step of transformers' class, and of all published models; files do not tell it."""


def from_gguf(shape: GgufShape) -> FamilySpec:
    """Read the metadata and the tensors' names. Raises ModelInvalid, ArchitectureUnsupported."""
    count = shape.own_layers
    parts = {
        "ssm_in": lambda: LayerSpec(recurrent=replace(gguf_mamba2(shape), dt_limits=(LEAST_STEP, inf))),
        "ffn_up_exps": lambda: LayerSpec(experts=_gguf_experts(shape)),
        "ffn_up": lambda: LayerSpec(dense=_gguf_dense(shape)),
        "attn_q": lambda: LayerSpec(attention=gguf_attention(shape, lambda _: None)),
    }
    present = {part: layers_with(shape, part, count) for part in parts}
    specs = {part: make() for part, make in parts.items() if any(present[part])}
    kinds = [next((part for part in specs if present[part][layer]), "") for layer in range(count)]
    if "" in kinds:
        raise shape.fields.fail(
            f"{shape.arch}.block_count", f"layer {kinds.index('')} has no tensor that says its kind"
        )
    return FamilySpec(layers=tuple(specs[kind] for kind in kinds), norm=_norm(shape), tied_embeddings=shape.tied)


def _norm(shape: GgufShape) -> Norm:
    """Return the RMSNorm. Its epsilon has the other norm's key where ``config.json`` has only ``layer_norm_epsilon``.

    llama.cpp reads both keys too. Raises ModelInvalid.
    """
    keys = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
    key = next((key for key in keys if shape.fields.has(f"{shape.arch}.{key}")), keys[0])
    return Norm(eps=shape.number(key, low=0.0, high=0.1))


def _gguf_dense(shape: GgufShape) -> Dense:
    """Return the feed-forward part, whose width is a matrix's: the metadata has a list. Raises ModelInvalid."""
    rows = {dims[0] for name, dims in shape.tensors.items() if name.endswith(".ffn_up.weight")}
    if len(rows) != 1:
        raise unsupported(
            f"{shape.arch}.feed_forward_length that differs between layers", ["one number for all layers"]
        )
    biased = any(name.endswith(".ffn_up.bias") for name in shape.tensors)
    return Dense(inner=rows.pop(), bias=biased, gated=False, activation="relu2")


def _gguf_experts(shape: GgufShape) -> Experts:
    router = shape.router("sigmoid", correction=True, group_score="top2")
    shared = shape.integer("expert_shared_feed_forward_length", high=MAX_INTERMEDIATE)
    found = shape.mixture(shape.inner("expert_feed_forward_length"), router, shared_inner=shared)
    latent = shape.integer("moe_latent_size", low=0, high=MAX_INTERMEDIATE, default=0)
    return replace(found, gated=False, activation="relu2", latent=latent)
