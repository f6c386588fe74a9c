"""Pick candidates from logits on the device: most likely tokens and totals. R rows, V vocabulary, K candidates.

The edits arrive as a few thousand numbers and one bit per token. One packed array returns: 3 KB per row instead of
600 KB with a vocabulary of 152,000.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgepipe.backend.types import LogitEdits, PickedCandidates, ScoreRows, TokenScores
from edgepipe_torch.layers.transfer import Download, Transfer

NUM_CANDIDATES = 256  # cover 0.99 of a usual distribution; larger top-k and flat distributions fetch the whole row
SCORED_AT_ONCE = 64  # rows of prompt log-probabilities: 40 MB of logits with a vocabulary of 152,000


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Candidates in transfer to the host."""

    download: Download  # [R, 3 K + 2 + 2 N] float32, ids as bits
    changed: Tensor  # [R, V], kept for fetched rows
    transfer: Transfer
    num_candidates: int
    num_top: int

    def wait(self) -> PickedCandidates:
        """Wait for the candidates."""
        fields = _Fields(self.download.wait())
        k, n = self.num_candidates, self.num_top
        return PickedCandidates(
            ids=fields.ids(k),
            logits=fields.take(k),
            raw_logits=fields.take(k),
            totals=fields.take(1)[:, 0],
            raw_log_totals=fields.take(1)[:, 0],
            top_ids=fields.ids(n),
            top_logits=fields.take(n),
            fetch=lambda row: self.transfer.read(self.changed[row]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Scores of prompt tokens in transfer to the host."""

    download: Download  # [S, 2 + 2 N] float32, ids as bits
    num_top: int

    def wait(self) -> TokenScores:
        """Wait for the scores."""
        fields = _Fields(self.download.wait())
        return TokenScores(
            log_totals=fields.take(1)[:, 0],
            logits=fields.take(1)[:, 0],
            top_ids=fields.ids(self.num_top),
            top_logits=fields.take(self.num_top),
        )


def pick(logits: Tensor, edits: LogitEdits, transfer: Transfer) -> Picked:
    """Apply the edits to logits [R, V] float32 and start the transfer of the candidates to the host."""
    changed = _change(logits, edits, transfer)
    num_candidates = min(NUM_CANDIDATES, logits.shape[1])
    best, ids = changed.topk(num_candidates, dim=1)
    temperatures = transfer.upload(edits.temperatures)[:, None]
    totals = ((changed - best[:, :1]) / temperatures).exp_().sum(1, keepdim=True)
    num_top = min(edits.num_top, logits.shape[1])
    top, top_ids = logits.topk(num_top, dim=1)
    fields = [_bits(ids), best, logits.gather(1, ids), totals, logits.logsumexp(1, keepdim=True), _bits(top_ids), top]
    return Picked(
        download=transfer.download(torch.cat(fields, 1)),
        changed=changed,
        transfer=transfer,
        num_candidates=num_candidates,
        num_top=num_top,
    )


def score(hidden: Tensor, wanted: ScoreRows, logits: Callable[[Tensor], Tensor], transfer: Transfer) -> Scored:
    """Score known tokens; hidden [S, H], one row per target, goes through the head in pieces."""
    targets = transfer.upload(wanted.targets.astype(np.int64))[:, None]
    pieces: list[Tensor] = []
    num_top = wanted.num_top
    for start in range(0, hidden.shape[0], SCORED_AT_ONCE):
        part = logits(hidden[start : start + SCORED_AT_ONCE])
        own = part.gather(1, targets[start : start + SCORED_AT_ONCE])
        num_top = min(wanted.num_top, part.shape[1])
        top, top_ids = part.topk(num_top, dim=1)
        pieces.append(torch.cat([part.logsumexp(1, keepdim=True), own, _bits(top_ids), top], 1))
    return Scored(download=transfer.download(torch.cat(pieces)), num_top=num_top)


class _Fields:
    """Columns of a packed array, one field after another."""

    def __init__(self, packed: npt.NDArray[Any]) -> None:
        self._packed = packed
        self._at = 0

    def take(self, width: int) -> npt.NDArray[np.float32]:
        start, self._at = self._at, self._at + width
        return self._packed[:, start : self._at]

    def ids(self, width: int) -> npt.NDArray[np.int32]:
        return np.ascontiguousarray(self.take(width)).view(np.int32)


def _bits(ids: Tensor) -> Tensor:
    """Reinterpret token ids as float32, to pack them with the other fields."""
    return ids.to(torch.int32).view(torch.float32)


def _change(logits: Tensor, edits: LogitEdits, transfer: Transfer) -> Tensor:
    """Return a changed copy [R, V] of the logits."""
    changed = logits.clone()
    if len(edits.ids):
        rows, ids = transfer.upload(edits.rows.astype(np.int64)), transfer.upload(edits.ids.astype(np.int64))
        repetition, add = transfer.upload(edits.repetition), transfer.upload(edits.add)
        old = logits[rows, ids]
        changed[rows, ids] = torch.where(old > 0, old / repetition, old * repetition) + add
    if edits.masks is not None:
        words = transfer.upload(edits.masks)
        bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device)
        allowed = (bits & 1).view(words.shape[0], -1)[:, : logits.shape[1]].bool()
        changed.masked_fill_(~allowed, -torch.inf)
    return changed
