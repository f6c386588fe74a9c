"""Rows of arrays that threads other than MLX's read, without a copy of all of them."""

from __future__ import annotations

from collections import deque
from weakref import finalize

import mlx.core as mx
import numpy as np
import numpy.typing as npt


class LentRows:
    """The rows of an evaluated array [R, V]. Any thread may copy and drop them: it touches no object of MLX."""

    def __init__(self, array: mx.array, returned: deque[mx.array]) -> None:
        self._rows: npt.NDArray[np.float32] = np.array(array, copy=False)
        finalize(self, returned.append, array).atexit = False

    def copied(self, row: int) -> npt.NDArray[np.float32]:
        """Return a copy of a row [V]."""
        return self._rows[row].copy()


class Lender:
    """Lends arrays, and drops those that came back. Belongs to MLX's thread.

    An array comes back when the rows of its step were sampled, so there are no more of them than steps in flight.
    """

    def __init__(self) -> None:
        self._returned: deque[mx.array] = deque()

    def lend(self, array: mx.array) -> LentRows:
        """Lend an evaluated array."""
        return LentRows(array, self._returned)

    def drop_returned(self) -> None:
        """Free the arrays that came back."""
        self._returned.clear()
