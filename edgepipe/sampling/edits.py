"""Penalties and bias of one sequence as sparse changes to its logits: a new token changes only its own entry.

The persistent state follows SiPipe, section 5.1, "Column-Wise CPU Sampling via Metadata Reuse", without its dense
buffers: a sequence contains only a few thousand of 152,000 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

import numpy as np
import numpy.typing as npt

from edgepipe.sampling.params import SamplingParams


class TokenEdits:
    """Changes to the model's logits. E entries, each token once.

    A logit becomes ``penalised(logit) + add``. The repetition penalty divides positive and multiplies negative logits
    of tokens that occurred.
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int] = ()) -> None:
        self._params = params
        self._place: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._add = np.zeros(64, np.float32)
        self._repetition = np.ones(64, np.float32)
        self._counts = np.zeros(64, np.int32)
        for token, bias in params.logit_bias:
            place = self._entry(token)  # call first: it may replace the arrays
            self._add[place] = bias
        if params.repetition_penalty != 1:
            for token in prompt:
                place = self._entry(token)
                self._repetition[place] = params.repetition_penalty

    def fork(self) -> TokenEdits:
        """Return a copy that goes on with other tokens."""
        other = copy(self)
        other._place = dict(self._place)
        other._ids, other._add = self._ids.copy(), self._add.copy()
        other._repetition, other._counts = self._repetition.copy(), self._counts.copy()
        return other

    def __len__(self) -> int:
        return len(self._place)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Tokens ``[E]``."""
        return self._ids[: len(self._place)]

    @property
    def add(self) -> npt.NDArray[np.float32]:
        """Additions ``[E]``: bias minus frequency and presence penalties."""
        return self._add[: len(self._place)]

    @property
    def repetition(self) -> npt.NDArray[np.float32]:
        """Repetition factors ``[E]``; 1 for tokens with a bias only."""
        return self._repetition[: len(self._place)]

    def took(self, token: int) -> None:
        """Record a sampled token."""
        params = self._params
        if not params.penalises_output:
            return
        place = self._entry(token)
        self._add[place] -= params.frequency_penalty + (params.presence_penalty if not self._counts[place] else 0.0)
        self._counts[place] += 1
        self._repetition[place] = params.repetition_penalty

    def apply(self, row: npt.NDArray[np.float32]) -> None:
        """Change a row ``[V]`` in place. Raises IndexError for a biased token outside the vocabulary."""
        if not self._place:
            return
        ids = self.ids
        row[ids] = edited(row[ids], repetition=self.repetition, add=self.add)

    def entry(self, token: int) -> tuple[float, float]:
        """Return a token's repetition factor and addition."""
        place = self._place.get(token)
        return (1.0, 0.0) if place is None else (float(self._repetition[place]), float(self._add[place]))

    def original(self, token: int, changed: float) -> float:
        """Return the model's logit of a token from its changed logit."""
        place = self._place.get(token)
        if place is None:
            return changed
        logit, factor = changed - float(self._add[place]), float(self._repetition[place])
        return logit * factor if logit > 0 else logit / factor

    def _entry(self, token: int) -> int:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token
        return place

    def _grow(self) -> None:
        size = len(self._ids)
        self._ids = np.concatenate([self._ids, np.zeros(size, np.int64)])
        self._add = np.concatenate([self._add, np.zeros(size, np.float32)])
        self._repetition = np.concatenate([self._repetition, np.ones(size, np.float32)])
        self._counts = np.concatenate([self._counts, np.zeros(size, np.int32)])


def edited(
    logits: npt.NDArray[np.float32], *, repetition: npt.NDArray[np.float32], add: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return logits ``[E]`` after penalties and bias."""
    return np.where(logits > 0, logits / repetition, logits * repetition) + add
