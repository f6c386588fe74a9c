"""Rotary frequencies for every supported scaling. PURE.

Frequencies never depend on the length of a sequence. So cached keys stay valid, and a prompt gives the same keys whole,
in chunks or as a replay.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edgepipe.errors import ArchitectureUnsupported
from edgepipe.spec.layer_spec import Rope, Temperature
from edgepipe.spec.longrope import uses_long_factors
from edgepipe.spec.rope_config import SCALINGS

Floats = npt.NDArray[np.float64]


def rotary_frequencies(rope: Rope, *, dims: int, context_length: int) -> tuple[Floats, float]:
    """Return radians per token of each pair [dims / 2], and the factor on rotated queries and keys.

    dims            dimensions of a head that rotate
    context_length  the model's; of longrope, ``longrope.served_config`` has chosen the factors of the served context

    Raises ArchitectureUnsupported.
    """
    plain: Floats = rope.theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    match rope.scaling:
        case "default" | "dynamic":  # dynamic scales only beyond the model's context, which no position exceeds
            return plain, 1.0
        case "linear":
            return plain / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, plain, dims, context_length), _yarn_amplitude(rope)
        case "proportional":
            turning = np.arange(dims // 2) < int(rope.rotated_share * dims // 2)
            return np.where(turning, plain / rope.factor, 0.0), 1.0
        case "longrope":
            return plain / _longrope_factors(rope, context_length), _longrope_amplitude(rope)
        case _:
            raise ArchitectureUnsupported(
                f"the rope scaling '{rope.scaling}' is not computed by any backend",
                fact=f"computed are {', '.join(SCALINGS)}",
                next_step="serve a model with one of those",
            )


def temperatures(temperature: Temperature, positions: npt.NDArray[np.int64]) -> Floats:
    """Return the factors [T] of queries at positions [T]."""
    return 1.0 + temperature.growth * np.log1p(positions // temperature.context)


def _llama3(rope: Rope, plain: Floats) -> Floats:
    """Divide slow pairs by the factor, keep fast ones, blend those between by their turns in the context."""
    turns = rope.original_context * plain / (2 * math.pi)
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return plain * (kept + (1.0 - kept) / rope.factor)


def _yarn(rope: Rope, plain: Floats, dims: int, context_length: int) -> Floats:
    """Keep pairs below ``low``, divide those above ``high``, blend between by index (Peng et al. 2023, 3.2)."""
    context = rope.original_context or context_length

    def pair_with(turns: float) -> float:
        return dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = (high - low) or 0.001  # equal ends: a step instead of a ramp
    divided = np.clip((np.arange(len(plain)) - low) / width, 0.0, 1.0)
    return plain * (1.0 - divided + divided / rope.factor)


def _yarn_amplitude(rope: Rope) -> float:
    """Return yarn's factor on cosine and sine. Rotation is linear, so it may be applied to queries and keys."""

    def grown(by: float) -> float:
        return 0.1 * by * math.log(rope.factor) + 1.0 if rope.factor > 1.0 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim)
    return grown(1.0)


def _longrope_factors(rope: Rope, context_length: int) -> Floats:
    factors = rope.long_factor if uses_long_factors(rope, context_length) else rope.short_factor
    return np.asarray(factors, np.float64)


def _longrope_amplitude(rope: Rope) -> float:
    """Return longrope's factor on queries and keys (Ding et al. 2024, 3.3)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0 or rope.original_context <= 1:
        return 1.0
    return math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_context))
