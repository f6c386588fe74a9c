"""Layers of Gemma 4, for its readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgepipe.spec.layer_spec import Attention, Dense, Experts, LayerSpec, Rope, Router

LOCAL = Rope()
WHOLE = Rope(theta=1_000_000.0, scaling="proportional", rotated_share=0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Layers:
    """What the layers of a model are made of."""

    local: Attention  # attention of layers that slide; ``layers`` sets the window of each
    whole: Attention
    dense: Dense
    experts: Experts | None

    def layers(self, slides: Sequence[bool], windows: Sequence[int | None]) -> tuple[LayerSpec, ...]:
        """Return the layers; ``slides``: which are local."""
        return tuple(
            LayerSpec(
                attention=replace(self.local, window=window) if slide else self.whole,
                dense=self.dense,
                experts=self.experts,
                norms="both",
                own_norms=self.experts is not None,
                output_scaled=True,
            )
            for slide, window in zip(slides, windows, strict=True)
        )


def attention(num_heads: int, kv_heads: int, size: int, rope: Rope) -> Attention:
    """Return the attention that all layers have but for their sizes."""
    return Attention(
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        rope=rope,
        qk_norm="head",
        scale=1.0,
        value_norm=True,
    )


def router(eps: float) -> Router:
    """Return the router of models with experts."""
    return Router(input_eps=eps, expert_scales=True)
