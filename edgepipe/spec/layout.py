"""Names and shapes of the weights and stored tensors that a config requires, and a check that files hold these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ModelInvalid
from edgepipe.spec.facts import ModelConfig, Slice
from edgepipe.spec.formats import StoredPart, part_name, weight_parts
from edgepipe.spec.gguf_types import BLOCKS_BY_NAME
from edgepipe.spec.layer_spec import DeltaNet, LayerSpec, Recurrent
from edgepipe.spec.layer_weights import EXACT, K_B, KV_B, MIXER_NORMS, V_B, feed_forward_tensors, mixer_tensors
from edgepipe.spec.naming import NAMINGS, Naming
from edgepipe.spec.quantisation import WeightFormat
from edgepipe.spec.tensors import TensorInfo

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

OWN_NORMS = ("mlp.dense_output_norm", "mlp.expert_input_norm", "mlp.expert_output_norm")
"""Norms of layers whose dense part and experts have their own; the dense part's input has the usual one."""
LAYER_SCALE = "layer_scalar"
MTP_INPUT, MTP_NORMS, MTP_OUTPUT_NORM = "eh_proj.weight", ("enorm.weight", "hnorm.weight"), "shared_head.norm.weight"
"""Weights that only a layer with ``LayerSpec.mtp`` has: the product [H, 2 H] of its inputs, their norms, the last norm.
"""

