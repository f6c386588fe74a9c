"""Shapes of well-known models, sufficient to plan and simulate them without weights."""

from __future__ import annotations

from edgepipe.errors import ModelUnknown
from edgepipe.model.facts import ModelConfig, Rope


def named_shape(name: str) -> ModelConfig:
    """Return the shape of a model by a name such as ``qwen2.5-32b``. Raises ModelUnknown."""
    shapes = model_shapes()
    key = name.strip().lower().removesuffix("-instruct")
    if key not in shapes:
        raise ModelUnknown(f"cannot plan for '{name}'", fact=f"known models: {', '.join(shapes)}")
    return shapes[key]


def model_shapes() -> dict[str, ModelConfig]:
    """Return all shapes by name."""
    return _llama() | _qwen2() | _qwen3() | _small()


def _llama() -> dict[str, ModelConfig]:
    return {
        "llama-3.3-70b": _shape("llama", 80, 8192, 28672, heads=(64, 8, 128), vocab=128256, context=131072),
        "llama-3.1-8b": _shape("llama", 32, 4096, 14336, heads=(32, 8, 128), vocab=128256, context=131072),
        "llama-3.2-3b": _shape("llama", 28, 3072, 8192, heads=(24, 8, 128), vocab=128256, context=131072, tied=True),
        "mistral-7b": _shape("mistral", 32, 4096, 14336, heads=(32, 8, 128), vocab=32768, context=32768),
    }


def _qwen2() -> dict[str, ModelConfig]:
    return {
        "qwen2.5-72b": _shape("qwen2", 80, 8192, 29568, heads=(64, 8, 128), vocab=152064, context=32768),
        "qwen2.5-32b": _shape("qwen2", 64, 5120, 27648, heads=(40, 8, 128), vocab=152064, context=32768),
        "qwen2.5-14b": _shape("qwen2", 48, 5120, 13824, heads=(40, 8, 128), vocab=152064, context=32768),
        "qwen2.5-7b": _shape("qwen2", 28, 3584, 18944, heads=(28, 4, 128), vocab=152064, context=32768),
        "qwen2.5-0.5b": _shape("qwen2", 24, 896, 4864, heads=(14, 2, 64), vocab=151936, context=32768, tied=True),
    }


def _qwen3() -> dict[str, ModelConfig]:
    return {
        "qwen3-32b": _shape("qwen3", 64, 5120, 25600, heads=(64, 8, 128), vocab=151936, context=40960),
        "qwen3-8b": _shape("qwen3", 36, 4096, 12288, heads=(32, 8, 128), vocab=151936, context=40960),
        "qwen3-4b": _shape("qwen3", 36, 2560, 9728, heads=(32, 8, 128), vocab=151936, context=40960, tied=True),
    }


def _small() -> dict[str, ModelConfig]:
    return {
        "smollm2-1.7b": _shape("llama", 24, 2048, 8192, heads=(32, 32, 64), vocab=49152, context=8192, tied=True),
        "smollm2-135m": _shape("llama", 30, 576, 1536, heads=(9, 3, 64), vocab=49152, context=8192, tied=True),
    }


def _shape(
    family: str,
    layers: int,
    hidden: int,
    intermediate: int,
    *,
    heads: tuple[int, int, int],  # query heads, key-value heads, head size
    vocab: int,
    context: int,
    tied: bool = False,
) -> ModelConfig:
    return ModelConfig(
        architecture=family,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        vocab_size=vocab,
        context_length=context,
        rms_norm_eps=1e-6,
        rope=Rope(theta=1_000_000.0),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_embeddings=tied,
    )
