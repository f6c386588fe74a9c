"""The rotary embedding of a layer, with a position per row.

mlx-lm's rope modules ignore some fields that change the result (yarn's ``truncate`` and ``attention_factor``), and one
of them takes no offset per row. So edgepipe computes the frequencies, in float64, once per load.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from edgepipe.spec.layer_spec import Attention
from edgepipe.spec.rope import Floats, rotary_frequencies


class RotaryEmbedding:
    """Rotates the leading dimensions of heads [T, heads, 1, D], and scales them."""

    def __init__(self, wavelengths: Floats, *, head_dim: int, interleaved: bool, amplitude: float) -> None:
        """``wavelengths``: of each rotary pair, tokens per radian. See ``layer_spec.Attention``."""
        self._rotated = 2 * len(wavelengths)
        self._interleaved = interleaved
        self._wavelengths = mx.array(wavelengths.astype(np.float32))
        factors = np.where(np.arange(head_dim) < self._rotated, np.float32(amplitude), np.float32(1))
        self._factors = None if amplitude == 1 else mx.array(factors)

    def rotate(self, x: mx.array, positions: mx.array) -> mx.array:
        """Return x [T, heads, 1, D] rotated by positions [T] int32, in the type of x."""
        scaled = x if self._factors is None else x.astype(mx.float32) * self._factors  # bf16 would round the factor
        turned = mx.fast.rope(
            scaled,
            self._rotated,
            traditional=self._interleaved,
            base=None,
            scale=1.0,
            offset=positions,
            freqs=self._wavelengths,
        )
        return turned.astype(x.dtype)


def make_rope(attention: Attention, context_length: int) -> RotaryEmbedding | None:
    """Make a layer's rotary embedding; None: positions do not enter.

    Raises ArchitectureUnsupported for an unknown scaling.
    """
    if attention.rope is None:
        return None
    frequencies, amplitude = rotary_frequencies(attention.rope, dims=attention.rotated, context_length=context_length)
    size = attention.head_dim if attention.latent is None else attention.rotated  # latent: apart from the others
    with np.errstate(divide="ignore"):  # pairs that never turn have an infinite wavelength
        wavelengths = 1.0 / frequencies
    return RotaryEmbedding(wavelengths, head_dim=size, interleaved=attention.interleaved, amplitude=amplitude)
