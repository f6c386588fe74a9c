"""What enters and leaves a slice, in the types of the link.

T packed rows, H hidden, R rows that need logits, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.backend.types import ActivationType
from edgepipe_torch.layers.decoder import Decoder
from edgepipe_torch.layers.transfer import Transfer


class SliceEnds:
    """Both ends of one slice."""

    def __init__(self, decoder: Decoder, transfer: Transfer, activation_type: ActivationType) -> None:
        self._decoder = decoder
        self._transfer = transfer
        self._is_bf16 = activation_type is ActivationType.BF16

    @property
    def travels(self) -> torch.dtype:
        """The type of activations between stages."""
        return torch.bfloat16 if self._is_bf16 else torch.float32

    def fill(self, inputs: npt.NDArray[Any], hidden: Tensor) -> None:
        """Write the input to hidden [T, H] in the compute dtype, which the layers overwrite."""
        if self._decoder.part.embedding:
            self._decoder.embed(self._transfer.upload(inputs.astype(np.int64)), hidden)
        elif self._is_bf16:
            # A copy, since the caller's array may be read-only.
            bits = self._transfer.upload(np.array(inputs.view(np.int16)))
            hidden.copy_(bits.view(torch.bfloat16))
        else:
            hidden.copy_(self._transfer.upload(np.array(inputs)))

    def encode(self, hidden: Tensor) -> Tensor:
        """Copy the activations to a new tensor in the link's type; bf16 as int16."""
        if self._is_bf16:
            return hidden.to(torch.bfloat16, copy=True).view(torch.int16)
        return hidden.to(torch.float32, copy=True)
