"""Names and shapes of the weights and stored tensors that a config requires, and a check that files hold these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgepipe.errors import ModelInvalid
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.formats import StoredPart, weight_parts
from edgepipe.model.gguf_types import BLOCKS_BY_NAME
from edgepipe.model.tensors import TensorInfo

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_SHOWN = 5  # names per kind of fault
_LAYERS = "model.layers."
_UNUSED_PARTS = ("input_scale", "output_scale", "k_scale", "v_scale", "weight_shape", "weight_zero_point")
"""Suffixes of tensors that quantised files hold besides: scales of activations and caches, zeros of symmetric weights.
"""
_UNUSED_PARTS_OF = {"gptq": ("bias",), "gptq_v2": ("bias",)}
"""AutoGPTQ stores biases of zero for layers without bias; transformers does not read them either."""


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of one decoder layer's weights, in reading order."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        shapes |= _linear(f"self_attn.{name}", rows, hidden, bias=config.qkv_bias)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    shapes |= _linear("self_attn.o_proj", hidden, query, bias=config.output_bias)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    shapes |= _linear("mlp.gate_proj", inner, hidden, bias=config.mlp_bias)
    shapes |= _linear("mlp.up_proj", inner, hidden, bias=config.mlp_bias)
    shapes |= _linear("mlp.down_proj", hidden, inner, bias=config.mlp_bias)
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def model_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the whole model's weights."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table}
    for layer in range(config.num_layers):
        shapes |= layer_tensors(config, layer)
    shapes[FINAL_NORM] = (config.hidden_size,)
    return shapes if config.tied_embeddings else shapes | {HEAD: table}


def slice_tensors(config: ModelConfig, part: Slice) -> tuple[str, ...]:
    """Return the names of the stored tensors that a slice needs, in reading order. Raises ModelInvalid."""
    return stored_names(config, slice_weights(config, part))


def stored_names(config: ModelConfig, weights: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the tensors in which weights are stored, in reading order. Raises ModelInvalid."""
    if config.quantisation is None:
        return tuple(weights)
    return tuple(name for weight in weights for name in stored_parts(config, weight) or (weight,))


def stored_parts(config: ModelConfig, weight: str) -> dict[str, StoredPart]:
    """Return the stored tensors of a quantised weight by name; empty: the weight is one tensor. Raises ModelInvalid."""
    module = weight.removesuffix(".weight")
    stored = config.quantisation.of(module) if config.quantisation and module != weight else None
    shape = weight_shape(config, weight) if stored else ()
    if stored is None or len(shape) != 2:
        return {}
    return {f"{module}.{suffix}": part for suffix, part in weight_parts(stored, shape).items()}


def weight_shape(config: ModelConfig, weight: str) -> tuple[int, ...]:
    """Return the shape of a weight. Raises ModelInvalid if the model has none of this name."""
    if weight in (EMBEDDING, HEAD):
        return (config.vocab_size, config.hidden_size)
    layer = weight.removeprefix(_LAYERS).partition(".")[0]
    shapes = layer_tensors(config, int(layer)) if layer.isdecimal() and int(layer) < config.num_layers else {}
    shape = (config.hidden_size,) if weight == FINAL_NORM else shapes.get(weight)
    if shape is None:
        raise ModelInvalid(f"the model has no weight '{weight[:80]}'", fact=f"it has {config.num_layers} layers")
    return shape


def slice_weights(config: ModelConfig, part: Slice) -> tuple[str, ...]:
    """Return the names of a slice's weights, in reading order; a tied head is the embedding, listed once."""
    names = [EMBEDDING] if part.embedding else []
    for layer in part.layers:
        names += layer_tensors(config, layer)
    if part.head:
        names.append(FINAL_NORM)
        names.append(EMBEDDING if config.tied_embeddings else HEAD)
    return tuple(dict.fromkeys(names))


def check_layout(config: ModelConfig, infos: Mapping[str, TensorInfo]) -> None:
    """Check weights against the config. Raises ModelInvalid, which lists missing, extra and wrong-shaped tensors."""
    weights = model_tensors(config)
    parts = {weight: stored_parts(config, weight) for weight in weights}
    expected: dict[str, StoredPart | tuple[int, ...]] = {}
    for weight, shape in weights.items():
        expected |= parts[weight] or {weight: shape}
    missing = [name for name in expected if name not in infos]
    extra = [name for name in infos if name not in expected and not _ignored(config, name)]
    present = [(infos[name], place) for name, place in expected.items() if name in infos]
    shapes = [fault for info, place in present if (fault := _shape_fault(info, place))]
    types = [f"{info.name} {info.scheme}" for info, place in present if not _has_type(info, place)]
    complaints = [("missing", missing), ("extra", extra), ("wrong shape", shapes), ("wrong type", types)]
    facts = [f"{kind}: {_listed(names)}" for kind, names in complaints if names]
    if facts:
        raise ModelInvalid(
            "the weights contradict the model's config",
            fact="; ".join(facts),
            next_step="fetch the model again, or choose another",
        )


def _shape_fault(info: TensorInfo, place: StoredPart | tuple[int, ...]) -> str:
    """Return what is wrong with a stored tensor's shape; empty: nothing."""
    fits = place.accepts(info.shape) if isinstance(place, StoredPart) else info.shape == place
    shape = place.shape if isinstance(place, StoredPart) else place
    return "" if fits else f"{info.name} {list(info.shape)} instead of {list(shape or ())}"


def _has_type(info: TensorInfo, place: StoredPart | tuple[int, ...]) -> bool:
    return info.scheme in (place.types if isinstance(place, StoredPart) else BLOCKS_BY_NAME)


def _ignored(config: ModelConfig, name: str) -> bool:
    """Return whether a tensor is redundant: a computed table, a stored copy of a tied head, or an unused part."""
    module, _, suffix = name.rpartition(".")
    if config.tied_embeddings and name.startswith(HEAD.removesuffix("weight")) and suffix != "bias":
        return True
    return name.endswith(".rotary_emb.inv_freq") or _unused_part(config, module, suffix)


def _unused_part(config: ModelConfig, module: str, suffix: str) -> bool:
    stored = config.quantisation.of(module) if config.quantisation else None
    return stored is not None and suffix in (*_UNUSED_PARTS, *_UNUSED_PARTS_OF.get(stored.kind, ()))


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _SHOWN
    return ", ".join(listed[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
