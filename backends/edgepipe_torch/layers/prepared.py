"""A step as the host prepares it, ahead of its activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from edgepipe.backend.step_layout import Indices, StepLayout, all_slots, lay_out_step
from edgepipe.backend.types import Step
from edgepipe_torch.layers.rope import Rotations


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """What ``submit`` needs of a step of T packed tokens. Indices are int64, which torch picks rows by."""

    layout: StepLayout
    rotations: tuple[npt.NDArray[np.complex64], ...]  # [T, pairs] for each kind of rotary embedding
    scattered: tuple[Indices | None, ...]  # each row's slots [length], where its blocks are not one run
    windows: tuple[PreparedStep, ...] = ()  # the same step in each windowed memory class


class Replayed(NamedTuple):
    """Result of a recorded step, which the next step may overwrite."""

    output: Tensor  # logits [R, V] float32, or activations in the link's type
    finals: Tensor | None  # [R, H] behind the final norm, of a slice that predicts one token more


def prepare_step(
    step: Step,
    *,
    rotations: Rotations,
    block_size: int,
    num_blocks: int,
    window_blocks: Sequence[int] = (),
    state_slots: int = 0,
    span: int = 0,
) -> PreparedStep:
    """Lay out a step and look up its rotations. Raises StepFailed, see ``lay_out_step``."""
    layout = lay_out_step(
        step,
        block_size=block_size,
        num_blocks=num_blocks,
        window_blocks=window_blocks,
        state_slots=state_slots,
        span=span,
        dtype=np.int64,
    )
    found = rotations.at(layout.positions)
    windows = tuple(
        PreparedStep(layout=each, rotations=found, scattered=_scattered(each, block_size)) for each in layout.windows
    )
    return PreparedStep(layout=layout, rotations=found, scattered=_scattered(layout, block_size), windows=windows)


def _scattered(layout: StepLayout, block_size: int) -> tuple[Indices | None, ...]:
    return tuple(None if row.contiguous else all_slots(row, block_size) for row in layout.rows)
