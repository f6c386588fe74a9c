"""Heads of a layer as attention and the KV pool see them, and what compiled kernels compute of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Attention


class _Kind(NamedTuple):
    """What attention sees of a layer, besides its keys, values and sinks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_width: int
    window: int | None
    softcap: float
    scale: float
    rotates_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerHeads:
    """One layer's heads. Layers of one kind share KV storage, and what a step prepares for attention."""

    layer: int  # counts the slice's layers with attention
    kind: int  # counts the slice's kinds, in the order of their first layers
    place: int  # index among the layers of its kind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_width: int  # leading dimensions of a key that are its value; 0: values are apart
    window: int | None  # tokens that a query sees, including itself
    softcap: float  # 0: none
    scale: float  # factor on q k
    rotates_whole: bool  # every dimension of q and k rotates
    sinks: Tensor | None  # [Hq] float32
    out_dim: int  # numbers of one head's output
    is_plain: bool  # a softmax of scaled products alone weighs the values

    @property
    def entries(self) -> int:
        """Vectors of ``head_dim`` numbers that a token keeps: keys, then values."""
        return self.num_kv_heads if self.value_width else 2 * self.num_kv_heads

    @property
    def grouped_sinks(self) -> Tensor | None:
        """The sinks [Hkv, G]."""
        return None if self.sinks is None else self.sinks.view(self.num_kv_heads, -1)


def layer_heads(attentions: Sequence[Attention], sinks: Sequence[Tensor | None] = ()) -> list[LayerHeads]:
    """Describe the heads of a slice's layers; ``sinks`` of each layer, or none."""
    kinds: dict[_Kind, int] = {}
    counts: dict[int, int] = {}
    found: list[LayerHeads] = []
    for layer, attention in enumerate(attentions):
        alike = _kind(attention)
        kind = kinds.setdefault(alike, len(kinds))
        place = counts[kind] = counts.get(kind, -1) + 1
        own = sinks[layer] if sinks else None
        found.append(
            LayerHeads(
                layer=layer,
                kind=kind,
                place=place,
                sinks=own,
                out_dim=alike.value_width or alike.head_dim,
                is_plain=not alike.softcap and own is None,
                **alike._asdict(),
            )
        )
    return found


def by_kind(heads: Sequence[LayerHeads]) -> list[list[LayerHeads]]:
    """Return the layers of each kind, in order."""
    found: list[list[LayerHeads]] = [[] for _ in range(1 + max((each.kind for each in heads), default=-1))]
    for each in heads:
        found[each.kind].append(each)
    return found


def kernels_fit(config: ModelConfig) -> bool:
    """Return whether compiled kernels compute a model's norms and, in some layers at least, attention."""
    sizes = all(spec.attention.head_dim % 8 == 0 for spec in config.layers if spec.attention is not None)
    return sizes and config.hidden_size % 8 == 0 and config.norm.kind == "rms"


def _kind(attention: Attention) -> _Kind:
    return _Kind(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        value_width=attention.latent_width,
        window=attention.window,
        softcap=attention.softcap,
        scale=attention.logit_scale,
        rotates_whole=attention.rotated == attention.head_dim,
    )
