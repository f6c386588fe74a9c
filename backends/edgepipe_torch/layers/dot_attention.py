"""Attention of one sequence by torch's products, with what its fused kernels lack: capped logits and sinks.

n rows, L visible keys, Hkv kv heads, G query heads for each of them, D head dim, V numbers of a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from edgepipe_torch.layers.head_shape import LayerHeads

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, LayerHeads, Tensor | None], Tensor]
"""Attends as ``attend`` does, by a device's kernels."""

FusedAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, Tensor | None], Tensor]
"""Attends by one kernel: queries [batch, heads, n, D], keys, values, mask, scale, sinks with the axes before D."""


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    heads: LayerHeads,
    sinks: Tensor | None,
    *,
    with_sinks: FusedAttention | None = None,
) -> Tensor:
    """Return the outputs [Hkv, G, n, V] of some or all of a layer's kv heads.

    queries  [Hkv, G, n, D]
    keys     [Hkv, L, D], same type; values [Hkv, L, V]
    mask     [n, L], added to logits; None: every row sees all keys
    sinks    [Hkv, G] float32, or None

    ``with_sinks``: the device's kernel for sinks.
    """
    fused = without_sinks if sinks is None else with_sinks
    if heads.softcap or fused is None or (sinks is not None and heads.value_width):
        return _by_products(queries, keys, values, mask, heads, sinks)
    if mask is None and queries.shape[2] == 1:  # the group's heads act as rows
        turned = None if sinks is None else sinks.unsqueeze(1)
        own = queries.transpose(1, 2)
        return fused(own, keys.unsqueeze(1), values.unsqueeze(1), None, heads.scale, turned).transpose(1, 2)
    shape = (-1, queries.shape[1], -1, -1)  # stride 0 over G
    keys, values = keys.unsqueeze(1).expand(shape), values.unsqueeze(1).expand(shape)
    return fused(queries, keys, values, mask, heads.scale, None if sinks is None else sinks.unsqueeze(2))


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Cap logits in place; a cap of 0 leaves them."""
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


def shares(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the keys' shares [..., L] for logits [..., L] float32 and sinks [...]."""
    if sinks is None:
        return torch.softmax(logits, -1)
    column = sinks.unsqueeze(-1).expand(*logits.shape[:-1], 1)
    return torch.softmax(torch.cat([logits, column], -1), -1)[..., :-1]


def beside_sinks(total: Tensor, sinks: Tensor) -> Tensor:
    """Return the part of a softmax that its keys keep beside sinks: ``e^t / (e^t + e^s)``.

    total: t, the log of the sum of the keys' exponentials.
    """
    return torch.sigmoid(total - sinks)


def without_sinks(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None
) -> Tensor:
    """Attend by torch's kernel for any device; there are no sinks."""
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


def _by_products(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, heads: LayerHeads, sinks: Tensor | None
) -> Tensor:
    kv_heads, group, rows, _ = queries.shape
    logits = torch.matmul(queries.flatten(1, 2), keys.transpose(1, 2)).float().mul_(heads.scale)
    logits = capped(logits, heads.softcap).view(kv_heads, group, rows, -1)
    logits = logits if mask is None else logits + mask
    weights = shares(logits, None if sinks is None else sinks.unsqueeze(2))
    return torch.matmul(weights.to(values.dtype).flatten(1, 2), values).view(kv_heads, group, rows, -1)
