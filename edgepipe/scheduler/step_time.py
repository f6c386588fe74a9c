"""Predict the time of steps on a slice, for the size of prompt chunks, the engine's deadlines and a stage's limit.

The model of a step's time is ``a + b * tokens + c * pairs``: fixed work, work per token, and work per pair of a token
and one that it attends to. None of the three is negative. So one measured step bounds every other step, on any device:
by ``max(1, tokens / tokens', pairs / pairs')`` times its time. Where the measured sizes are far away, the device's data
sheet gives a tighter bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgepipe.backend.cost import SliceCost, StepWork
from edgepipe.backend.expert_reads import ExpertShare

_SMOOTHING = 0.2  # weight of a size's newest time
_DOUBT = 4.0  # factor by which a device may be slower than its data sheet before any measurement
_CAUTION = 2.0  # factor by which it may be slower with other sizes than with the measured ones
_FOLLOWING = 0.3  # weight of the newest step in the ratio of measured to data-sheet time
_MOST_CHANGE = 4.0  # largest factor by which one step changes that ratio: the first of a size also compiles kernels


@dataclass(slots=True)
class _Measured:
    """Means over the steps of one size class. All have the same weights, so the model also holds for the means."""

    tokens: float
    pairs: float
    seconds: float

    def note(self, work: StepWork, seconds: float) -> None:
        self.tokens += _SMOOTHING * (work.tokens - self.tokens)
        self.pairs += _SMOOTHING * (work.attention_pairs - self.pairs)
        self.seconds += _SMOOTHING * (seconds - self.seconds)

    def bound_s(self, work: StepWork) -> float:
        """Bound another step's time by this mean."""
        return self.seconds * max(1.0, work.tokens / self.tokens, work.attention_pairs / self.pairs)


_SizeClass = tuple[bool, int, int]  # whether the step only decodes; log2 of tokens; log2 of pairs


class SliceTimes:
    """Seconds of steps on one slice: first from the device's data sheet, then from measurements.

    The number of size classes bounds the memory: a few hundred.
    """

    def __init__(self, cost: SliceCost | None = None) -> None:
        """``cost``: cost of the slice by the device's data sheet; None if that is not known."""
        self._cost = cost
        self._measured: dict[_SizeClass, _Measured] = {}
        self._sizes: set[tuple[bool, int]] = set()
        self._ratios: dict[bool, float] = {}  # measured over data-sheet time, by whether the step only decodes

    def note(self, work: StepWork, seconds: float) -> None:
        """Record a step's seconds on the device."""
        size = _size_class(work)
        self._sizes.add(size[:2])
        known = self._measured.get(size)
        if known is None:
            self._measured[size] = _Measured(work.tokens, work.attention_pairs, seconds)
        else:
            known.note(work, seconds)
        if self._cost is not None:
            self._follow(decodes=size[0], ratio=seconds / self._cost.step_s(work))

    def read_experts(self, shares: tuple[ExpertShare, ...]) -> None:
        """Take the shares of a layer's experts that the model's steps read."""
        if self._cost is not None and self._cost.has_experts:
            self._cost = replace(self._cost, expert_shares=shares)

    def seen(self, work: StepWork) -> bool:
        """Return whether a step of about this many tokens was measured, so its kernels are compiled and caches warm."""
        return _size_class(work)[:2] in self._sizes

    def expected_s(self, work: StepWork) -> float:
        """Return the expected seconds of the step; 0 if the device's data sheet is not known."""
        if self._cost is None:
            return 0.0
        return self._cost.step_s(work) * self._ratios.get(_only_decodes(work), 1.0)

    def bound_s(self, work: StepWork) -> float:
        """Return an upper bound on the step's seconds on a healthy device; 0 while the device is unknown."""
        known = self._measured.get(_size_class(work))
        if known is not None:
            return known.bound_s(work)
        bounds = [measured.bound_s(work) for measured in self._measured.values()]
        if self._cost is not None:
            slower = max(_DOUBT, _CAUTION * max(self._ratios.values(), default=1.0))
            bounds.append(slower * self._cost.step_s(work))
        return min(bounds, default=0.0)

    def _follow(self, *, decodes: bool, ratio: float) -> None:
        before = self._ratios.get(decodes, 1.0)
        ratio = min(max(ratio, before / _MOST_CHANGE), before * _MOST_CHANGE)
        self._ratios[decodes] = before + _FOLLOWING * (ratio - before)


def _only_decodes(work: StepWork) -> bool:
    return work.tokens == max(work.rows, work.logit_rows)  # a window has a row of logits for each token


def _size_class(work: StepWork) -> _SizeClass:
    return _only_decodes(work), work.tokens.bit_length(), int(work.attention_pairs).bit_length()
