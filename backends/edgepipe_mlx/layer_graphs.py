"""The parts of a decoder layer that hold no state, compiled by MLX for steps of few rows.

MLX then fuses small operations to one kernel, computes what parts share once, and builds the graph without Python. A
compiled part is traced once for each number of rows. On MLX's CPU device, where ``configure`` turns compiling off, the
parts run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

MOST_ROWS = 16
"""Rows of a compiled step. More rows have long kernels, and prompts too many sizes to trace each."""

Arrays = Sequence[mx.array]


class Compiled:
    """A function of arrays, whose other values are constants."""

    def __init__(self, function: Callable[..., Arrays]) -> None:
        compile_function: Any = mx.compile
        self._plain = function
        self._compiled: Callable[..., Arrays] = compile_function(function)

    def __call__(self, first: mx.array, *others: mx.array) -> Arrays:
        """Compute the function of rows ``first`` [T, ...] and other arrays."""
        compute = self._compiled if first.shape[0] <= MOST_ROWS else self._plain
        return compute(first, *others)
