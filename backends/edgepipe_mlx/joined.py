"""Projections of one input, joined where their weights are of one kind: one kernel instead of one for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx

from edgepipe_mlx.matrices import JoiningMatrix, Linear, Matrix


@dataclass(frozen=True, slots=True)
class _Run:
    """Results that one kernel computes."""

    matrix: Matrix
    sizes: Sequence[int]  # out features of each
    biases: Sequence[mx.array | None]


class JoinedLinear:
    """Projections of one input."""

    def __init__(self, parts: Sequence[Linear], *, together: int = 1, activated: bool = False) -> None:
        """
        together   the first so many parts are one result, side by side, if one kernel computes them
        activated  an activation takes the results: each is converted to the compute dtype on its own, which MLX then
                   fuses with the activation
        """
        self._activated = activated
        starts = [index for index in range(len(parts)) if not index or not _joins(parts[index - 1], parts[index])]
        runs = [parts[start:end] for start, end in zip(starts, [*starts[1:], len(parts)], strict=True)]
        self.is_together = together > 1 and len(runs[0]) >= together
        merged = together if self.is_together else 1
        self._runs = [_run(run, merged if index == 0 else 1) for index, run in enumerate(runs)]

    def multiply(self, x: mx.array, *, in_float32: bool = False) -> list[mx.array]:
        """Return the parts' products [..., O] of x [..., I].

        in_float32  without rounding them to the compute dtype before
        """
        found: list[mx.array] = []
        for run in self._runs:
            matrix = run.matrix
            multiply = matrix.logits if in_float32 else matrix.multiply
            if len(run.sizes) == 1:
                products = [multiply(x)]
            elif self._activated and not in_float32:
                assert isinstance(matrix, JoiningMatrix)
                products = matrix.multiply_parts(x, run.sizes)
            else:
                products = mx.split(multiply(x), list(accumulate(run.sizes))[:-1], axis=-1)
            pairs = zip(products, run.biases, strict=True)
            found += [product if bias is None else product + bias for product, bias in pairs]
        return found


def _joins(before: Linear, after: Linear) -> bool:
    first, second = before.matrix, after.matrix
    return isinstance(first, JoiningMatrix) and isinstance(second, JoiningMatrix) and first.joins(second)


def _run(parts: Sequence[Linear], together: int) -> _Run:
    """Join parts of one kind; ``together``: see ``JoinedLinear``. Evaluates the joined weight."""
    matrices = [part.matrix for part in parts]
    if len(parts) == 1:
        return _Run(matrices[0], [0], [parts[0].bias])
    packed = [matrix for matrix in matrices if isinstance(matrix, JoiningMatrix)]
    sizes, biases = [matrix.out_features for matrix in packed], [part.bias for part in parts]
    sizes = [sum(sizes[:together]), *sizes[together:]]
    biases = [_joined_bias(biases[:together]), *biases[together:]]
    return _Run(type(packed[0]).joined(packed), sizes, biases)


def _joined_bias(biases: Sequence[mx.array | None]) -> mx.array | None:
    known = [bias for bias in biases if bias is not None]
    assert len(known) in (0, len(biases))  # a layer's projections have biases alike
    if not known:
        return None
    joined = mx.concatenate(known)
    mx.eval(joined)
    return joined
