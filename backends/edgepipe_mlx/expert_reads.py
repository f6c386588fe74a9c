"""Count the distinct experts that steps read, for the planner's D(T) (``edgepipe.backend.expert_reads``).

The count is a part of the step's graph and arrives with its result, so no step waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from edgepipe.backend.expert_reads import CountedSteps
from edgepipe.spec.layer_spec import Experts
from edgepipe_mlx.experts import Mixture


class ExpertReads:
    """Counts of one slice."""

    def __init__(self, mixtures: Sequence[Mixture]) -> None:
        self._mixtures = mixtures
        self._counted = CountedSteps()

    def share(self, tokens: int) -> mx.array | None:
        """Return the mean share [] float32 of the step whose graph was just built; None if it is not one to count.

        Drops the choices: those of a step that does not compute them hold all that they depend on, such as the KV pool.
        """
        found = [(mixture.spec, mixture.chosen) for mixture in self._mixtures if mixture.chosen is not None]
        choices = [(spec, chosen) for spec, chosen in found if len(chosen) == tokens]  # choices that cover all rows
        for mixture in self._mixtures:
            mixture.chosen = None
        return _mean_share(choices) if choices and self._counted.takes(tokens) else None


def _mean_share(choices: Sequence[tuple[Experts, mx.array]]) -> mx.array:
    """Sort the choices of all layers alike at once: few kernels, however many layers there are."""
    # Choices by the number of experts and the number that a token uses.
    alike: dict[tuple[int, int], list[mx.array]] = {}
    for spec, chosen in choices:
        alike.setdefault((spec.count, spec.used), []).append(chosen.flatten())
    shares: list[mx.array] = []
    for (count, _), layers in alike.items():
        ordered = mx.sort(mx.stack(layers), axis=1)  # [layers, T * K]
        distinct = len(layers) + (ordered[:, 1:] != ordered[:, :-1]).sum()
        shares.append(distinct.astype(mx.float32) / count)
    return mx.stack(shares).sum() / len(choices)
