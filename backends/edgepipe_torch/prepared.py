"""A step as the host prepares it, ahead of its activations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgepipe.backend.step_layout import Indices, StepLayout, all_slots, lay_out_step
from edgepipe.backend.types import Step
from edgepipe_torch.rope import Rotations


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """What ``submit`` needs of a step of T packed tokens. Indices are int64, which torch picks rows by."""

    layout: StepLayout
    rotations: npt.NDArray[np.complex64]  # [T, head_dim / 2]
    scattered: tuple[Indices | None, ...]  # of each row: [length] slot of every token, where the blocks are not one run


def prepare_step(step: Step, *, rotations: Rotations, block_size: int, num_blocks: int) -> PreparedStep:
    """Lay out a step and look up its rotations. Raises StepFailed, see ``lay_out_step``."""
    layout = lay_out_step(step, block_size=block_size, num_blocks=num_blocks, dtype=np.int64)
    scattered = tuple(None if row.contiguous else all_slots(row, block_size) for row in layout.rows)
    return PreparedStep(layout=layout, rotations=rotations.at(layout.positions), scattered=scattered)
