"""What all families share when they read ``config.json`` or GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from edgepipe.errors import ArchitectureUnsupported
from edgepipe.files.fields import Fields
from edgepipe.spec.layer_spec import Attention, Experts, LayerSpec, Norm, Rope, Router, Temperature
from edgepipe.spec.rope_config import (
    MAX_THETA,
    MIN_THETA,
    ROPE_FACTORS,
    extended_context,
    gguf_rope,
    hf_rope,
    partial_rotary,
    rope_fields,
)
from edgepipe.spec.shape_limits import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_WIDTH,
    ExpertKeys,
    checked_experts,
    read_head_dim,
    read_kv_heads,
)

SILU = ("silu", "swish")
_NEVER = 1e29  # factors of rotary pairs that do not turn are larger
_GATING = {"softmax": 1, "sigmoid": 2}  # llama.cpp's numbers
_USED = ExpertKeys(used="num_experts_per_tok", groups="n_group", groups_used="topk_group")


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """What a family says of a model: everything that depends on the family."""

    layers: tuple[LayerSpec, ...]
    norm: Norm
    tied_embeddings: bool
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    mtp: LayerSpec | None = None  # see ``ModelConfig.mtp``; tensors decide whether the files hold it


class HfShape:
    """A parsed ``config.json``. Numbers have bounds; absent keys have the defaults of transformers' class."""

    def __init__(self, fields: Fields, *, default_context: int) -> None:
        """Raises ModelInvalid."""
        self.fields = fields
        self.hidden = fields.integer("hidden_size", low=1, high=MAX_WIDTH)
        listed = len(fields.items("layers_block_type"))  # alone, as transformers 5 writes it
        self.num_layers = fields.integer(
            "num_hidden_layers", low=1, high=MAX_LAYERS, default=min(listed, MAX_LAYERS) or None
        )
        self.num_heads = fields.integer("num_attention_heads", low=1, high=MAX_HEADS)
        self._declared = fields.integer("max_position_embeddings", low=1, high=MAX_CONTEXT, default=default_context)
        self.context = self._declared  # the model's own context; ``rope`` stretches it

    def head_dim(self, default: int | None = None) -> int:
        """Return the size of a head, all of which rotates. Raises ModelInvalid, ArchitectureUnsupported."""
        size = self.any_head_dim(default)
        if partial_rotary(self.fields) != 1.0:
            raise unsupported("partial_rotary_factor", ["rotary embedding over the whole head"])
        return size

    def any_head_dim(self, default: int | None = None) -> int:
        """Return the size of a head, of which a part may rotate. Raises ModelInvalid."""
        return read_head_dim(self.fields, "head_dim", self.hidden, self.num_heads, default)

    def kv_heads(self, default: int | None = None) -> int:
        """Return the number of key-value heads. Raises ModelInvalid."""
        return read_kv_heads(self.fields, "num_key_value_heads", self.num_heads, default)

    def rotary_dims(self, head_dim: int, default: float = 1.0) -> int:
        """Return how many dimensions of a head rotate; ``default``: share of them. Raises ModelInvalid."""
        dims = int(head_dim * partial_rotary(self.fields, default))
        if dims < 2 or dims % 2:
            raise self.fields.fail("partial_rotary_factor", f"{dims} of {head_dim} dimensions rotate; pairs are needed")
        return dims

    def rope(self, dims: int, *, default_theta: float = 10_000.0, layers: str = "") -> Rope:
        """Return the rotary embedding of ``dims`` dimensions of a head; its scaling stretches ``context``.

        ``layers``: the layer type, where types differ. Raises ModelInvalid.
        """
        rope = hf_rope(
            self.fields, dims=dims, context_length=self._declared, default_theta=default_theta, layers=layers
        )
        declared = self._declared
        if rope.scaling == "linear":  # Vicuna's configs declare the scaled context under another key
            stretched = self.fields.integer("max_sequence_length", low=1, high=MAX_CONTEXT, default=declared)
            declared = max(declared, min(stretched, round(declared * rope.factor)))
        self.context = max(self.context, extended_context(rope, declared))
        return rope

    def sliding_layers(self, *, full_every: int) -> list[bool]:
        """Return which layers slide, by ``layer_types``, or where it is absent all but every n-th.

        Raises ModelInvalid.
        """
        kinds, layers = self.fields.items("layer_types"), self.num_layers
        if not kinds:
            return [(layer + 1) % full_every != 0 for layer in range(layers)]
        if len(kinds) != layers or not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
            raise self.fields.fail(
                "layer_types", f"{layers} times full_attention or sliding_attention is needed, it has {len(kinds)}"
            )
        return [kind == "sliding_attention" for kind in kinds]

    def windows(self, slides: Sequence[bool], *, default: int = 0) -> tuple[int | None, ...]:
        """Return the window of each layer; call it after ``rope``. Raises ModelInvalid.

        A window as large as the context has no effect and is dropped.
        """
        if "sliding_window" in self.fields and self.fields.raw("sliding_window") is None:
            return (None,) * self.num_layers
        window = self.fields.integer("sliding_window", low=1, high=MAX_CONTEXT, default=default)
        return sliding(slides, window, self.context)

    def factor(self, key: str, default: float = 1.0) -> float:
        """Return a factor. Raises ModelInvalid."""
        return self.fields.number(key, low=1e-6, high=1e6, default=default)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a flag. Raises ModelInvalid."""
        return self.fields.flag(key, default=default)

    def inner(self, key: str = "intermediate_size", default: int | None = None) -> int:
        """Return the width of a feed-forward part. Raises ModelInvalid."""
        return self.fields.integer(key, low=1, high=MAX_INTERMEDIATE, default=default)

    def temperature(self) -> Temperature | None:
        """Return how queries grow with their position. Raises ModelInvalid."""
        scaling = rope_fields(self.fields)
        growth = scaling.number("llama_4_scaling_beta", low=0.0, high=1e6, default=0.0)
        key = "original_max_position_embeddings"
        return Temperature(growth=growth, context=scaling.integer(key, low=1, high=MAX_CONTEXT)) if growth else None

    def experts(self, key: str, default: int | None = None) -> int:
        """Return a number of experts. Raises ModelInvalid."""
        return self.fields.integer(key, low=1, high=MAX_EXPERTS, default=default)

    def attention(self, size: int, rope: Rope | None, *, kv_heads: int | None = None) -> Attention:
        """Return attention with heads of ``size``; ``kv_heads``: their default number. Raises ModelInvalid."""
        return Attention(num_heads=self.num_heads, num_kv_heads=self.kv_heads(kv_heads), head_dim=size, rope=rope)

    def mixture(self, count: int, used: int, inner: int, router: Router, *, shared_inner: int = 0) -> Experts:
        """Return ``count`` experts; ``used``: how many a token uses by default. Raises ModelInvalid."""
        used = self.experts(_USED.used, used)
        found = Experts(count=count, used=used, inner=inner, router=router, shared_inner=shared_inner)
        return checked_experts(self.fields, found, _USED)

    def mtp(self, layer: LayerSpec, key: str = "num_nextn_predict_layers", *, default: int = 0) -> LayerSpec | None:
        """Return the layer that predicts one token more, the first of those of ``key``; None without.

        ``default``: their number if the config does not say. Raises ModelInvalid.
        """
        count = self.fields.integer(key, low=0, high=MAX_LAYERS, default=default)
        return replace(layer, mtp=True) if count and layer.attention is not None else None

    def norm(self, default: float = 1e-6) -> Norm:
        """Return the RMSNorm. Raises ModelInvalid."""
        return Norm(eps=self.fields.number("rms_norm_eps", low=0.0, high=0.1, default=default))

    def tied(self, *, default: bool = False) -> bool:
        """Return whether the head is the embedding. Raises ModelInvalid."""
        return self.fields.flag("tie_word_embeddings", default=default)

    def check_activation(self, names: Sequence[str] = SILU, key: str = "hidden_act") -> None:
        """Refuse another activation. Raises ArchitectureUnsupported."""
        if (found := self.fields.text(key, default=names[0])) not in names:
            raise unsupported(f"{key} {found}", names)


class GgufShape:
    """GGUF metadata of one architecture, and the tensors' row-major shapes by GGUF's names."""

    def __init__(
        self,
        fields: Fields,
        arch: str,
        tensors: Mapping[str, tuple[int, ...]],
        rope_factors: Mapping[str, tuple[float, ...]],
    ) -> None:
        """Raises ModelInvalid."""
        self.fields = fields
        self.arch = arch
        self.tensors = tensors
        self._factors = rope_factors
        self.hidden = self.integer("embedding_length", high=MAX_WIDTH)
        self.num_layers = self.integer("block_count", high=MAX_LAYERS)
        self.num_heads = self.integer("attention.head_count", high=MAX_HEADS)
        self._declared = self.integer("context_length", high=MAX_CONTEXT)
        self.context = self._declared  # the model's own context; ``rope`` stretches it

    def integer(self, key: str, *, low: int = 1, high: int, default: int | None = None) -> int:
        """Return an integer of the architecture, also of a list that holds it once per layer.

        Raises ModelInvalid, and ArchitectureUnsupported if layers differ.
        """
        name = f"{self.arch}.{key}"
        value = self.fields.raw(name)
        if is_list(value):
            values = self.fields.items(name)
            if any(item != values[0] for item in values):
                raise unsupported(f"{name} that differs between layers", ["one number for all layers"])
            return Fields({name: next(iter(values), None)}, what=self.fields.what).integer(name, low=low, high=high)
        return self.fields.integer(name, low=low, high=high, default=default)

    def number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        """Return a number of the architecture. Raises ModelInvalid."""
        return self.fields.number(f"{self.arch}.{key}", low=low, high=high, default=default)

    def head_dim(self) -> int:
        """Return the size of a head. Raises ModelInvalid."""
        key = f"{self.arch}.attention.key_length"
        size = read_head_dim(self.fields, key, self.hidden, self.num_heads, None)
        if (values := self.integer("attention.value_length", high=MAX_HEAD_DIM, default=size)) != size:
            raise unsupported(f"{self.arch}.attention.value_length {values}", [f"{size}, as of keys"])
        return size

    def kv_heads(self) -> int:
        """Return the number of key-value heads. Raises ModelInvalid."""
        key = "attention.head_count_kv"
        name, heads = f"{self.arch}.{key}", self.integer(key, high=MAX_HEADS, default=self.num_heads)
        return read_kv_heads(Fields({name: heads}, what=self.fields.what), name, self.num_heads, None)

    def rotary_dims(self, head_dim: int) -> int:
        """Return how many dimensions of a head rotate. Raises ModelInvalid."""
        key = "rope.dimension_count"
        dims = self.integer(key, low=2, high=head_dim, default=head_dim)
        if dims % 2:
            raise self.fields.fail(f"{self.arch}.{key}", f"{dims} dimensions rotate; pairs are needed")
        return dims

    def sliding_layers(self, *, full_every: int) -> list[bool]:
        """Return which layers slide: by their list, by a period that the file gives, or all but every n-th.

        Raises ModelInvalid.
        """
        key, layers = "attention.sliding_window_pattern", self.num_layers
        name = f"{self.arch}.{key}"
        if not is_list(self.fields.raw(name)):
            every = self.integer(key, high=1 << 20, default=full_every)
            return [(layer + 1) % every != 0 for layer in range(layers)]
        slides = self.fields.items(name)
        if len(slides) != layers or not all(item in (0, 1) for item in slides):
            raise self.fields.fail(name, f"{layers} times true or false is needed, it has {len(slides)}")
        return [bool(item) for item in slides]

    def window(self) -> int:
        """Return the window of layers that slide, in tokens; 0: none does. Raises ModelInvalid."""
        return self.integer("attention.sliding_window", low=0, high=MAX_CONTEXT, default=0)

    def temperature(self) -> Temperature | None:
        """Return how queries grow with their position; call it after ``rope``. Raises ModelInvalid."""
        growth = self.number("attention.temperature_scale", low=0.0, high=1e6, default=0.0)
        key = "rope.scaling.original_context_length"
        return Temperature(growth=growth, context=self.integer(key, high=MAX_CONTEXT)) if growth else None

    def sliding_rope(self, default_theta: float) -> Rope:
        """Return the rotary embedding of layers that slide, where it is unlike the others'. Raises ModelInvalid."""
        return Rope(theta=self.number("rope.freq_base_swa", low=MIN_THETA, high=MAX_THETA, default=default_theta))

    def router(
        self,
        score: Literal["softmax", "sigmoid"],
        *,
        correction: bool = False,
        group_score: Literal["max", "top2"] = "max",
    ) -> Router:
        """Return the router of an architecture whose scores are ``score``.

        Raises ModelInvalid, and ArchitectureUnsupported for other scores.
        """
        kinds = {_GATING[score], 0}
        if self.integer("expert_gating_func", low=0, high=1 << 20, default=0) not in kinds:
            raise unsupported(f"{self.arch}.expert_gating_func", [f"{_GATING[score]} ({score})"])
        return Router(
            score=score,
            normalised=self.fields.flag(f"{self.arch}.expert_weights_norm", default=True),
            scale=self.number("expert_weights_scale", low=0.0, high=1e6, default=1.0) or 1.0,
            correction=correction,
            groups=self.integer("expert_group_count", high=MAX_EXPERTS, default=1),
            groups_used=self.integer("expert_group_used_count", high=MAX_EXPERTS, default=1),
            group_score=group_score,
        )

    def proportional_rope(self, dims: int) -> Rope:
        """Return the rotary embedding whose file holds a factor for each pair: 1, or 1e30 for pairs that do not turn.

        Raises ModelInvalid.
        """
        factors = self._factors.get(ROPE_FACTORS[0], ())
        turning = sum(factor == 1 for factor in factors)
        if len(factors) != dims // 2 or any(factor < _NEVER for factor in factors[turning:]):
            raise self.fields.fail(ROPE_FACTORS[0], f"ones and then {_NEVER:g} are needed for {dims // 2} pairs")
        theta = self.number("rope.freq_base", low=MIN_THETA, high=MAX_THETA, default=10_000.0)
        return Rope(theta=theta, scaling="proportional", rotated_share=turning / len(factors))

    def rope(self, dims: int) -> Rope:
        """Return the rotary embedding of ``dims`` dimensions of a head; its scaling stretches ``context``.

        Raises ModelInvalid.
        """
        declared = self._declared
        rope = gguf_rope(self.fields, self.arch, dims=dims, context_length=declared, factors=self._factors)
        self.context = extended_context(rope, declared)
        return rope

    @property
    def own_layers(self) -> int:
        """Number of layers without those that predict one token more each. Raises ModelInvalid."""
        return self.num_layers - self._later

    @property
    def _later(self) -> int:
        return self.integer("nextn_predict_layers", low=0, high=self.num_layers - 1, default=0)

    def mtp(self, layer: LayerSpec) -> LayerSpec | None:
        """Return the first layer that predicts one token more; None without. Raises ModelInvalid."""
        return replace(layer, mtp=True) if self._later and layer.attention is not None else None

    def inner(self, key: str = "feed_forward_length") -> int:
        """Return the width of a feed-forward part. Raises ModelInvalid."""
        return self.integer(key, high=MAX_INTERMEDIATE)

    def experts(self, key: str) -> int:
        """Return a number of experts. Raises ModelInvalid."""
        return self.integer(key, high=MAX_EXPERTS)

    def attention(self, size: int, rope: Rope | None) -> Attention:
        """Return attention with heads of ``size``. Raises ModelInvalid."""
        return Attention(num_heads=self.num_heads, num_kv_heads=self.kv_heads(), head_dim=size, rope=rope)

    def mixture(self, inner: int, router: Router, *, shared_inner: int = 0) -> Experts:
        """Return the experts. Raises ModelInvalid."""
        found = Experts(
            count=self.experts("expert_count"),
            used=self.experts("expert_used_count"),
            inner=inner,
            router=router,
            shared_inner=shared_inner,
        )
        keys = ("expert_used_count", "expert_group_count", "expert_group_used_count")
        return checked_experts(self.fields, found, ExpertKeys(*(f"{self.arch}.{key}" for key in keys)))

    def norm(self) -> Norm:
        """Return the RMSNorm. Raises ModelInvalid."""
        return Norm(eps=self.number("attention.layer_norm_rms_epsilon", low=0.0, high=0.1))

    def biased(self, *parts: str) -> bool:
        """Return whether the first layer has a bias of one of these parts."""
        return any(f"blk.0.{part}.bias" in self.tensors for part in parts)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return "output.weight" not in self.tensors


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models, and how its files describe them."""

    name: str  # ``ModelConfig.architecture``, and transformers' ``model_type``
    hf_class: str  # class name in ``architectures`` of ``config.json``
    from_hf: Callable[[HfShape], FamilySpec]
    default_context: int  # default of transformers' class, in tokens
    models: str  # well-known ones, for people
    naming: str = ""  # how Hugging Face's files name the tensors, see ``ModelConfig``
    gguf_naming: str = ""  # how GGUF files name them, once GGUF's own names are translated
    text_key: str = ""  # key of ``config.json`` that describes the text model of several models; empty: its top
    gguf: str = ""  # ``general.architecture``; empty: no GGUF files are read
    from_gguf: Callable[[GgufShape], FamilySpec] | None = None
    text_types: tuple[str, ...] = ()  # ``model_type`` of that description; (): any
    # Values of keys that published files leave out.
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    own_code: bool = False  # published with code (``auto_map``) that transformers has taken over
    gguf_parts: Mapping[str, str] = field(default_factory=dict[str, str])  # names within a layer, unlike other families
    gguf_permuted: bool = False  # GGUF files have rotary pairs of q and k side by side
    with_experts: bool | None = False  # None: some models have experts


def unsupported(found: str, supported: Sequence[str]) -> ArchitectureUnsupported:
    """Return the error for a value that no backend computes."""
    return ArchitectureUnsupported(
        f"'{found[:80]}' is not supported",
        fact=f"supported: {', '.join(supported)}",
        next_step="choose another model, e.g. edgepipe models pull demo",
    )


def is_list(value: object) -> bool:
    """Return whether a value of a config or of GGUF metadata is a list, or an array of numbers."""
    return isinstance(value, list | tuple) or hasattr(value, "tolist")


def sliding(slides: Sequence[bool], window: int, context: int) -> tuple[int | None, ...]:
    """Return the window of each layer. A window as large as the context has no effect and is dropped."""
    used = window and window < context
    return tuple(window if slide and used else None for slide in slides)


def windowed(layer: LayerSpec, windows: Sequence[int | None]) -> tuple[LayerSpec, ...]:
    """Return a layer with each of these windows."""
    kinds = {window: layer.with_attention(window=window) for window in set(windows)}
    return tuple(kinds[window] for window in windows)
