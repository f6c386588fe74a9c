"""Convert Hugging Face's ``config.json`` or GGUF metadata to a ``ModelConfig``; the only check of foreign values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgepipe.errors import ArchitectureUnsupported, ModelInvalid
from edgepipe.model.facts import ModelConfig, Rope
from edgepipe.model.fields import Fields
from edgepipe.model.quantisation_config import check_quantisation
from edgepipe.model.rope_config import extended_context, gguf_rope, hf_rope
from edgepipe.model.sampling_defaults import GENERATION_FILE
from edgepipe.model.strict_json import read_json_object

# Caps far above existing models (Llama 3.1 405B: 126 layers, hidden 16384), far below exhausting any resource.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_VOCAB = 1 << 21
MAX_CONTEXT = 1 << 25


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Properties of an architecture that its config does not contain, and transformers' defaults for absent keys."""

    name: str
    default_context: int
    default_kv_heads: int | None = None
    default_head_dim: int | None = None
    qkv_bias: bool = False  # always present, independent of the config
    attention_bias_key: bool = False  # the config's attention_bias covers q, k, v and the output projection
    mlp_bias_key: bool = False
    qk_norm: bool = False
    windows: str = "none"  # none | all | layers


_FAMILIES = {
    "LlamaForCausalLM": _Family(name="llama", default_context=2048, attention_bias_key=True, mlp_bias_key=True),
    "MistralForCausalLM": _Family(name="mistral", default_context=131_072, default_kv_heads=8, windows="all"),
    "Qwen2ForCausalLM": _Family(
        name="qwen2", default_context=32_768, default_kv_heads=32, qkv_bias=True, windows="layers"
    ),
    "Qwen3ForCausalLM": _Family(
        name="qwen3",
        default_context=32_768,
        default_kv_heads=32,
        default_head_dim=128,
        attention_bias_key=True,
        qk_norm=True,
        windows="layers",
    ),
}
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_MODEL_TYPES = {family.name: name for name, family in _FAMILIES.items()}


def read_hf_config(folder: Path) -> ModelConfig:
    """Read the config of a model folder (``config.json``, end tokens also from ``generation_config.json``).

    Raises ModelInvalid, ArchitectureUnsupported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelInvalid(f"'{folder.name}' is not a model folder", fact="it has no config.json")
    generation = folder / GENERATION_FILE
    return hf_config(read_json_object(path), read_json_object(generation) if generation.is_file() else None)


def hf_config(values: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Convert a parsed ``config.json`` (and ``generation_config.json``) to a ModelConfig.

    Raises ModelInvalid, and ArchitectureUnsupported, which lists the supported ones.
    """
    fields = Fields(values, what="config.json")
    family = _family(fields)
    _refuse_foreign_code(fields)
    hidden = fields.integer("hidden_size", low=1, high=MAX_WIDTH)
    layers = fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)
    heads = fields.integer("num_attention_heads", low=1, high=MAX_HEADS)
    vocab = fields.integer("vocab_size", low=1, high=MAX_VOCAB)
    declared = fields.integer("max_position_embeddings", low=1, high=MAX_CONTEXT, default=family.default_context)
    head_dim = read_head_dim(fields, "head_dim", hidden, heads, family.default_head_dim)
    rope = hf_rope(fields, head_dim=head_dim, context_length=declared)
    context = extended_context(rope, _declared_context(fields, rope, declared))
    bias = family.attention_bias_key and fields.flag("attention_bias", default=False)
    config = ModelConfig(
        architecture=family.name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", low=1, high=MAX_INTERMEDIATE),
        num_heads=heads,
        num_kv_heads=read_kv_heads(fields, "num_key_value_heads", heads, family.default_kv_heads),
        head_dim=head_dim,
        vocab_size=vocab,
        context_length=context,
        rms_norm_eps=fields.number("rms_norm_eps", low=0.0, high=0.1, default=1e-6),
        rope=rope,
        qkv_bias=family.qkv_bias or bias,
        output_bias=bias,
        mlp_bias=family.mlp_bias_key and fields.flag("mlp_bias", default=False),
        qk_norm=family.qk_norm,
        sliding_windows=_hf_windows(fields, family, layers, context),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        eos_token_ids=_hf_eos(fields, generation, vocab),
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size=vocab)), None),
        quantisation=check_quantisation(values),
    )
    return config


def gguf_config(
    metadata: Mapping[str, object], tensors: Mapping[str, tuple[int, ...]], rope_factors: tuple[float, ...] = ()
) -> ModelConfig:
    """Convert GGUF metadata and the tensors' row-major shapes (GGUF's names) to a ModelConfig.

    ``rope_factors``: the file's ``rope_freqs.weight``. Raises ModelInvalid, ArchitectureUnsupported.
    """
    fields = Fields(metadata, what="the GGUF metadata")
    arch = fields.text("general.architecture")
    if arch not in _GGUF_ARCHITECTURES or fields.integer(f"{arch}.expert_count", low=0, high=1 << 20, default=0):
        raise _unsupported(f"GGUF {arch}" + (" with experts" if arch in _GGUF_ARCHITECTURES else ""))
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding) != 2 or embedding[0] > MAX_VOCAB:
        raise ModelInvalid("the GGUF file has no usable token embedding", fact=f"token_embd.weight: {embedding}")
    hidden = fields.integer(f"{arch}.embedding_length", low=1, high=MAX_WIDTH)
    heads = fields.integer(f"{arch}.attention.head_count", low=1, high=MAX_HEADS)
    declared = fields.integer(f"{arch}.context_length", low=1, high=MAX_CONTEXT)
    layers = fields.integer(f"{arch}.block_count", low=1, high=MAX_LAYERS)
    head_dim = read_head_dim(fields, f"{arch}.attention.key_length", hidden, heads, None)
    rope = gguf_rope(fields, arch, head_dim=head_dim, context_length=declared, factors=rope_factors)
    context = extended_context(rope, declared)
    window = fields.integer(f"{arch}.attention.sliding_window", low=0, high=MAX_CONTEXT, default=0)
    return ModelConfig(
        architecture=arch,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=fields.integer(f"{arch}.feed_forward_length", low=1, high=MAX_INTERMEDIATE),
        num_heads=heads,
        num_kv_heads=read_kv_heads(fields, f"{arch}.attention.head_count_kv", heads, None),
        head_dim=head_dim,
        vocab_size=embedding[0],
        context_length=context,
        rms_norm_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon", low=0.0, high=0.1),
        rope=rope,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=arch == "qwen3",
        sliding_windows=_windows([True] * layers, window, context) if arch == "llama" and window else (),
        tied_embeddings="output.weight" not in tensors,
        eos_token_ids=_gguf_eos(fields, embedding[0]),
        bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id", vocab_size=embedding[0])), None),
    )


