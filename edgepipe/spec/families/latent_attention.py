"""Latent attention as ``config.json`` and GGUF metadata describe it, for DeepSeek and families that took it over."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log, sqrt

from edgepipe.spec.families.reading import GgufShape, HfShape, unsupported
from edgepipe.spec.layer_spec import Attention, Latent, Rope
from edgepipe.spec.rope_config import MAX_FACTOR
from edgepipe.spec.shape_limits import MAX_HEAD_DIM, MAX_WIDTH

_MAX_SIZE = MAX_HEAD_DIM // 2  # most dimensions of a latent, and of the part that rotates; together they are a head


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """Defaults of a class in transformers."""

    query_rank: int
    nope_dim: int
    value_dim: int


def hf_latent(shape: HfShape, sizes: LatentSizes) -> Attention:
    """Read ``config.json``. Raises ModelInvalid, ArchitectureUnsupported."""
    fields = shape.fields
    if (heads := shape.kv_heads(shape.num_heads)) != shape.num_heads:
        raise fields.fail("num_key_value_heads", f"it is {heads}; latent attention has {shape.num_heads} as of queries")
    plain = "q_lora_rank" in fields and fields.raw("q_lora_rank") is None

    def size(key: str, default: int, *, step: int = 1) -> int:
        found = fields.integer(key, low=step, high=_MAX_SIZE, default=default)
        if found % step:
            raise fields.fail(key, f"it is {found}; an even number is needed")
        return found

    latent = Latent(
        query_rank=0 if plain else fields.integer("q_lora_rank", low=1, high=MAX_WIDTH, default=sizes.query_rank),
        kv_rank=size("kv_lora_rank", 512, step=2),
        nope_dim=size("qk_nope_head_dim", sizes.nope_dim),
        rope_dim=size("qk_rope_head_dim", 64, step=2),
        value_dim=size("v_head_dim", sizes.value_dim),
    )
    if (declared := shape.head_dim(latent.rope_dim)) != latent.rope_dim:
        raise fields.fail("head_dim", f"it is {declared}, but qk_rope_head_dim {latent.rope_dim}")
    bias = shape.flag("attention_bias")
    attention = _attention(shape.num_heads, latent, shape.rope(latent.rope_dim))
    return replace(
        attention,
        interleaved=shape.flag("rope_interleave", default=True),
        qkv_bias=bias,
        output_bias=bias,
    )


def gguf_latent(shape: GgufShape) -> Attention:
    """Read GGUF metadata, with key and value lengths of heads, or of earlier files. Raises ModelInvalid."""

    def size(key: str, default: int | None = None) -> int:
        return shape.integer(key, high=MAX_HEAD_DIM, default=default)

    rope_dim, rank = size("rope.dimension_count"), size("attention.kv_lora_rank")
    key = size("attention.key_length_mla", size("attention.key_length"))
    if rope_dim % 2 or not rope_dim < key:
        raise shape.fields.fail(f"{shape.arch}.rope.dimension_count", f"{rope_dim} dimensions of {key} rotate")
    if rank % 2 or rank + rope_dim > MAX_HEAD_DIM:
        raise shape.fields.fail(f"{shape.arch}.attention.kv_lora_rank", f"it is {rank}")
    if shape.number("attention.temperature_scale", low=0.0, high=1e6, default=0.0):  # Mistral Large 3
        raise unsupported("latent attention with a temperature", ["latent attention without one"])
    split = "blk.0.attn_kv_b.weight" not in shape.tensors
    latent = Latent(
        query_rank=shape.integer("attention.q_lora_rank", low=0, high=MAX_WIDTH, default=0),
        kv_rank=rank,
        nope_dim=key - rope_dim,
        rope_dim=rope_dim,
        value_dim=size("attention.value_length_mla", size("attention.value_length")),
        joined=not split,
    )
    rope = shape.rope(rope_dim)
    if rope.scaling == "yarn":  # llama.cpp's converter writes a tenth, and assumes that both factors are equal
        name = f"{shape.arch}.rope.scaling.yarn_log_multiplier"
        tenth = shape.fields.number(name, low=0.0, high=MAX_FACTOR, default=0.0)
        mscale = round(10 * tenth, 6) or None
        rope = replace(rope, attention_factor=None, mscale=mscale, mscale_all_dim=mscale)
    return replace(_attention(shape.num_heads, latent, rope), interleaved=True)


def _attention(heads: int, latent: Latent, rope: Rope) -> Attention:
    """Raises ArchitectureUnsupported for scalings other than yarn."""
    if rope.scaling not in ("default", "yarn"):
        raise unsupported(f"latent attention with the rope scaling {rope.scaling}", ["yarn", "none"])
    scale = 1 / sqrt(latent.nope_dim + latent.rope_dim)
    if rope.mscale_all_dim and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * log(rope.factor) + 1) ** 2
    return Attention(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=latent.kv_rank + latent.rope_dim,
        rope=rope,
        rotary_dim=latent.rope_dim,
        scale=scale,
        latent=latent,
    )


GGUF_PARTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
"""Names within a layer."""
