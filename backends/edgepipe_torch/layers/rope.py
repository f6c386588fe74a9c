"""Rotary embedding: a complex number per (position, pair), computed on the host for a step's positions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edgepipe.spec.facts import ModelConfig
from edgepipe.spec.layer_spec import Rope, Temperature
from edgepipe.spec.rope import rotary_frequencies, temperatures

RotaryKind = tuple[Rope | None, int] | Temperature
"""A rotary embedding and the dimensions of a head that it rotates; or a factor on queries, with one pair."""


class Rotations:
    """Computes rotations of positions, for each kind of rotary embedding and temperature among a model's layers."""

    def __init__(self, config: ModelConfig) -> None:
        """Raises ArchitectureUnsupported for an unknown scaling."""
        specs = [spec.attention for spec in config.layers if spec.attention is not None]
        ropes = dict.fromkeys((each.rope, each.rotated) for each in specs if each.rope)
        self._temperatures = list(dict.fromkeys(each.temperature for each in specs if each.temperature))
        self.kinds: Mapping[RotaryKind, int] = {kind: index for index, kind in enumerate([*ropes, *self._temperatures])}
        self._tables = [
            rotary_frequencies(rope, dims=dims, context_length=config.context_length)
            for rope, dims in ropes
            if rope is not None
        ]
        self.pairs = [*(dims // 2 for _, dims in ropes), *(1 for _ in self._temperatures)]

    def at(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.complex64], ...]:
        """Return each kind's rotations [T, pairs] of positions [T], to multiply rotary pairs as complex numbers.

        Of a temperature: the factors [T, 1] of queries.
        """
        found: list[npt.NDArray[np.complex64]] = []
        for frequencies, amplitude in self._tables:
            angles = positions[:, None] * frequencies
            out = np.empty(angles.shape, np.complex64)
            out.real = np.cos(angles) * amplitude
            out.imag = np.sin(angles) * amplitude
            found.append(out)
        found += [temperatures(each, positions)[:, None].astype(np.complex64) for each in self._temperatures]
        return tuple(found)
