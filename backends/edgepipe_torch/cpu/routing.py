"""The choice of experts on a CPU, with the same bits for a row in any batch."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from edgepipe_torch.layers import routing
from edgepipe_torch.layers.routing import Choose

_LANES = 64  # a multiple of the floats that torch's loops over vectors take at once: 32 with AVX-512, 16 with AVX2
_SERIAL = 1 << 14  # elements that torch does not share among threads: it does from 32768 on


def _sigmoid(logits: Tensor) -> Tensor:
    """Return the sigmoid of logits [T, E], with the same bits for a row in any batch.

    torch computes most elements in vectors, and those that fill no vector by another function, which rounds
    differently. Here every element is part of a vector.
    """
    count = logits.numel()
    if count % _LANES == 0 and count <= _SERIAL:
        return logits.sigmoid()
    values = F.pad(logits.flatten(), (0, -count % _LANES))
    for part in values.split(_SERIAL):
        part.sigmoid_()
    return values[:count].view_as(logits)


choose: Choose = partial(routing.choose, sigmoid=_sigmoid)
