"""Rotary frequencies for every scaling that edgepipe computes, and the callable that mlx-lm's attention takes.

mlx-lm's own rope modules ignore some fields that change the result (yarn's ``truncate`` and ``attention_factor``) and
one of them takes no offset per row, so the frequencies are computed here, in float64, once per load.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from edgepipe.errors import ArchitectureUnsupported
from edgepipe.model.facts import ModelConfig, Rope

Floats = npt.NDArray[np.floating]

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class RotaryEmbedding(nn.Module):
    """Rotates ``[T, heads, 1, D]`` by one position per row."""

    def __init__(self, *, dims: int, wavelengths: Floats, amplitude: float) -> None:
        super().__init__()
        self.dims = dims
        self._amplitude = amplitude
        self._wavelengths = mx.array(wavelengths.astype(np.float32))  # the underscore keeps it from being a weight

    def __call__(self, x: mx.array, offset: mx.array | int = 0) -> mx.array:
        """x [T, heads, 1, D]; offset [T] int32, the rows' positions."""
        if self._amplitude != 1.0:
            x = x * self._amplitude
        return mx.fast.rope(
            x, self.dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._wavelengths
        )


def make_rope(config: ModelConfig) -> RotaryEmbedding:
    """The model's rotary embedding. Raises ArchitectureUnsupported for a scaling that is not computed here."""
    wavelengths, amplitude = rotary_wavelengths(config)
    return RotaryEmbedding(dims=config.head_dim, wavelengths=wavelengths, amplitude=amplitude)


def rotary_wavelengths(config: ModelConfig) -> tuple[Floats, float]:
    """Tokens per radian of every rotary pair [D / 2], and the factor on rotated queries and keys.

    Raises ArchitectureUnsupported.
    """
    rope = config.rope
    plain = rope.theta ** (np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    if rope.scaling in ("default", "dynamic"):  # dynamic stretches only beyond the model's context
        return plain, 1.0
    if rope.scaling == "linear":
        return plain * rope.factor, 1.0
    if rope.scaling == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.scaling == "yarn":
        return _yarn(rope, plain, config), _yarn_amplitude(rope)
    if rope.scaling == "longrope":
        return plain * _longrope_factors(rope, config), _longrope_amplitude(rope)
    raise ArchitectureUnsupported(
        f"the mlx backend does not compute the rope scaling '{rope.scaling}'",
        fact=f"it computes {', '.join(SCALINGS)}",
        next_step="serve the model on nodes with another backend",
    )


def _longrope_factors(rope: Rope, config: ModelConfig) -> Floats:
    """The long factors for a model that is served beyond its trained context, however long the sequence is.

    Choosing by the length would leave keys of both kinds in one cache once a sequence has grown.
    """
    beyond = 0 < rope.original_context < config.context_length
    return np.array(rope.long_factor if beyond else rope.short_factor, np.float64)


def _longrope_amplitude(rope: Rope) -> float:
    """Longrope's factor on queries and keys (Ding et al. 2024, 3.3)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0 or rope.original_context <= 1:
        return 1.0
    return math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_context))


def _llama3(rope: Rope, plain: Floats) -> Floats:
    """Long waves are stretched by the factor, short ones kept, those between blended by their frequency."""
    turns = rope.original_context / (2 * math.pi * plain)  # within the trained context
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return _blend(plain, rope.factor, kept)


def _yarn(rope: Rope, plain: Floats, config: ModelConfig) -> Floats:
    """Pairs are kept below ``low``, stretched above ``high``, blended by index between (Peng et al. 2023, 3.2)."""

    def pair_index(turns: float) -> float:
        wavelength = (rope.original_context or config.context_length) / (2 * math.pi * turns)
        return config.head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_index(rope.beta_fast), pair_index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = (high - low) or 0.001  # a step instead of a ramp when both ends meet
    stretched = np.clip((np.arange(len(plain)) - low) / width, 0.0, 1.0)
    return _blend(plain, rope.factor, 1.0 - stretched)


def _blend(plain: Floats, factor: float, kept: Floats) -> Floats:
    """Wavelengths whose frequency is ``kept`` parts of the plain one, the rest of the one divided by ``factor``."""
    return 1.0 / (kept / plain + (1.0 - kept) / (plain * factor))


def _yarn_amplitude(rope: Rope) -> float:
    """Yarn's factor on cosine and sine; rotating is linear, so it may be put on queries and keys before."""

    def grown(by: float) -> float:
        return 0.1 * by * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim)
    return grown(1.0)
