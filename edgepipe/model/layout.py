"""Names and shapes of the weights and stored tensors that a config requires, and a check that files hold these."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.model.facts import ModelConfig, Slice
from edgepipe.model.formats import StoredPart, part_name, weight_parts
from edgepipe.model.gguf_types import BLOCKS_BY_NAME
from edgepipe.model.layer_spec import Attention, Experts, Latent, LayerSpec
from edgepipe.model.naming import NAMINGS, PLAIN, Naming
from edgepipe.model.quantisation import WeightFormat
from edgepipe.model.tensors import TensorInfo

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
KV_B = "self_attn.kv_b_proj.weight"
K_B, V_B = "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"

OWN_NORMS = ("mlp.dense_output_norm", "mlp.expert_input_norm", "mlp.expert_output_norm")
"""Norms of layers whose dense part and experts have their own; the dense part's input has the usual one."""
LAYER_SCALE = "layer_scalar"

_SHOWN = 2  # names per kind of fault
_LAYERS = "model.layers."
_UNUSED_PARTS = ("input_scale", "output_scale", "k_scale", "v_scale", "weight_shape", "weight_zero_point")
"""Suffixes of tensors that quantised files hold besides: scales of activations and caches, zeros of symmetric weights.
"""
_UNUSED_PARTS_OF = {"gptq": ("bias",), "gptq_v2": ("bias",)}
"""AutoGPTQ stores biases of zero for layers without bias; transformers does not read them either."""


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of one decoder layer's weights, in reading order.

    Matrices of E experts are one weight [E * out, in].
    """
    shapes = spec_tensors(config.layers[layer], config.hidden_size)
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


@lru_cache(maxsize=1024)
def spec_tensors(spec: LayerSpec, hidden: int) -> Mapping[str, tuple[int, ...]]:
    """Return names within the layer, and shapes, of one decoder layer's weights, in reading order."""
    before, after = norm_names(spec)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in before[:1]}
    shapes |= _attention(spec.attention, hidden)
    shapes |= {f"{name}.weight": (hidden,) for name in (*after[:1], *before[1:])}
    if spec.dense is not None:
        shapes |= _gated("mlp", spec.dense.inner, hidden, bias=spec.dense.bias)
    if spec.experts is not None:
        shapes |= _experts(spec.experts, hidden)
    if spec.own_norms:
        shapes |= {f"{name}.weight": (hidden,) for name in OWN_NORMS}
    shapes |= {f"{name}.weight": (hidden,) for name in after[1:]}
    return shapes | ({LAYER_SCALE: (1,)} if spec.output_scaled else {})


