"""Guesses by the layer that predicts one token more, in the slice with the head.

T packed rows, H hidden, U rows whose next token is not known, B rows of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from edgepipe.backend.draft_passes import draft_passes, guesses_of
from edgepipe.backend.step_layout import StepLayout
from edgepipe.backend.types import UNKNOWN_ID, DraftStep, Step, TokenIds
from edgepipe_torch.layers.decoder import Decoder
from edgepipe_torch.layers.kv import KVPool
from edgepipe_torch.layers.mixers import StepTensors
from edgepipe_torch.layers.transfer import Transfer


def knows_any(layout: StepLayout) -> bool:
    """Return whether a step has tokens whose next one is known, for which the layer computes keys and values."""
    return layout.next_ids is not None and bool((layout.next_ids >= 0).any())


class Drafting:
    """The layer of one slice with its KV."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, tensors: Callable[[Step], StepTensors], transfer: Transfer
    ) -> None:
        """``tensors``: lays out a pass."""
        self._decoder = decoder
        self._pool = pool
        self._tensors = tensors
        self._transfer = transfer

    def follow(self, finals: Tensor, layout: StepLayout, tensors: StepTensors) -> Tensor:
        """Compute a step's keys and values where the next token is known; return the other rows of finals [U, H].

        Rows whose next token is not known get keys and values of token 0. A draft or a later step overwrites them.
        """
        assert layout.next_ids is not None
        if knows_any(layout):
            ids = self._transfer.upload(np.maximum(layout.next_ids, 0))
            wanted, tensors.logit_rows = tensors.logit_rows, self._transfer.upload(np.zeros(0, np.int64))
            self._decoder.predict(ids, finals, tensors, self._pool)
            tensors.logit_rows = wanted
        return self.kept_of(finals, layout)

    def kept_of(self, finals: Tensor, layout: StepLayout) -> Tensor:
        """Return the rows [U, H] of finals [T, H] whose next token is not known, in a new tensor."""
        assert layout.next_ids is not None
        return finals[self._transfer.upload(np.flatnonzero(layout.next_ids == UNKNOWN_ID))]

    def guesses(self, draft: DraftStep) -> Sequence[TokenIds]:
        """Return each row's guesses. Waits for the device. Raises StepFailed."""
        found: list[Tensor] = []
        self._transfer.begin()
        finals = torch.cat([part for row in draft.rows for part in row.kept])
        ids = self._transfer.upload(np.concatenate([row.next_ids for row in draft.rows]).astype(np.int64))
        for number, each in enumerate(draft_passes(draft)):
            if number and len(each.kept) < len(ids):
                going = self._transfer.upload(each.kept)
                finals, ids = finals[going], ids[going]
            finals = self._decoder.predict(ids, finals, self._tensors(each.step), self._pool)
            ids = self._decoder.logits_of(finals).argmax(-1)
            found.append(ids)
        return guesses_of(draft, [each.cpu().numpy() for each in found])