def _declared_context(fields: Fields, rope: Rope, declared: int) -> int:
    """Return the config's context. Vicuna's configs declare the linearly scaled one under another key."""
    if rope.scaling != "linear":
        return declared
    stretched = fields.integer("max_sequence_length", low=1, high=MAX_CONTEXT, default=declared)
    return max(declared, min(stretched, round(declared * rope.factor)))


def _unsupported(found: str) -> ArchitectureUnsupported:
    return ArchitectureUnsupported(
        f"the architecture '{found[:80]}' is not supported",
        fact=f"supported: {', '.join(_FAMILIES)} (GGUF: {', '.join(_GGUF_ARCHITECTURES)})",
        next_step="choose a model of one of these families, e.g. edgepipe models pull demo",
    )


def _family(fields: Fields) -> _Family:
    names = fields.items("architectures")
    if not names:
        names = [_MODEL_TYPES.get(fields.text("model_type", default=""), "unknown")]
    found = next((name for name in names if isinstance(name, str) and name in _FAMILIES), None)
    if found is None:
        raise _unsupported(", ".join(str(name) for name in names))
    return _FAMILIES[found]


def _refuse_foreign_code(fields: Fields) -> None:
    if fields.has("auto_map"):
        raise ModelInvalid(
            "config.json needs code from the model's folder ('auto_map')",
            fact="edgepipe runs no code that comes with a model",
            next_step="choose a model without custom code",
        )
    activation = fields.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise _unsupported(f"hidden_act {activation}")


def read_head_dim(fields: Fields, key: str, hidden: int, heads: int, default: int | None) -> int:
    """Return the head size under ``key``, else ``default``, else hidden size over heads. Raises ModelInvalid."""
    if not fields.has(key) and default is None:
        if hidden % heads:
            raise fields.fail(key, f"{heads} heads do not divide the hidden size {hidden}, and it is missing")
        default = hidden // heads
    head_dim = fields.integer(key, low=2, high=MAX_HEAD_DIM, default=default)
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise fields.fail(key, f"it is {head_dim}; rotary embedding needs an even head size from 2 to {MAX_HEAD_DIM}")
    return head_dim


def read_kv_heads(fields: Fields, key: str, heads: int, default: int | None) -> int:
    """Return the number of key-value heads under ``key``, else ``default``, else ``heads``. Raises ModelInvalid."""
    kv_heads = fields.integer(key, low=1, high=MAX_HEADS, default=default or heads)
    if heads % kv_heads:
        raise fields.fail(key, f"{kv_heads} key-value heads do not divide {heads} heads")
    return kv_heads


def _hf_windows(fields: Fields, family: _Family, layers: int, context: int) -> tuple[int | None, ...]:
    """Return the window of each layer, by the rules of transformers' configuration classes."""
    if family.windows == "none":
        return ()
    if family.windows == "all":
        slides, used = [True] * layers, fields.raw("sliding_window") is not None
    else:
        used = fields.flag("use_sliding_window", default=False) and fields.raw("sliding_window") is not None
        slides = _sliding_layers(fields, layers)
    window = fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=0) if used else 0
    return _windows(slides, window, context)


def _sliding_layers(fields: Fields, layers: int) -> list[bool]:
    kinds = fields.items("layer_types")
    if not kinds:
        first = fields.integer("max_window_layers", low=0, high=1 << 20, default=28)
        return [layer >= first for layer in range(layers)]
    if len(kinds) != layers or not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        raise fields.fail(
            "layer_types", f"{layers} times full_attention or sliding_attention is needed, it has {len(kinds)}"
        )
    return [kind == "sliding_attention" for kind in kinds]


def _windows(slides: list[bool], window: int, context: int) -> tuple[int | None, ...]:
    """Return the window of each layer. A window as large as the context has no effect and is dropped."""
    if not window or window >= context or not any(slides):
        return ()
    return tuple(window if slide else None for slide in slides)


def _hf_eos(fields: Fields, generation: Mapping[str, Any] | None, vocab: int) -> tuple[int, ...]:
    ids = fields.token_ids("eos_token_id", vocab_size=vocab)
    if generation is not None:
        ids += Fields(generation, what="generation_config.json").token_ids("eos_token_id", vocab_size=vocab)
    return tuple(dict.fromkeys(ids))


def _gguf_eos(fields: Fields, vocab: int) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ids = [token for key in keys for token in fields.token_ids(key, vocab_size=vocab)]
    return tuple(dict.fromkeys(ids))
