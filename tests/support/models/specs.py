"""Parts of layers that a test knows to be there."""

from __future__ import annotations

from edgepipe.spec.layer_spec import Attention, LayerSpec


def attention_of(layer: LayerSpec) -> Attention:
    """A layer's attention."""
    assert layer.attention is not None
    return layer.attention
