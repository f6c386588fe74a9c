"""Llama, Qwen2 and Qwen3: dense decoders whose layers differ at most in their windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from edgepipe.spec.families.reading import Family, FamilySpec, GgufShape, HfShape, sliding, windowed
from edgepipe.spec.layer_spec import Dense, LayerSpec


def _no_windows(shape: HfShape) -> tuple[int | None, ...]:
    return (None,) * shape.num_layers


def _all_windows(shape: HfShape) -> tuple[int | None, ...]:
    return shape.windows([True] * shape.num_layers)


def qwen_windows(shape: HfShape) -> tuple[int | None, ...]:
    """Return the window of each layer by the rules of Qwen's configuration classes. Raises ModelInvalid."""
    if shape.fields.items("layer_types"):
        slides = shape.sliding_layers(full_every=1)
    else:
        first = shape.fields.integer("max_window_layers", low=0, high=1 << 20, default=28)
        slides = [layer >= first for layer in range(shape.num_layers)]
    return shape.windows(slides, default=4096) if shape.flag("use_sliding_window") else _no_windows(shape)


def dense_reader(
    windows: Callable[[HfShape], tuple[int | None, ...]] = _all_windows,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: Literal["", "head"] = "",
    eps: float = 1e-6,
) -> Callable[[HfShape], FamilySpec]:
    """Return the reader of a family.

    ``qkv_bias``: always present; ``attention_bias``, ``mlp_bias``: if the config has the key, and it is true.
    """

    def read(shape: HfShape) -> FamilySpec:
        shape.check_activation()
        size = shape.head_dim(head_dim)
        bias = attention_bias and shape.flag("attention_bias")
        attention = replace(
            shape.attention(size, shape.rope(size), kv_heads=kv_heads),
            qkv_bias=qkv_bias or bias,
            output_bias=bias,
            qk_norm=qk_norm,
        )
        dense = Dense(inner=shape.inner(), bias=mlp_bias and shape.flag("mlp_bias"))
        layers = windowed(LayerSpec(attention=attention, dense=dense), windows(shape))
        return FamilySpec(layers=layers, norm=shape.norm(eps), tied_embeddings=shape.tied())

    return read


def dense_gguf(shape: GgufShape) -> FamilySpec:
    """Read GGUF metadata. Raises ModelInvalid, ArchitectureUnsupported."""
    size = shape.head_dim()
    attention = replace(
        shape.attention(size, shape.rope(size)),
        qkv_bias=shape.biased("attn_q"),
        output_bias=shape.biased("attn_output"),
        qk_norm="head" if shape.arch == "qwen3" else "",
        temperature=shape.temperature(),
    )
    dense = Dense(inner=shape.inner(), bias=shape.biased("ffn_up"))
    windows = sliding([shape.arch == "llama"] * shape.num_layers, shape.window(), shape.context)
    layers = windowed(LayerSpec(attention=attention, dense=dense), windows)
    return FamilySpec(layers=layers, norm=shape.norm(), tied_embeddings=shape.tied)


LLAMA = Family(
    name="llama",
    hf_class="LlamaForCausalLM",
    models="Llama 2, 3.x, SmolLM2 and kin",
    from_hf=dense_reader(_no_windows, attention_bias=True, mlp_bias=True),
    default_context=2048,
    gguf="llama",
    from_gguf=dense_gguf,
    gguf_permuted=True,
)
QWEN2 = Family(
    name="qwen2",
    hf_class="Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5",
    from_hf=dense_reader(qwen_windows, kv_heads=32, qkv_bias=True),
    default_context=32_768,
    gguf="qwen2",
    from_gguf=dense_gguf,
)
QWEN3 = Family(
    name="qwen3",
    hf_class="Qwen3ForCausalLM",
    models="Qwen3",
    from_hf=dense_reader(qwen_windows, kv_heads=32, head_dim=128, attention_bias=True, qk_norm="head"),
    default_context=32_768,
    gguf="qwen3",
    from_gguf=dense_gguf,
)
