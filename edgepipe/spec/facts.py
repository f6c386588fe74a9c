"""Basic facts of a model for all packages: its shape, its layer ranges, the size of its KV.

This module reads no files; ``edgepipe.spec.config`` builds a ``ModelConfig`` from ``config.json`` or GGUF metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from edgepipe.errors import ConfigInvalid, PlanInvalid
from edgepipe.spec.kv_forms import vector_bytes
from edgepipe.spec.layer_spec import LayerSpec, Norm
from edgepipe.spec.quantisation import Quantisation

_STATE_VALUE_BYTES = 4


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

    @property
    def shown(self) -> str:
        """The range for people: ``0-14``, and ``29`` for a single layer."""
        return str(self) if self.end - self.start > 1 else str(self.start)


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
class ModelConfig:
    """The shape of a decoder-only model. Immutable; its values are checked where it is built."""

    architecture: str  # the family, lower case: "llama", "qwen3_moe"
    hidden_size: int
    vocab_size: int
    context_length: int  # tokens of one sequence, including the rope's scaling
    layers: tuple[LayerSpec, ...]
    norm: Norm
    tied_embeddings: bool = False
    embedding_scale: float = 1.0  # factor on embeddings as they enter the first layer
    logit_scale: float = 1.0  # factor on logits
    logit_softcap: float = 0.0  # logits become ``c * tanh(logit / c)``; 0: they stay
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    quantisation: Quantisation | None = None  # None: every weight is one stored tensor
    naming: str = ""  # naming of the stored tensors, a key of ``edgepipe.spec.naming.NAMINGS``
    mtp: LayerSpec | None = None  # a layer that predicts one token more, which the files hold and ``layers`` lacks

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def has_mtp(self) -> bool:
        """Whether the last of ``layers`` predicts one token more; see ``with_mtp``."""
        return self.layers[-1].mtp

    def with_mtp(self) -> ModelConfig:
        """Return the config whose last layer is ``mtp``; a model without such a layer stays."""
        return self if self.mtp is None else replace(self, layers=(*self.layers, self.mtp), mtp=None)

    def holding(self, slices: Iterable[Slice]) -> ModelConfig:
        """Return the config that has the slices' layers: ``with_mtp`` if one of them ends behind ``layers``."""
        return self.with_mtp() if any(part.layers.end > self.num_layers for part in slices) else self

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

    def kv_bytes_per_token(self, layers: Iterable[int] | None = None, *, form: str) -> int:
        """Return the bytes of one token's keys and values in some layers, by index; None: in all.

        form  see ``vector_bytes``

        Raises ConfigInvalid for another form, and for heads that it does not keep.
        """
        specs = self.layers if layers is None else [self.layers[index] for index in layers]
        parts = [spec.attention for spec in specs if spec.attention is not None]
        return sum(
            part.kv_vectors * part.num_kv_heads * vector_bytes(form, part.head_dim, part.latent_width) for part in parts
        )

    def keeps_kv_as(self, form: str) -> bool:
        """Return whether the model's heads have a size that a form of KV can keep."""
        try:
            self.kv_bytes_per_token(form=form)
        except ConfigInvalid:
            return False
        return True

    def state_bytes(self, layers: Iterable[int] | None = None) -> int:
        """Return the bytes of one sequence's state in some layers, by index; None: in all."""
        specs = self.layers if layers is None else [self.layers[index] for index in layers]
        return _STATE_VALUE_BYTES * sum(spec.state_values() for spec in specs)


def whole_slice(config: ModelConfig) -> Slice:
    """Return the slice of the whole model."""
    return Slice(index=0, layers=LayerRange(0, config.num_layers), embedding=True, head=True)
