"""Rotary embedding: a complex number per (position, pair), computed on the host for a step's positions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgepipe.model.facts import ModelConfig
from edgepipe.model.rope import rotary_frequencies


class Rotations:
    """Computes rotations of positions."""

    def __init__(self, config: ModelConfig) -> None:
        """Raises ArchitectureUnsupported for an unknown scaling."""
        self._frequencies, self._amplitude = rotary_frequencies(config)

    def at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.complex64]:
        """Return the rotations [T, D / 2] of positions [T]. Multiplying a pair, as a complex number, rotates it."""
        angles = positions[:, None] * self._frequencies
        out = np.empty(angles.shape, np.complex64)
        out.real = np.cos(angles) * self._amplitude
        out.imag = np.sin(angles) * self._amplitude
        return out
