"""Candidates of a step's logits: edits go to the device, a few thousand numbers come back.

R rows, V vocabulary, W words of masks, K candidates, N most likely tokens of unchanged logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from edgepipe.backend.types import LogitEdits, PickedCandidates
from edgepipe_mlx.lent_rows import Lender
from edgepipe_mlx.picks.kernels import PickKernels

NUM_CANDIDATES = 256
"""Cover 0.99 of a usual distribution. Larger top-k and flat distributions read the whole row."""

_LEAST_ARRAY = 8  # MLX gives smaller arrays in the constant address space, by other code


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Candidates that MLX computes. Belongs to its thread."""

    packed: mx.array  # [R, 3 K + 2], see ``PickKernels``
    tops: mx.array  # the same of the unchanged logits, if they are asked for; else ``packed``
    num_top: int  # N
    changed: mx.array  # [R, V] float32, without masks
    masks: npt.NDArray[np.int32] | None  # [R, W]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What MLX must have computed before ``copied``."""
        return self.packed, self.tops, self.changed

    def copied(self, lender: Lender) -> PickedCandidates:
        """Copy the candidates. Rows are copied when they are fetched."""
        fields = _fields(self.packed)
        ids, logits, raw_logits, totals, raw_log_totals = fields
        top_ids, _, top_logits, *_ = fields if self.tops is self.packed else _fields(self.tops)
        rows, masks = lender.lend(self.changed), self.masks

        def fetch(row: int) -> npt.NDArray[np.float32]:
            found = rows.copied(row)
            if masks is not None:
                allowed = np.unpackbits(masks[row].view(np.uint8), bitorder="little", count=len(found))
                found[allowed == 0] = -np.inf
            return found

        return PickedCandidates(
            ids=ids.view(np.int32),
            logits=logits,
            raw_logits=raw_logits,
            totals=totals,
            raw_log_totals=raw_log_totals,
            top_ids=top_ids.view(np.int32)[:, : self.num_top],
            top_logits=top_logits[:, : self.num_top],
            fetch=fetch,
        )


def pick(kernels: PickKernels, logits: mx.array, edits: LogitEdits) -> Picked:
    """Apply the edits to logits [R, V] float32 and pick candidates."""
    changed, count = _edited(logits, edits), min(NUM_CANDIDATES, logits.shape[1])
    temperatures = np.ones(max(_LEAST_ARRAY, len(edits.temperatures)), np.float32)
    temperatures[: len(edits.temperatures)] = edits.temperatures
    heat, masks = mx.array(temperatures), None
    if edits.masks is not None:
        words = edits.masks
        masks = mx.array(np.pad(words, ((0, 0), (0, max(0, _LEAST_ARRAY - words.shape[1])))))
    packed = kernels.pick(logits, changed, masks, heat, count)
    is_changed = changed is not logits or masks is not None
    return Picked(
        packed=packed,
        tops=kernels.pick(logits, logits, None, heat, count) if edits.num_top and is_changed else packed,
        num_top=min(edits.num_top, count),
        changed=changed,
        masks=edits.masks,
    )


def _edited(logits: mx.array, edits: LogitEdits) -> mx.array:
    """Return logits with the sparse edits; or the logits themselves without any."""
    if not len(edits.ids):
        return logits
    places = mx.array(edits.rows.astype(np.int64) * logits.shape[1] + edits.ids)
    repetition, add, flat = mx.array(edits.repetition), mx.array(edits.add), logits.reshape(-1)
    old = flat[places]
    new = mx.where(old > 0, old / repetition, old * repetition) + add
    return mx.put_along_axis(flat, places, new, axis=0).reshape(logits.shape)


def _fields(packed: mx.array) -> tuple[npt.NDArray[np.float32], ...]:
    """Return views of the fields in one copy: ids as bits and two logits [R, K], two totals [R]."""
    copied = np.array(packed).view(np.float32)
    count = (copied.shape[1] - 2) // 3
    ids, logits, raw_logits = (copied[:, start : start + count] for start in range(0, 3 * count, count))
    return ids, logits, raw_logits, copied[:, -2], copied[:, -1]
