"""What a decoder layer is made of: a mixer of tokens, a feed-forward part, norms. Families are written in these terms.

Backends build layers from specs; they know no families.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
"""Functions of gate g and up u: ``silu(g) * u``, ``gelu(g) * u`` with tanh's approximation, or gpt-oss's
``min(g, 7) * sigmoid(1.702 g) * (clip(u, -7, 7) + 1)``. Without a gate: ``relu(u) ** 2``."""

NormPlaces = Literal["before", "after", "both", "parallel"]
"""Norms of a layer: before attention and feed-forward (Llama), after both (OLMo 2), before and after both (Gemma 2), or
one norm before attention and feed-forward side by side (Cohere)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding and its scaling, with the field names of Hugging Face's ``rope_scaling``."""

    theta: float = 10_000.0
    scaling: str = "default"  # default | linear | dynamic | llama3 | yarn | longrope | proportional
    factor: float = 1.0
    original_context: int = 0  # context the model was trained on before scaling; 0: unknown
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: derived
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    short_factor: tuple[float, ...] = ()  # longrope, one per rotary pair
    long_factor: tuple[float, ...] = ()  # longrope, one per rotary pair
    rotated_share: float = 1.0  # proportional: share of the rotary pairs that turn, the fastest ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """Queries at position p are multiplied with ``1 + growth * ln(1 + p // context)`` (Llama 4, Ministral 3)."""

    growth: float
    context: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """How all norms of a model compute."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"  # layer: the mean is subtracted, too
    plus_one: bool = False  # the files hold the weight minus one (Gemma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, section 2.1), in its absorbed form.

    A token keeps one vector for all heads: a normalised latent, then a key that rotates. Values are the latent. Queries
    are multiplied with the keys' part of kv_b before attention, heads' outputs with its values' part after it.
    """

    query_rank: int  # features between the two query projections; 0: there is one projection
    kv_rank: int  # features of the latent
    nope_dim: int  # dimensions of a head's projected query that do not rotate
    rope_dim: int  # dimensions of a head's projected query that rotate
    value_dim: int  # dimensions of a head's output
    joined: bool = True  # kv_b is one weight [heads * (nope_dim + value_dim), kv_rank]; else see ``layout``
    norm_eps: float = 1e-6  # epsilon of both latents' norms


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention. Latent attention is that of one key-value head [latent, rotating key]."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None  # None: positions do not enter
    rotary_dim: int = 0  # leading dimensions of a head (latent: trailing) that rotate; 0: all
    interleaved: bool = False  # the files' rotary pairs are (0, 1), (2, 3), ...; else (0, D/2), (1, D/2 + 1), ...
    window: int | None = None  # tokens that a query sees, including itself
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""  # RMSNorm of q and k before rotary: per head, or over all heads
    sinks: bool = False  # a learned logit per head joins the softmax and takes no value (gpt-oss)
    softcap: float = 0.0  # logits become ``c * tanh(logit / c)``; 0: they stay
    scale: float = 0.0  # factor on q k; 0: ``head_dim ** -0.5``
    temperature: Temperature | None = None  # None: queries of all positions are scaled alike
    latent: Latent | None = None
    values_from_keys: bool = False  # values are the key projection's product; there is no value projection
    value_norm: bool = False  # RMSNorm of each head's value, without weights
    gated: bool = False  # each head's query is followed by a gate [D]; the sigmoid of it multiplies the head's output

    @property
    def query_width(self) -> int:
        """Numbers of a token's queries, as attention takes them."""
        return self.num_heads * self.head_dim

    @property
    def output_width(self) -> int:
        """Number of features that the output projection takes."""
        return self.num_heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def kv_vectors(self) -> int:
        """Vectors of the head's size that a token keeps per key-value head: a key and a value, or one for both."""
        return 1 if self.latent else 2

    @property
    def latent_width(self) -> int:
        """Leading dimensions of a key that are the value; 0: values are kept, too."""
        return self.latent.kv_rank if self.latent else 0

    @property
    def kv_width(self) -> int:
        """Out features of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def rotated(self) -> int:
        """Dimensions of a head that rotate."""
        return 0 if self.rope is None else self.rotary_dim or self.head_dim

    @property
    def logit_scale(self) -> float:
        """The factor on q k."""
        return self.scale or 1 / sqrt(self.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """A gated delta rule (Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, section 3.1), as in Qwen3-Next.

    Queries, keys and values pass a causal convolution per channel, then SiLU. A value head keeps a matrix [K, V]. With
    normalised key k, value v, decay a = exp(-exp(A_log) * softplus(alpha + dt_bias)) and b = sigmoid(beta), a token
    makes it ``a S + b k (v - (a S)^T k)^T``; the head's output is ``S^T q``, normalised and multiplied with SiLU(z).
    """

    key_heads: int  # each serves value_heads / key_heads value heads that follow one another
    value_heads: int
    key_dim: int  # K
    value_dim: int  # V
    taps: int  # tokens that the convolution reads, the newest included
    tiled: bool = False  # value head v uses key head v % key_heads instead, as llama.cpp orders Qwen3.5's value heads

    @property
    def channels(self) -> int:
        """Numbers that the convolution takes: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """See ``Recurrent``."""
        return (self.taps - 1, self.channels), (self.value_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """A selective state space (Dao, Gu 2024, Transformers are SSMs, section 7), as in Nemotron-H and Granite 4.

    x, B and C pass a causal convolution per channel, then SiLU. A head keeps a matrix [D, N]. With
    dt = clip(softplus(dt + dt_bias)), a token makes it ``exp(-exp(A_log) dt) S + dt x B^T``; the head's output is
    ``S C + D x``. It is multiplied with SiLU(z), then normalised over each group.
    """

    heads: int
    head_dim: int  # D
    groups: int  # number of groups; a group's heads share B and C
    state_dim: int  # N
    taps: int  # tokens that the convolution reads, the newest included
    conv_bias: bool = True
    bias: bool = False  # both projections have a bias
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def channels(self) -> int:
        """Numbers that the convolution takes: x, B, C."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_dim

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """See ``Recurrent``."""
        return (self.taps - 1, self.channels), (self.heads, self.head_dim, self.state_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """A gated causal convolution per channel, as in LFM2: ``out(C * conv(B * x))`` with [B, C, x] = in(hidden)."""

    channels: int
    taps: int  # tokens that the convolution reads, the newest included
    bias: bool = False  # the convolution and both projections have a bias

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """See ``Recurrent``."""
        return ((self.taps - 1, self.channels),)


Recurrent = DeltaNet | Mamba2 | ShortConv
"""A mixer that keeps a state of fixed size instead of KV: float32 numbers of ``state_shapes``, all zero before a
sequence's first token. The first are the convolution's last inputs, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A feed-forward part."""

    inner: int  # features between its projections
    activation: Activation = "silu"
    bias: bool = False
    # Gate and up projection; else one projection up and one down, the activation between (Nemotron-H).
    gated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a token chooses its experts, in float32.

    Scores are a softmax or a sigmoid of the logits. The chosen are those of the highest score plus correction; their
    weights are the scores, without the correction.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True  # weights of the chosen experts sum to 1, before ``scale``
    scale: float = 1.0
    bias: bool = False  # the logits have a bias
    correction: bool = False  # a learned number per expert is added to its score to choose experts
    groups: int = 1  # number of groups of equal size that the experts form
    groups_used: int = 1  # number of best groups; a token chooses its experts from these only
    group_score: Literal["max", "top2"] = "max"  # a group's score: its best expert's, or the sum of its two best
    # The router's input passes an RMSNorm with this epsilon, whose weights count ``H ** -0.5``. None: no norm.
    input_eps: float | None = None
    expert_scales: bool = False  # the weights of the chosen are multiplied with a learned number per expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of feed-forward parts, of which each token uses some."""

    count: int
    used: int  # experts that each token uses
    inner: int  # features between an expert's projections
    router: Router
    activation: Activation = "silu"
    bias: bool = False
    shared_inner: int = 0  # features of the expert that every token uses besides; 0: none
    shared_gated: bool = False  # the shared expert's output is multiplied with a sigmoid of a learned product
    gated: bool = True  # gate and up projection; else all experts have one projection up and one down (Nemotron 3)
    latent: int = 0  # features that experts read and write, between a product of their own on either side; 0: H


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer. It has attention, or a recurrent mixer, or no mixer; a feed-forward part, or none."""

    attention: Attention | None = None
    recurrent: Recurrent | None = None
    dense: Dense | None = None
    experts: Experts | None = None  # a layer with ``dense`` too adds both outputs
    norms: NormPlaces = "before"
    residual_scale: float = 1.0  # factor on what attention and feed-forward add (Granite)
    own_norms: bool = False  # dense part and experts have norms of their own, and the router reads what enters them
    output_scaled: bool = False  # its output is multiplied with a learned number
    # It predicts the token after the next one (DeepSeek-AI 2024, DeepSeek-V3, section 2.2). Its input at a position is
    # ``eh_proj [enorm(e), hnorm(h)]``: e embeds the next token, h is the model's output behind the final norm. Its own
    # output passes ``shared_head.norm``, and then the model's head.
    mtp: bool = False

    @property
    def mixes(self) -> bool:
        """Whether the layer mixes tokens."""
        return self.attention is not None or self.recurrent is not None

    @property
    def feeds(self) -> bool:
        """Whether the layer has a feed-forward part."""
        return self.dense is not None or self.experts is not None

    @property
    def window(self) -> int | None:
        """Tokens that a query of its attention sees; None: all, or the layer has no attention."""
        return self.attention.window if self.attention else None

    def with_attention(self, **changes: Any) -> LayerSpec:
        """Return the layer with these fields of its attention changed; a layer without attention stays."""
        return self if self.attention is None else replace(self, attention=replace(self.attention, **changes))

    def kv_values(self) -> int:
        """Return the numbers that one token's keys and values hold."""
        return self.attention.kv_vectors * self.attention.kv_width if self.attention else 0

    def state_values(self) -> int:
        """Return the numbers that a sequence's state holds."""
        return sum(prod(shape) for shape in self.recurrent.state_shapes) if self.recurrent else 0
