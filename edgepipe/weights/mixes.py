"""Named mixes of weight types, so that models can be planned and emulated without their files.

GGUF's mixes follow llama.cpp's rule (``src/llama-quant.cpp``, ``llama_tensor_get_type_impl``) for dense models without
an importance matrix. Dynamic mixes (``UD-...``) and a few others have no published rule: a near mix stands for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from edgepipe.errors import ModelUnknown
from edgepipe.shapes.loader import named_shape
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice
from edgepipe.spec.gguf_types import BLOCKS_BY_NAME
from edgepipe.spec.layout import EMBEDDING, HEAD, is_exact, is_expert, layer_tensors, model_tensors, slice_weights
from edgepipe.spec.names import plain_type
from edgepipe.spec.packed_form import PackedForm
from edgepipe.spec.tensors import WeightInfo
from edgepipe.weights.gguf_packing import gguf_form
from edgepipe.weights.weight_table import WeightTable, table_of

DEFAULT_MIX = "bf16"
"""The mix of a name without one, unless ``_PUBLISHED_MIXES`` has it."""

_PUBLISHED_MIXES = {"gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4"}

# Mixes that stand in for other types; the keys lack the prefix of a type's maker.
_STAND_INS = {
    **dict.fromkeys(("q3_k_s", "q3_k_l", "q3_k_xl", "iq3_xxs", "iq3_xs", "iq3_s", "iq3_m"), "q3_k_m"),
    **dict.fromkeys(("q4_1", "iq4_xs", "iq4_nl"), "q4_0"),
    **dict.fromkeys(("q4_k_s", "q4_k_l", "q4_k_xl"), "q4_k_m"),
    **dict.fromkeys(("q5_0", "q5_1", "q5_k_s", "q5_k_l", "q5_k_xl"), "q5_k_m"),
    **dict.fromkeys(("q6_k_l", "q6_k_xl"), "q6_k"),
    "q8_k_xl": "q8_0",
    "f16": "bf16",
}

_PUBLISHED_SCHEMES = ("FP8", "MXFP4")  # types whose files are not GGUF
_FP8 = PackedForm(bits=8, group=128, base_bits=32, codebook="e4m3")  # blocks of 128 x 128 (DeepSeek-V3, Qwen3-FP8)
_FALLBACKS = {
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}  # tensor_type_fallback: rows of 256 * n + x
_LAYERS_OF_70B = 80  # llama.cpp's LLM_TYPE_70B: 8 query heads share an attn_v


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a matrix is."""

    name: str  # within its layer, or of the whole model
    layer: int  # -1 outside the layers
    config: ModelConfig

    @property
    def is_value(self) -> bool:
        return self.name == "self_attn.v_proj.weight"

    @property
    def is_down(self) -> bool:
        return self.name in ("mlp.down_proj.weight", "mlp.experts.down_proj.weight")

    @property
    def routes(self) -> bool:
        """Whether it chooses experts or weighs them: such matrices stay floats."""
        return self.name in ("mlp.router.weight", "mlp.shared_expert_gate.weight")

    @property
    def gets_more_bits(self) -> bool:
        """llama.cpp's ``use_more_bits``: the first and the last eighth, and every third layer between."""
        layer, eighth = self.layer, self.config.num_layers // 8
        return layer < eighth or layer >= 7 * self.config.num_layers // 8 or (layer - eighth) % 3 == 2


def mix_names() -> tuple[str, ...]:
    """Return the names of all mixes."""
    return tuple(_MIXES)


def split_mix(name: str) -> tuple[str, str]:
    """Split ``llama-3.3-70b:q4_k_m`` into model and mix. Raises ModelUnknown for a mix without a known rule."""
    model, colon, mix = name.partition(":")
    own = _PUBLISHED_MIXES.get(model.strip().lower(), DEFAULT_MIX)
    mix = mix.strip().lower() if colon else own
    mix = stand_in(mix) or mix.replace("-", "_")
    if mix not in _MIXES:
        raise ModelUnknown(
            f"the type of '{name}' is not known",
            fact=f"known types: {', '.join(_MIXES)}",
            next_step=f"write it like {model or 'llama-3.3-70b'}:q4_k_m",
        )
    return model, mix


def stand_in(kind: str) -> str:
    """Return the mix whose sizes are those of a type without a published rule, nearly; empty for other types."""
    kind, plain = kind.lower(), plain_type(kind)
    found = _STAND_INS.get(plain, plain)
    return found if kind not in _MIXES and found in _MIXES else ""


def named_model(name: str) -> tuple[ModelConfig, WeightTable]:
    """Return shape and weights of a name such as ``qwen2.5-32b`` or ``llama-3.3-70b:q4_k_m``. Raises ModelUnknown."""
    model, mix = split_mix(name)
    config = named_shape(model)
    return config, mix_table(config, mix)


