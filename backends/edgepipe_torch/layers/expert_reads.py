"""Count the distinct experts that steps read, for the planner's D(T) (``edgepipe.backend.expert_reads``).

Products note how many experts their last call read: a number where the host sorts the rows, a tensor where the device
does. Only some steps are read (``CountedSteps``), and these do not wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from edgepipe.backend.expert_reads import CountedSteps
from edgepipe.backend.step_layout import StepLayout
from edgepipe_torch.layers.experts import CountsExperts
from edgepipe_torch.layers.transfer import Download, Transfer


class ExpertReads:
    """Counts of one slice."""

    def __init__(self, mixtures: Sequence[tuple[CountsExperts, int]], *, sizes: Collection[int] | None) -> None:
        """
        mixtures  each layer's products and number of experts
        sizes     numbers of rows that are computed as they are; None: all. Surplus rows of graphs would count, too
        """
        self._mixtures = mixtures
        self._sizes = sizes
        self._counted = CountedSteps()

    def start(self, tokens: int, transfer: Transfer, *, all_rows: bool) -> ReadShare | None:
        """Begin to read the counts of the step just submitted; None if it is not one to count.

        ``all_rows``: the slice's last layer computed them, too, not only rows that need logits. Else it does not count.
        """
        mixtures = self._mixtures if all_rows else self._mixtures[:-1]
        if not mixtures or (self._sizes is not None and tokens not in self._sizes) or not self._counted.takes(tokens):
            return None
        read, on_device = 0.0, list[Tensor]()
        counts: list[int] = []  # number of experts in each layer whose count is on the device
        for products, count in mixtures:
            distinct = products.distinct
            if isinstance(distinct, Tensor):
                on_device.append(distinct)
                counts.append(count)
            else:
                read += distinct / count
        download = transfer.download(torch.cat(on_device)) if on_device else None
        return ReadShare(read, counts, download, len(mixtures))


def covers(layout: StepLayout) -> bool:
    """Return whether each row of a step needs logits."""
    rows = layout.logit_rows
    return len(rows) >= layout.num_tokens and len(np.unique(rows)) == layout.num_tokens


class ReadShare:
    """A step's mean share of experts, in transfer."""

    def __init__(self, read: float, counts: Sequence[int], download: Download | None, layers: int) -> None:
        self._read = read
        self._counts = counts
        self._download = download
        self._layers = layers

    def wait(self) -> float:
        """Return the share. The step's result has arrived."""
        found = [] if self._download is None else self._download.wait().tolist()
        own = sum(distinct / count for distinct, count in zip(found, self._counts, strict=True))
        return (self._read + own) / self._layers