def norm_names(spec: LayerSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of norms before attention and feed-forward, and after them."""
    match spec.norms:
        case "before":
            return ("input_layernorm", "post_attention_layernorm"), ()
        case "after":
            return (), ("post_attention_layernorm", "post_feedforward_layernorm")
        case "both":
            return (
                ("input_layernorm", "pre_feedforward_layernorm"),
                ("post_attention_layernorm", "post_feedforward_layernorm"),
            )
        case "parallel":
            return ("input_layernorm",), ()


def _attention(attention: Attention, hidden: int) -> dict[str, tuple[int, ...]]:
    if attention.latent is not None:
        return _latent_attention(attention, attention.latent, hidden)
    query, key = attention.query_width, attention.kv_width
    shapes: dict[str, tuple[int, ...]] = {}
    names = ("q_proj", "k_proj") if attention.values_from_keys else ("q_proj", "k_proj", "v_proj")
    for name, rows in zip(names, (query, key, key), strict=False):
        shapes |= _linear(f"self_attn.{name}", rows, hidden, bias=attention.qkv_bias)
    if attention.qk_norm:
        widths = (attention.head_dim,) * 2 if attention.qk_norm == "head" else (query, key)
        shapes |= {"self_attn.q_norm.weight": (widths[0],), "self_attn.k_norm.weight": (widths[1],)}
    if attention.sinks:
        shapes["self_attn.sinks"] = (attention.num_heads,)
    return shapes | _linear("self_attn.o_proj", hidden, query, bias=attention.output_bias)


def _latent_attention(attention: Attention, latent: Latent, hidden: int) -> dict[str, tuple[int, ...]]:
    """kv_b has for each head the rows of its keys [nope, rank], then of its values [value, rank].

    Or it is two weights, heads one below the other: keys transposed [heads * rank, nope], values [heads * value, rank].
    """
    heads, rank, bias = attention.num_heads, latent.kv_rank, attention.qkv_bias
    query = heads * (latent.nope_dim + latent.rope_dim)
    shapes: dict[str, tuple[int, ...]] = {}
    if latent.query_rank:
        shapes |= _linear("self_attn.q_a_proj", latent.query_rank, hidden, bias=bias)
        shapes["self_attn.q_a_layernorm.weight"] = (latent.query_rank,)
        shapes |= _linear("self_attn.q_b_proj", query, latent.query_rank, bias=False)
    else:
        shapes |= _linear("self_attn.q_proj", query, hidden, bias=False)
    shapes |= _linear("self_attn.kv_a_proj_with_mqa", rank + latent.rope_dim, hidden, bias=bias)
    shapes["self_attn.kv_a_layernorm.weight"] = (rank,)
    if latent.joined:
        shapes[KV_B] = (heads * (latent.nope_dim + latent.value_dim), rank)
    else:
        shapes |= {K_B: (heads * rank, latent.nope_dim), V_B: (heads * latent.value_dim, rank)}
    return shapes | _linear("self_attn.o_proj", hidden, attention.output_width, bias=attention.output_bias)


def _experts(experts: Experts, hidden: int) -> dict[str, tuple[int, ...]]:
    count, router = experts.count, experts.router
    shapes = _linear("mlp.router", count, hidden, bias=router.bias)
    if router.correction:
        shapes["mlp.router.correction"] = (count,)
    if router.input_eps is not None:
        shapes["mlp.router.input_scale"] = (hidden,)
    if router.expert_scales:
        shapes["mlp.router.expert_scale"] = (count,)
    for name, rows, columns in (
        ("gate_proj", experts.inner, hidden),
        ("up_proj", experts.inner, hidden),
        ("down_proj", hidden, experts.inner),
    ):
        shapes |= _linear(f"mlp.experts.{name}", count * rows, columns, bias=experts.bias)
    if experts.shared_inner:
        shapes |= _gated("mlp.shared_expert", experts.shared_inner, hidden, bias=False)
    if experts.shared_gated:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _gated(name: str, inner: int, hidden: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    return (
        _linear(f"{name}.gate_proj", inner, hidden, bias=bias)
        | _linear(f"{name}.up_proj", inner, hidden, bias=bias)
        | _linear(f"{name}.down_proj", hidden, inner, bias=bias)
    )


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def layer_parameters(config: ModelConfig, layer: int) -> int:
    """Return the number of weights in one decoder layer, including norms and biases."""
    return sum(prod(shape) for shape in spec_tensors(config.layers[layer], config.hidden_size).values())


def multiplied_parameters(spec: LayerSpec, hidden: int) -> float:
    """Return the number of a layer's weights that one token is multiplied with: of the experts only those it uses."""
    shapes = spec_tensors(spec, hidden)
    share = spec.experts.used / spec.experts.count if spec.experts else 1.0
    return sum(prod(shape) * (share if is_expert(name) else 1.0) for name, shape in shapes.items())


def used_expert_parameters(spec: LayerSpec, hidden: int) -> float:
    """Return the number of weights of routed experts that one token is multiplied with; 0 in a dense layer."""
    if spec.experts is None:
        return 0.0
    total = sum(prod(shape) for name, shape in spec_tensors(spec, hidden).items() if is_expert(name))
    return total * spec.experts.used / spec.experts.count


def slice_parameters(config: ModelConfig, part: Slice) -> int:
    """Return the number of weights in a slice. A tied head counts in the slice that uses it."""
    table = config.vocab_size * config.hidden_size
    count = sum(layer_parameters(config, layer) for layer in part.layers)
    count += table if part.embedding else 0
    if part.head:
        count += config.hidden_size + (0 if part.embedding and config.tied_embeddings else table)
    return count


def is_norm(weight: str) -> bool:
    """Return whether a weight, by its name or its name within the layer, is a norm's."""
    return weight.endswith("norm.weight")


def is_router(weight: str) -> bool:
    """Return whether a weight, by its name or its name within the layer, is a router's: float32 in every backend."""
    return "mlp.router." in weight


def is_expert(weight: str) -> bool:
    """Return whether a weight, by its name or its name within the layer, is that of all experts of a layer."""
    return "mlp.experts." in weight


def is_of_heads(weight: str) -> bool:
    """Return whether a weight, by its name or its name within the layer, multiplies each head's values on their own."""
    return weight.endswith((KV_B, K_B, V_B))


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
    found = (name for weight in weights for share in shares(config, weight) for name in share.parts)
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The rows of a stored tensor that are a weight's: of every ``period`` rows, ``size`` from ``first`` on."""

    rows: int  # of the stored tensor
    period: int
    first: int
    size: int

    def indices(self) -> npt.NDArray[np.int64]:
        """Return the rows' numbers, ascending."""
        starts = np.arange(self.first, self.rows, self.period, dtype=np.int64)
        return (starts[:, None] + np.arange(self.size)).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A run of a weight's rows that is stored on its own: all rows, or those of one expert."""

    shape: tuple[int, ...]
    stored: WeightFormat | None  # None: one tensor of floats or of GGUF's blocks
    parts: Mapping[str, StoredPart]  # the stored tensors by name
    module: str  # before the suffixes of ``parts``
    weight: str
    cut: Cut | None = None  # None: all rows of the stored tensors
    transposed: bool = False  # the stored tensor is [experts, in, out]

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the stored matrix, of which ``shape`` may be a part."""
        return self.shape if self.cut is None else (self.cut.rows, *self.shape[1:])


def shares(config: ModelConfig, weight: str) -> Sequence[Share]:
    """Return how a weight is stored, in the order of its rows. Raises ModelInvalid."""
    naming, shape = NAMINGS[config.naming], weight_shape(config, weight)
    if not naming.experts or not is_expert(weight):
        return (_share(config, weight, naming.stored(weight), shape, _cut(config, naming, weight)),)
    count = _num_experts(config, weight)
    own = (shape[0] // count, *shape[1:])
    return [_share(config, weight, naming.stored(weight, expert=index), own) for index in range(count)]


def _num_experts(config: ModelConfig, weight: str) -> int:
    """Return the number of experts whose rows a weight holds; 1 for weights of no experts."""
    if not is_expert(weight):
        return 1
    experts = config.layers[int(weight.removeprefix(_LAYERS).partition(".")[0])].experts
    assert experts is not None, weight
    return experts.count


def _cut(config: ModelConfig, naming: Naming, weight: str) -> Cut | None:
    """Return the rows of a weight in the tensor that holds it with others; None: it is stored alone."""
    layer, _, within = weight.removeprefix(_LAYERS).partition(".")
    module, _, suffix = within.rpartition(".")
    fused = naming.fused_with(module)
    if not fused:
        return None
    sizes = [weight_shape(config, f"{_LAYERS}{layer}.{each}.{suffix}")[0] for each in fused]
    place, total = fused.index(module), sum(sizes)
    if naming.interleaved:
        return Cut(rows=total, period=len(fused), first=place, size=1)
    count = _num_experts(config, weight)
    return Cut(rows=total, period=total // count, first=sum(sizes[:place]) // count, size=sizes[place] // count)


def _share(config: ModelConfig, weight: str, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Share:
    """``name``: the stored tensor's, if it is one."""
    parameter = is_expert(weight) and NAMINGS[config.naming].parameters
    module = name.removesuffix(".weight")
    packable = len(shape) == 2 and (parameter or module != name)
    stored = config.quantisation.of(module) if config.quantisation and packable else None
    share = Share(shape=shape, stored=stored, parts={}, module=module, weight=weight, cut=cut)
    if stored is not None:
        parts = weight_parts(stored, share.whole)
        return replace(share, parts={part_name(module, stored, suffix): part for suffix, part in parts.items()})
    whole = share.whole
    if parameter:
        count = _num_experts(config, weight)
        whole = (count, *whole[1:], whole[0] // count)
    part = StoredPart(shape=whole, types=tuple(BLOCKS_BY_NAME))
    return replace(share, parts={name: part}, transposed=parameter and packable)


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all weights as they would be stored without quantisation."""
    plain = replace(config, quantisation=None)
    found = (part for weight in model_tensors(plain) for share in shares(plain, weight) for part in share.parts.items())
    return {name: part.shape or () for name, part in found}


def weight_shape(config: ModelConfig, weight: str) -> tuple[int, ...]:
    """Return the shape of a weight. Raises ModelInvalid if the model has none of this name."""
    if weight in (EMBEDDING, HEAD):
        return (config.vocab_size, config.hidden_size)
    layer, _, within = weight.removeprefix(_LAYERS).partition(".")
    shape = (config.hidden_size,) if weight == FINAL_NORM else None
    if layer.isdecimal() and int(layer) < config.num_layers:
        shape = spec_tensors(config.layers[int(layer)], config.hidden_size).get(within)
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


def settled_latent(config: ModelConfig, stored: Iterable[str]) -> ModelConfig:
    """Return the config whose layers have kv_b as the files do: one weight, or one each for keys and values."""
    module = NAMINGS[config.naming].stored(f"{_LAYERS}0.{K_B}").removesuffix("weight")
    if config.layers[0].attention.latent is None or not any(name.startswith(module) for name in stored):
        return config

    def split(spec: LayerSpec) -> LayerSpec:
        latent = spec.attention.latent
        own = None if latent is None else replace(latent, joined=False)
        return replace(spec, attention=replace(spec.attention, latent=own))

    return replace(config, layers=tuple(map(split, config.layers)))


def settled_head(config: ModelConfig, stored: Collection[str]) -> ModelConfig:
    """Return a config whose head is that of the files, if they hold one.

    The class of a text model among several declares its head tied where the config says nothing, as transformers does.
    """
    head = NAMINGS[config.naming].head
    if not config.tied_embeddings or head == PLAIN.head or not any(name.startswith(f"{head}.") for name in stored):
        return config
    return replace(config, tied_embeddings=False)


def check_layout(config: ModelConfig, infos: Mapping[str, TensorInfo]) -> None:
    """Check weights against the config. Raises ModelInvalid, which lists missing, extra and wrong-shaped tensors."""
    expected = {
        name: (part, share)
        for weight in model_tensors(config)
        for share in shares(config, weight)
        for name, part in share.parts.items()
    }
    missing = [name for name in expected if name not in infos]
    extra = [name for name in infos if name not in expected and not _ignored(config, name)]
    present = [(infos[name], part, share) for name, (part, share) in expected.items() if name in infos]
    shapes = [fault for info, part, share in present if (fault := _shape_fault(info, part, share))]
    types = [f"{info.name} {info.scheme}" for info, part, _ in present if info.scheme not in part.types]
    complaints = [("missing", missing), ("extra", extra), ("wrong shape", shapes), ("wrong type", types)]
    facts = [f"{kind}: {_listed(names)}" for kind, names in complaints if names]
    if facts and config.quantisation is None and (parts_of_packed := [name for name in extra if _is_packed(name)]):
        raise ModelInvalid(
            "the weights are quantised, but config.json does not say how",
            fact=f"it has no quantization_config, and there are tensors such as {parts_of_packed[0]}",
            next_step="fetch the model again, or choose another",
        )
    if facts:
        raise ModelInvalid(
            "the weights contradict the model's config",
            fact="; ".join(facts),
            next_step="fetch the model again, or choose another",
        )


def _is_packed(name: str) -> bool:
    """Return whether a stored tensor's name is that of a quantised weight's part."""
    return name.endswith(
        (".qweight", ".scales", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax", "_blocks")
    )


def _shape_fault(info: TensorInfo, part: StoredPart, share: Share) -> str:
    """Return what is wrong with a stored tensor's shape; empty: nothing."""
    stacked = (is_expert(share.weight) and not share.transposed) or is_of_heads(share.weight)
    fits = part.accepts(info.shape) if share.stored or stacked else info.shape == part.shape
    return "" if fits else f"{info.name} {list(info.shape)} instead of {list(part.shape or ())}"


def _ignored(config: ModelConfig, name: str) -> bool:
    """Return whether a tensor is not needed.

    That is a computed table, a stored copy of a tied head, an unused part, or a tensor that the family's naming skips.
    """
    naming = NAMINGS[config.naming]
    module, _, suffix = name.rpartition(".")
    if config.tied_embeddings and name.startswith(f"{naming.head}.") and suffix != "bias":
        return True
    if naming.later_layers and _layer_of(name, naming.prefix) >= config.num_layers:
        return True
    return name.endswith(".rotary_emb.inv_freq") or _unused_part(config, module, suffix) or naming.skips(name)


def _layer_of(name: str, prefix: str) -> int:
    """Return the number of the layer that a stored tensor belongs to; -1 for none."""
    layer = name.removeprefix(f"{prefix}layers.").partition(".")[0]
    return int(layer) if layer.isdecimal() and len(layer) < 6 else -1


def _unused_part(config: ModelConfig, module: str, suffix: str) -> bool:
    stored = config.quantisation.of(module) if config.quantisation else None
    return stored is not None and suffix in (*_UNUSED_PARTS, *_UNUSED_PARTS_OF.get(stored.kind, ()))


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _SHOWN
    return ", ".join(listed[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