@lru_cache(maxsize=64)
def mix_table(config: ModelConfig, mix: str) -> WeightTable:
    """Return the forms of a whole model in a mix. Raises ModelUnknown for an unknown mix."""
    whole = Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
    found = mix_weights(config, mix, whole)
    if config.mtp is not None:
        drafting = config.with_mtp()
        shapes = layer_tensors(drafting, config.num_layers)
        found += [_info(drafting, mix, name, shape) for name, shape in shapes.items()]
    return table_of(found)


def mix_weights(config: ModelConfig, mix: str, part: Slice) -> list[WeightInfo]:
    """Describe the weights of a slice in a mix. Raises ModelUnknown for an unknown mix."""
    mix = split_mix(f":{mix}")[1]
    shapes = model_tensors(config)
    return [_info(config, mix, name, shapes[name]) for name in slice_weights(config, part)]


def _info(config: ModelConfig, mix: str, name: str, shape: tuple[int, ...]) -> WeightInfo:
    """Describe one weight; vectors are floats."""
    inputs = shape[-1]
    scheme = "BF16" if len(shape) == 1 else _scheme(config, mix, name, inputs)
    scheme = "F32" if is_exact(name) else scheme
    if scheme == "FP8":
        form: PackedForm | None = _FP8
        num_bytes = prod(shape) + 2 * -(-shape[0] // 128) * (inputs // 128)  # bf16 scales
    else:
        form, block = gguf_form(scheme), BLOCKS_BY_NAME[scheme]
        num_bytes = prod(shape) // block.block_values * block.block_bytes
    rounded = form is not None and scheme not in _PUBLISHED_SCHEMES  # values of GGUF files are rounded to bf16
    return WeightInfo(name=name, shape=shape, scheme=scheme, form=form, num_bytes=num_bytes, rounded=rounded)


def _scheme(config: ModelConfig, mix: str, name: str, inputs: int) -> str:
    """Return the type of a matrix with rows of ``inputs`` values."""
    _, _, inner = name.partition("model.layers.")
    layer, _, within = inner.partition(".")
    place = _Place(within or name, int(layer) if within else -1, config)
    scheme = "F32" if place.routes else _MIXES[mix](place)
    if scheme == "FP8":
        return scheme if inputs % 128 == 0 else "BF16"
    if inputs % BLOCKS_BY_NAME[scheme].block_values:
        scheme = "Q8_0" if _is_output(place) else _FALLBACKS.get(scheme, "BF16")
    return scheme if inputs % BLOCKS_BY_NAME[scheme].block_values == 0 else "BF16"


def _is_output(place: _Place) -> bool:
    """A tied embedding gets the output's type."""
    return place.name == HEAD or (place.name == EMBEDDING and place.config.tied_embeddings)


def _k_mix(of_layers: str, special: Callable[[_Place], str | None]) -> Callable[[_Place], str]:
    def scheme(place: _Place) -> str:
        if place.layer < 0:
            return "Q6_K" if _is_output(place) else of_layers
        found = special(place) or of_layers
        wide = place.is_value and place.config.num_layers == _LAYERS_OF_70B and found in ("Q3_K", "Q4_K")
        return "Q5_K" if wide else found

    return scheme


def _more_bits(place: _Place) -> str | None:
    """Q4_K_M and Q5_K_M: Q6_K for half of the attention's values and of the down projections."""
    return "Q6_K" if (place.is_value or place.is_down) and place.gets_more_bits else None


def _q3_k_m(place: _Place) -> str | None:
    if place.is_value:
        return "Q5_K" if place.layer < 2 else "Q4_K"
    if place.is_down:
        return "Q5_K" if place.layer < place.config.num_layers // 16 else "Q4_K"
    return "Q4_K" if place.name == "self_attn.o_proj.weight" else None


def _everywhere(of_layers: str, *, output: str) -> Callable[[_Place], str]:
    return lambda place: output if _is_output(place) else of_layers


def _only_layers(of_layers: str) -> Callable[[_Place], str]:
    """Return the rule of formats that publishers use for layers alone: embedding and head stay in bf16."""
    return lambda place: of_layers if place.layer >= 0 else "BF16"


def _mxfp4(place: _Place) -> str:
    """Return a tensor's format. Of gpt-oss, publishers pack the experts alone."""
    if place.config.architecture == "gpt_oss" and not is_expert(place.name):
        return "BF16"
    return _only_layers("MXFP4")(place)


def _mxfp4_moe(place: _Place) -> str:
    """llama.cpp's MXFP4_MOE: everything but the experts in Q8_0."""
    return "MXFP4" if is_expert(place.name) else "Q8_0"


_MIXES: Mapping[str, Callable[[_Place], str]] = {
    "q3_k_m": _k_mix("Q3_K", _q3_k_m),
    "q4_0": _everywhere("Q4_0", output="Q6_K"),
    "q4_k_m": _k_mix("Q4_K", _more_bits),
    "q5_k_m": _k_mix("Q5_K", _more_bits),
    "q6_k": _k_mix("Q6_K", lambda _: None),
    "q8_0": _everywhere("Q8_0", output="Q8_0"),
    "mxfp4": _mxfp4,
    "mxfp4_moe": _mxfp4_moe,
    "fp8": _only_layers("FP8"),
    "bf16": lambda _: "BF16",
}
