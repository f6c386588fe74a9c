"""Basic facts of a model for all packages: its shape, its layer ranges, the size of its KV.

This module reads no files; ``edgepipe.model.config`` builds a ``ModelConfig`` from ``config.json`` or GGUF metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edgepipe.errors import ConfigInvalid, PlanInvalid
from edgepipe.model.quantisation import Quantisation

KV_8BIT = "8bit"
"""KV as int8 codes with a float16 scale per token, kv head, and key or value."""

_KV_VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, KV_8BIT: 1}
_KV_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Decoder layers ``[start, end)``; printed inclusively (``0-14``)."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise PlanInvalid(
                f"layers {self.start}-{self.end - 1} are not a range",
                fact="a range holds at least one layer",
                next_step="write first and last layer, as in 0-14",
            )

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.end

    def __str__(self) -> str:
        return f"{self.start}-{self.end - 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A run of layers that a stage executes as a unit. The first slice also embeds, the last has norm and head."""

    index: int  # position in the order that a token passes; 0 embeds
    layers: LayerRange
    embedding: bool
    head: bool


def make_slices(ranges: list[LayerRange], num_layers: int) -> tuple[Slice, ...]:
    """Make slices of ranges that cover ``[0, num_layers)`` once, in order. Raises PlanInvalid with the layer."""
    expected = 0
    for layers in ranges:
        if layers.start > expected:
            raise PlanInvalid(
                f"the plan leaves out {_layers(expected, layers.start - 1)}",
                fact=f"the model has layers 0-{num_layers - 1}",
                next_step="let each part begin where the previous part ends",
            )
        if layers.start < expected:
            raise PlanInvalid(
                f"the plan has {_layers(layers.start, min(expected, layers.end) - 1)} twice",
                fact=f"the previous part ends at layer {expected - 1}",
                next_step="let each part begin where the previous part ends",
            )
        expected = layers.end
    if expected != num_layers:
        raise PlanInvalid(
            f"the plan covers {expected} layers, the model has {num_layers}",
            fact=f"the model has layers 0-{num_layers - 1}",
            next_step=f"let the last part end at layer {num_layers - 1}",
        )
    last = len(ranges) - 1
    return tuple(Slice(index=i, layers=layers, embedding=i == 0, head=i == last) for i, layers in enumerate(ranges))


def _layers(first: int, last: int) -> str:
    return f"layers {first}-{last}" if first != last else f"layer {first}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding and its scaling, with the field names of Hugging Face's ``rope_scaling``."""

    theta: float = 10_000.0
    scaling: str = "default"  # default | linear | dynamic | llama3 | yarn | longrope
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only model. Immutable; its values are checked where it is built."""

    architecture: str  # "llama" | "mistral" | "qwen2" | "qwen3": the family, lower case
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int  # tokens of one sequence, including the rope's scaling
    rms_norm_eps: float
    rope: Rope
    qkv_bias: bool = False
    output_bias: bool = False  # bias of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k before rotary (Qwen3)
    sliding_windows: tuple[int | None, ...] = ()  # per layer: tokens that a query sees incl. itself; (): no windows
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    quantisation: Quantisation | None = None  # None: every weight is one stored tensor

    def context_for(self, asked_tokens: int) -> int:
        """Return the context length for a request of ``asked_tokens`` (0: the model's).

        Raises ConfigInvalid if the model supports fewer.
        """
        if asked_tokens > self.context_length:
            raise ConfigInvalid(
                f"--context {asked_tokens} is more than the model supports",
                fact=f"it supports {self.context_length} tokens",
                next_step=f"give --context {self.context_length} or less, or leave it out",
            )
        return asked_tokens or self.context_length

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, or None."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def kv_bytes_per_token(self, *, num_layers: int, form: str) -> int:
        """Return the bytes of one token's keys and values in ``num_layers`` layers.

        form  the dtype of the values ("float32" | "float16" | "bfloat16"), or ``KV_8BIT``

        Raises ConfigInvalid for another form.
        """
        if form not in _KV_VALUE_BYTES:
            raise ConfigInvalid(f"KV cannot be kept as '{form}'", fact=f"it can be {', '.join(_KV_VALUE_BYTES)}")
        per_head = self.head_dim * _KV_VALUE_BYTES[form] + (_KV_SCALE_BYTES if form == KV_8BIT else 0)
        return 2 * num_layers * self.num_kv_heads * per_head

    def layer_parameters(self) -> int:
        """Return the number of weights in one decoder layer, including norms and biases."""
        q, kv, h, i = (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.hidden_size,
            self.intermediate_size,
        )
        count = h * (q + 2 * kv) + q * h + 3 * h * i + 2 * h
        count += (q + 2 * kv) * self.qkv_bias + h * self.output_bias + (2 * i + h) * self.mlp_bias
        return count + 2 * self.head_dim * self.qk_norm

    def slice_parameters(self, part: Slice) -> int:
        """Return the number of weights in a slice. A tied head counts in the slice that uses it."""
        table = self.vocab_size * self.hidden_size
        count = len(part.layers) * self.layer_parameters()
        count += table if part.embedding else 0
        if part.head:
            count += self.hidden_size + (0 if part.embedding and self.tied_embeddings else table)
        return count
