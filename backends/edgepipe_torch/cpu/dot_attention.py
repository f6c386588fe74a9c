"""Attention of one sequence by torch's products on a CPU, whose kernel leaves room for sinks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from edgepipe_torch.layers import dot_attention
from edgepipe_torch.layers.dot_attention import Attend, beside_sinks


def _with_sinks(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None
) -> Tensor:
    assert sinks is not None
    found, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # the public function drops the total
        queries, keys, values, attn_mask=mask, scale=scale
    )
    return found * beside_sinks(total, sinks).unsqueeze(-1)


attend: Attend = partial(dot_attention.attend, with_sinks=_with_sinks)
