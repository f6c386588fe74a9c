"""Predict how long answers become, from those of the same batch that have ended. PURE.

TD-Pipe (section 3.3) trains a classifier for the length of each answer. The KV cache holds many answers, so only their
sum matters, and the finished answers of a batch are a sample of the others. The prediction is their distribution: the
share of answers that reach a length, of those that have reached the present one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_KEPT = 1024  # newest answers: a few minutes of a batch
_TAIL = 2.0  # exponent of the tail beyond the longest ended answer
_ENOUGH = 16  # answers of similar prompts until they count alone


class Lengths(NamedTuple):
    """Tokens of one request and its answer."""

    prompt_tokens: int
    output_tokens: int


class AnswerLengths:
    """Lengths of the newest ended answers, by prompt lengths that differ by less than a factor of 2."""

    def __init__(self) -> None:
        self._ended: deque[Lengths] = deque(maxlen=_KEPT)
        self._sorted: dict[int | None, Ints] = {}  # keys: bits of the prompt's length; None for all prompts
        self.num_ended = 0

    def note(self, lengths: Lengths) -> None:
        """Record an answer that has ended by itself or at its limit."""
        self._ended.append(lengths)
        self._sorted.clear()
        self.num_ended += 1

    @property
    def known(self) -> bool:
        """Whether enough answers have ended for predictions."""
        return len(self._ended) >= _ENOUGH

    @property
    def newest(self) -> Sequence[Lengths]:
        """The newest ended answers, oldest first."""
        return self._ended

    def reach(self, *, prompt_tokens: int, output_tokens: int, more: Ints) -> Floats:
        """Return the share of answers that go on for ``more`` tokens, of those with ``output_tokens`` so far.

        more  [N] tokens
        An answer longer than all that have ended has a tail of its own: it doubles in one of four cases.
        """
        lengths = self._of(prompt_tokens.bit_length())
        before = len(lengths) - np.searchsorted(lengths, output_tokens, side="right")
        if not before:
            return (max(1, output_tokens) / (max(1, output_tokens) + more)) ** _TAIL
        return (len(lengths) - np.searchsorted(lengths, output_tokens + more, side="left")) / before

    def expected(self, so_far: Lengths) -> Lengths:
        """Return the lengths with the mean answer of those that ended later than ``so_far``; twice as long if none."""
        lengths = self._of(so_far.prompt_tokens.bit_length())
        longer = lengths[np.searchsorted(lengths, so_far.output_tokens, side="right") :]
        mean = round(float(longer.mean())) if len(longer) else 2 * so_far.output_tokens
        return so_far._replace(output_tokens=max(1, mean))

    def _of(self, bits: int) -> Ints:
        """Return the lengths of answers to such prompts, ascending; to all prompts while these are few."""
        if (known := self._sorted.get(bits)) is None:
            alike = [each.output_tokens for each in self._ended if each.prompt_tokens.bit_length() == bits]
            known = self._sorted[bits] = np.sort(np.array(alike, dtype=np.int64))
        if len(known) >= _ENOUGH:
            return known
        if (every := self._sorted.get(None)) is None:
            every = np.sort(np.array([each.output_tokens for each in self._ended], dtype=np.int64))
            self._sorted[None] = every
        return every
