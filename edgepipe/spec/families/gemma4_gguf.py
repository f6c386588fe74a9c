"""Gemma 4 in GGUF files: keys for layers that slide end in ``_swa``, numbers that differ are lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

from edgepipe.files.fields import Fields
from edgepipe.spec.families.gemma4_layers import Gemma4Layers, attention, router
from edgepipe.spec.families.reading import FamilySpec, GgufShape, is_list, sliding, unsupported
from edgepipe.spec.layer_spec import Dense
from edgepipe.spec.shape_limits import MAX_LAYERS, read_head_dim, read_kv_heads

GGUF_PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "mlp.dense_output_norm",
    "pre_ffw_norm_2": "mlp.expert_input_norm",
    "post_ffw_norm_2": "mlp.expert_output_norm",
}
"""Names within a layer."""

INSTEAD_OF_SMALL = ("Gemma 4 31B and 26B-A4B", "of E4B's size Gemma 3 4B")
"""What to name where E2B or E4B is refused."""


def from_gguf(shape: GgufShape) -> FamilySpec:
    """Read the metadata. Raises ModelInvalid, ArchitectureUnsupported."""
    _refuse_small(shape)
    slides = [*shape.sliding_layers(full_every=6)[:-1], False]
    size, norm = shape.head_dim(), shape.norm()
    key = f"{shape.arch}.attention.key_length_swa"
    local_size = read_head_dim(shape.fields, key, shape.hidden, shape.num_heads, size)
    local = attention(shape.num_heads, _kv_heads(shape, slides, True), local_size, shape.sliding_rope(10_000.0))
    whole = attention(shape.num_heads, _kv_heads(shape, slides, False), size, shape.proportional_rope(size))
    last = f"blk.{shape.num_layers - 1}"
    mixture = None
    if "blk.0.ffn_gate_inp.weight" in shape.tensors:
        mixture = shape.mixture(shape.inner("expert_feed_forward_length"), router(norm.eps))
    parts = Gemma4Layers(
        local=local,
        whole=replace(whole, values_from_keys=f"{last}.attn_v.weight" not in shape.tensors),
        dense=Dense(inner=shape.inner(), activation="gelu_tanh"),
        experts=None if mixture is None else replace(mixture, activation="gelu_tanh"),
    )
    return FamilySpec(
        layers=parts.layers(slides, sliding(slides, shape.window(), shape.context)),
        norm=norm,
        tied_embeddings=shape.tied,
        embedding_scale=sqrt(shape.hidden),
        logit_softcap=shape.number("final_logit_softcapping", low=0.0, high=1e6, default=0.0),
    )


def _kv_heads(shape: GgufShape, slides: Sequence[bool], slide: bool) -> int:
    """Return the number of key-value heads of layers that slide, or of the others. Raises ModelInvalid."""
    name = f"{shape.arch}.attention.head_count_kv"
    if not is_list(shape.fields.raw(name)):
        return shape.kv_heads()
    counts = shape.fields.items(name)
    if len(counts) != len(slides):
        raise shape.fields.fail(name, f"{len(slides)} numbers are needed, it has {len(counts)}")
    own = [count for count, each in zip(counts, slides, strict=True) if each == slide]
    if any(count != own[0] for count in own):
        raise unsupported(f"{name} that differs between alike layers", ["one number for layers that slide or not"])
    if not own:
        return shape.num_heads
    return read_kv_heads(Fields({name: own[0]}, what=shape.fields.what), name, shape.num_heads, None)


def _refuse_small(shape: GgufShape) -> None:
    """Refuse what only E2B and E4B have. Raises ArchitectureUnsupported."""
    for key in ("embedding_length_per_layer_input", "attention.shared_kv_layers"):
        if shape.integer(key, low=0, high=max(MAX_LAYERS, 1 << 17), default=0):
            raise unsupported(f"{shape.arch}.{key} (Gemma 4 E2B, E4B)", INSTEAD_OF_SMALL)