_EXPERT_GATE = "mlp.shared_expert_gate.weight"
_SHOWN = 2  # names per kind of fault
_LAYERS = "model.layers."
_UNUSED_PARTS = (
    *("input_scale", "activation_scale", "output_scale", "k_scale", "v_scale"),
    *("weight_shape", "weight_zero_point"),
)
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
    mixer = int(spec.mixes)  # norms of a layer without mixer are all of its feed-forward part
    shapes: dict[str, tuple[int, ...]] = {}
    if spec.mtp:
        shapes |= {**dict.fromkeys(MTP_NORMS, (hidden,)), MTP_INPUT: (hidden, 2 * hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in before[:mixer]}
    shapes |= mixer_tensors(spec, hidden)
    shapes |= {f"{name}.weight": (hidden,) for name in (*after[:mixer], *before[mixer:])}
    shapes |= feed_forward_tensors(spec, hidden)
    if spec.own_norms:
        shapes |= {f"{name}.weight": (hidden,) for name in OWN_NORMS}
    shapes |= {f"{name}.weight": (hidden,) for name in after[mixer:]}
    if spec.mtp:
        shapes[MTP_OUTPUT_NORM] = (hidden,)
    return shapes | ({LAYER_SCALE: (1,)} if spec.output_scaled else {})


def norm_names(spec: LayerSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of norms before mixer and feed-forward part, and after them.

    A layer of one part has only that part's norm, which then comes before it.
    """
    match spec.norms:
        case "before":
            own = ((spec.mixes, "input_layernorm"), (spec.feeds, "post_attention_layernorm"))
            return tuple(name for present, name in own if present), ()
        case "after":
            return (), ("post_attention_layernorm", "post_feedforward_layernorm")
        case "both":
            return (
                ("input_layernorm", "pre_feedforward_layernorm"),
                ("post_attention_layernorm", "post_feedforward_layernorm"),
            )
        case "parallel":
            return ("input_layernorm",), ()


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
    count += table if embeds(config, part) else 0
    if part.head:
        count += config.hidden_size + (0 if embeds(config, part) and config.tied_embeddings else table)
    return count


def embeds(config: ModelConfig, part: Slice) -> bool:
    """Return whether a slice embeds tokens: the first one, and one that predicts one token more."""
    return part.embedding or (part.head and config.has_mtp)


def is_norm(weight: str) -> bool:
    """Return whether a weight, by its name or its name within the layer, is a norm's."""
    return weight.endswith("norm.weight")


def is_router(weight: str) -> bool:
    """Return whether a weight, by its name or its name within the layer, is a router's: float32 in every backend."""
    return "mlp.router." in weight


def is_exact(weight: str) -> bool:
    """Return whether a weight, by its name or its name within the layer, is float32 in every backend."""
    return is_router(weight) or weight.endswith(EXACT)


def is_plain_norm(weight: str) -> bool:
    """Return whether a weight is that of a norm within a recurrent mixer: never stored minus one."""
    return weight.endswith(MIXER_NORMS)


def is_expert(weight: str) -> bool:
    """Return whether a weight, by its name or its name within the layer, is that of all experts of a layer."""
    return "mlp.experts." in weight


def is_shared_expert(weight: str) -> bool:
    """Return whether a weight, by its name or its name within the layer, is a product of the shared expert."""
    return "mlp.shared_expert." in weight


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
    """The rows of a stored tensor that are a weight's: of every ``period`` rows, some runs.

    The weight has the first runs of all periods, then their second runs, and so on.
    """

    rows: int  # rows of the stored tensor
    period: int
    runs: tuple[tuple[int, int], ...]  # first row within the period, number of rows

    def indices(self) -> npt.NDArray[np.int64]:
        """Return the rows' numbers, in the weight's order."""
        starts = np.arange(0, self.rows, self.period, dtype=np.int64)[:, None]
        return np.concatenate([(starts + np.arange(first, first + size)).reshape(-1) for first, size in self.runs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A run of a weight's rows that is stored on its own: all rows, or those of one expert."""

    shape: tuple[int, ...]
    stored: WeightFormat | None  # None: one tensor of floats or of GGUF's blocks
    parts: Mapping[str, StoredPart]  # the stored tensors by name
    module: str  # name before the suffixes of ``parts``
    weight: str
    cut: Cut | None = None  # None: all rows of the stored tensors
    transposed: bool = False  # the stored tensor is [experts, in, out]
    exponential: bool = False  # the stored values v are those of ``log(-v)``

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the stored matrix, of which ``shape`` may be a part."""
        return self.shape if self.cut is None else (self.cut.rows, *self.shape[1:])


def shares(config: ModelConfig, weight: str) -> Sequence[Share]:
    """Return how a weight is stored, in the order of its rows. Raises ModelInvalid."""
    naming, shape = NAMINGS[config.naming], weight_shape(config, weight)
    mtp = config.has_mtp and weight.startswith(f"{_LAYERS}{config.num_layers - 1}.")
    if not naming.experts or not is_expert(weight):
        return (_share(config, weight, naming.stored(weight, mtp=mtp), shape, _cut(config, naming, weight)),)
    count = _num_experts(config, weight)
    own = (shape[0] // count, *shape[1:])
    return [_share(config, weight, naming.stored(weight, expert=index, mtp=mtp), own) for index in range(count)]


def is_stored_tensor(config: ModelConfig, weight: str) -> bool:
    """Return whether a weight's values are those of the stored tensor of its name: every row, in order, unchanged."""
    found = shares(config, weight)
    alone = len(found) == 1 and found[0].stored is None and tuple(found[0].parts) == (weight,)
    return alone and found[0].cut is None and not found[0].transposed and not found[0].exponential


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
        return Cut(rows=total, period=len(fused), runs=((place, 1),))
    if naming.mixes_key_heads(module):
        return _key_head_cut(config.layers[int(layer)].recurrent, module, total)
    count = _num_experts(config, weight)
    run = sum(sizes[:place]) // count, sizes[place] // count
    return Cut(rows=total, period=total // count, runs=(run,))


def _key_head_cut(delta: Recurrent | None, module: str, rows: int) -> Cut:
    """Return the rows of a gated delta rule's projection where each key head's rows are side by side.

    Those are its query, its key, its value heads and their gates; or the betas and the alphas of its value heads.
    """
    assert isinstance(delta, DeltaNet), module
    heads, key = delta.value_heads // delta.key_heads, delta.key_dim
    values = heads * delta.value_dim
    runs = {
        "linear_attn.in_proj_qkv": ((0, key), (key, key), (2 * key, values)),
        "linear_attn.in_proj_z": ((2 * key + values, values),),
        "linear_attn.in_proj_b": ((0, heads),),
        "linear_attn.in_proj_a": ((heads, heads),),
    }
    return Cut(rows=rows, period=rows // delta.key_heads, runs=runs[module])


def _share(config: ModelConfig, weight: str, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Share:
    """``name``: the stored tensor's, if it is one."""
    naming = NAMINGS[config.naming]
    parameter = is_expert(weight) and naming.parameters
    module = name.removesuffix(".weight")
    packable = len(shape) == 2 and (parameter or module != name) and not weight.endswith(EXACT)
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
    exponential = naming.exponents and weight.endswith(".A_log")
    return replace(share, parts={name: part}, transposed=parameter and packable, exponential=exponential)


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
    names = [EMBEDDING] if embeds(config, part) else []
    for layer in part.layers:
        names += layer_tensors(config, layer)
    if part.head:
        names.append(FINAL_NORM)
        names.append(EMBEDDING if config.tied_embeddings else HEAD)
    return tuple(dict.fromkeys(names))


def check_layout(config: ModelConfig, infos: Mapping[str, TensorInfo]) -> None:
    """Check weights against the config. Raises ModelInvalid, which lists missing, extra and wrong-shaped tensors."""
    expected = _expected(config, model_tensors(config))
    extra = [name for name in infos if name not in expected and not _ignored(config, name)]
    facts = _faults(expected, infos, extra)
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


def mtp_fault(config: ModelConfig, infos: Mapping[str, TensorInfo]) -> str:
    """Return what is wrong with the stored tensors of ``config.mtp``; empty: nothing, or the model has none."""
    if config.mtp is None:
        return ""
    drafting = config.with_mtp()
    return "; ".join(_faults(_expected(drafting, layer_tensors(drafting, config.num_layers)), infos))


def stores_mtp(config: ModelConfig, stored: Iterable[str]) -> bool:
    """Return whether files with tensors of these names hold any of ``config.mtp``."""
    if config.mtp is None:
        return False
    drafting = config.with_mtp()
    return not _expected(drafting, layer_tensors(drafting, config.num_layers)).keys().isdisjoint(stored)


Expected = Mapping[str, tuple[StoredPart, Share]]


def _expected(config: ModelConfig, weights: Iterable[str]) -> Expected:
    """Return the stored tensors of some weights, by name."""
    return {
        name: (part, share)
        for weight in weights
        for share in shares(config, weight)
        for name, part in share.parts.items()
    }


def _faults(expected: Expected, infos: Mapping[str, TensorInfo], extra: Sequence[str] = ()) -> list[str]:
    missing = [name for name in expected if name not in infos]
    present = [(infos[name], part, share) for name, (part, share) in expected.items() if name in infos]
    shapes = [fault for info, part, share in present if (fault := _shape_fault(info, part, share))]
    types = [f"{info.name} {info.scheme}" for info, part, _ in present if info.scheme not in part.types]
    complaints = [("missing", missing), ("extra", extra), ("wrong shape", shapes), ("wrong type", types)]
    return [f"{kind}: {_listed(names)}" for kind, names in complaints if names]


def _is_packed(name: str) -> bool:
    """Return whether a stored tensor's name is that of a quantised weight's part."""
    return name.endswith(
        (".qweight", ".scales", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax", "_blocks")
    )


def _shape_fault(info: TensorInfo, part: StoredPart, share: Share) -> str:
    """Return what is wrong with a stored tensor's shape; empty: nothing."""
    stacked = (is_expert(share.weight) and not share.transposed) or is_of_heads(share.weight)
    # Stored shapes may have dimensions of 1.
    loose = stacked or share.weight.endswith((*EXACT, *MIXER_NORMS, _EXPERT_GATE))
    fits = part.accepts(info.shape) if share.stored or loose else info.shape == part.shape
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
