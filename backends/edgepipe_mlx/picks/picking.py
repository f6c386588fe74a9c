"""Where a stage's candidates are picked: on the device, once its kernels are checked, or on the host."""

from __future__ import annotations

import mlx.core as mx

from edgepipe.backend.types import LogitEdits, PickedCandidates, SlowPath
from edgepipe_mlx.lent_rows import Lender
from edgepipe_mlx.picks.candidates import Picked, pick
from edgepipe_mlx.picks.checking import checked_picks
from edgepipe_mlx.picks.kernels import PickKernels, ReferencePicks


class Picking:
    """Belongs to MLX's thread."""

    def __init__(self) -> None:
        self._kernels: PickKernels | None = None
        self._checked: tuple[int, PickKernels | SlowPath] | None = None  # vocabulary's size; its check's result
        self._lender = Lender()

    @property
    def is_on(self) -> bool:
        """Whether candidates are picked on the device."""
        return self._kernels is not None

    def begin(self, vocabulary: int, *, on_cpu: bool) -> SlowPath | None:
        """Pick candidates from now on, if the kernels pass their check; else return what the stage lacks."""
        if on_cpu:
            self._kernels = ReferencePicks()
            return None
        if self._checked is None or self._checked[0] != vocabulary:
            self._checked = vocabulary, checked_picks(vocabulary)
        found = self._checked[1]
        if isinstance(found, SlowPath):
            return found
        self._kernels = found
        return None

    def end(self) -> None:
        """Pick no more, and free the arrays that came back."""
        self._kernels = None
        self._lender.drop_returned()

    def pick(self, logits: mx.array, edits: LogitEdits | None) -> Picked | None:
        """Pick candidates of logits [R, V]; None: whole rows leave the device, or no row is sampled."""
        self._lender.drop_returned()
        if self._kernels is None or edits is None or not logits.shape[0]:
            return None
        return pick(self._kernels, logits, edits)

    def copied(self, picked: Picked) -> PickedCandidates:
        """Copy evaluated candidates."""
        return picked.copied(self._lender)
