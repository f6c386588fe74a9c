"""The rotary embedding, with the interface of mlx-lm's attention.

mlx-lm's rope modules ignore some fields that change the result (yarn's ``truncate`` and ``attention_factor``), and one
of them takes no offset per row. So edgepipe computes the frequencies, in float64, once per load.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from edgepipe.model.facts import ModelConfig
from edgepipe.model.rope import Floats, rotary_frequencies


class RotaryEmbedding(nn.Module):
    """Rotates ``[T, heads, 1, D]`` by one position per row."""

    def __init__(self, *, dims: int, wavelengths: Floats, amplitude: float) -> None:
        super().__init__()
        self.dims = dims
        self._amplitude = amplitude
        self._wavelengths = mx.array(wavelengths.astype(np.float32))  # the underscore marks it as not a weight

    def __call__(self, x: mx.array, offset: mx.array | int = 0) -> mx.array:
        """Rotate x [T, heads, 1, D]; offset [T] int32: the rows' positions."""
        if self._amplitude != 1.0:
            x = x * self._amplitude
        return mx.fast.rope(
            x, self.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._wavelengths
        )


def make_rope(config: ModelConfig) -> RotaryEmbedding:
    """Make the model's rotary embedding. Raises ArchitectureUnsupported for an unknown scaling."""
    frequencies, amplitude = rotary_frequencies(config)
    return RotaryEmbedding(dims=config.head_dim, wavelengths=1.0 / frequencies, amplitude=amplitude)
