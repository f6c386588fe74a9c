"""Names and shapes of the tensors that a config requires, and a check that files hold exactly these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgepipe.errors import ModelInvalid
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.tensors import TensorInfo

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_SHOWN = 5  # names per kind of fault


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of one decoder layer, in reading order."""
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
    """Return names and shapes of the whole model."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table}
    for layer in range(config.num_layers):
        shapes |= layer_tensors(config, layer)
    shapes[FINAL_NORM] = (config.hidden_size,)
    return shapes if config.tied_embeddings else shapes | {HEAD: table}


def slice_tensors(config: ModelConfig, part: Slice) -> tuple[str, ...]:
    """Return the names of the stored tensors that a slice needs, in reading order."""
    return slice_weights(config, part)


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
    expected = model_tensors(config)
    missing = [name for name in expected if name not in infos]
    extra = [name for name in infos if name not in expected and not _ignored(config, name)]
    wrong = [
        f"{name} {list(infos[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in infos and infos[name].shape != shape
    ]
    complaints = [("missing", missing), ("extra", extra), ("wrong shape", wrong)]
    facts = [f"{kind}: {_listed(names)}" for kind, names in complaints if names]
    if facts:
        raise ModelInvalid(
            "the weights contradict the model's config",
            fact="; ".join(facts),
            next_step="fetch the model again, or choose another",
        )


def _ignored(config: ModelConfig, name: str) -> bool:
    """Return whether a tensor is redundant: a computed table, or a stored copy of a tied head."""
    return name.endswith(".rotary_emb.inv_freq") or (name == HEAD and config.tied_embeddings)


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _SHOWN
    return ", ".join(listed[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
