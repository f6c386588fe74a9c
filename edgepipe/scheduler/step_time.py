"""Predict the time of steps on a slice, for the size of prompt chunks, the engine's deadlines and a stage's limit.

The model of a step's time is ``a + b * tokens + c * pairs``: fixed work, work per token, and work per pair of a token
and one that it attends to. None of the three is negative. So one measured step bounds every other step, on any device:
by ``max(1, tokens / tokens', pairs / pairs')`` times its time. Where the measured sizes are far away, the device's data
sheet gives a tighter bound.

Expected times are the data sheet's, times a ratio that follows the measured steps. Kernels work in tiles and change
with the number of tokens, which no data sheet tells. So steps with prompt tokens have a ratio for each power of two:
its first steps show what kernels of that size cost. Later ones tell more of the device than of its kernels: it is hot,
or other programs use it. They change the ratio of all sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from statistics import median_low

from edgepipe.backend.cost import SliceCost, StepWork
from edgepipe.backend.expert_reads import ExpertShare

_SMOOTHING = 0.2  # weight of a size's newest time
_DOUBT = 4.0  # factor by which a device may be slower than its data sheet before any measurement
_CAUTION = 2.0  # factor by which it may be slower with other sizes than with the measured ones
_FOLLOWING = 0.3  # weight of the newest step in the ratio of measured to data-sheet time
_MOST_CHANGE = 4.0  # largest factor by which one step changes that ratio: the first of a size also compiles kernels
_FIRST_STEPS = 3  # steps of a new size: their median is its ratio to the other sizes
_KERNELS = 0.05  # exponent: part of a later step's ratio that belongs to its size
_NEAR = 2.0  # powers of two beyond the measured sizes at which half of its ratio is left
_FORGETTING = 1 / 64  # part of the ratio that a size with fewer steps loses with each step of another one


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


@dataclass(slots=True)
class _Size:
    """Steps with prompt tokens, of about the same number of tokens."""

    ratio: float = 1.0  # to the other sizes
    first: list[float] = field(default_factory=list[float])  # ratios of the first steps

    @property
    def known(self) -> bool:
        return len(self.first) >= _FIRST_STEPS

    def learn(self, ratio: float) -> None:
        """Take one of the first steps. A single one may have compiled kernels, so half of it counts."""
        self.first.append(ratio)
        self.ratio = median_low(self.first) if len(self.first) > 1 else ratio**0.5


class _PromptRatios:
    """Ratios of measured times to the data sheet's, by the tokens of a step with prompt tokens."""

    def __init__(self) -> None:
        self._all = 1.0  # ratio of all sizes together
        self._sizes: dict[int, _Size] = {}  # keys: powers of two, see ``_power``
        self._powers: list[int] = []  # the same, ascending

    @property
    def most(self) -> float:
        """The largest ratio of a size; 1 before the first step."""
        return self._all * max([size.ratio for size in self._sizes.values()], default=1.0)

    def at(self, tokens: int) -> float:
        """Return the ratio of a step. Sizes that were not measured have parts of their neighbours' ratios."""
        power = _power(tokens)
        if (size := self._sizes.get(power)) is not None:
            return self._all * size.ratio
        if not self._powers:
            return 1.0
        after = bisect_left(self._powers, power)
        if 0 < after < len(self._powers):
            low, high = self._powers[after - 1], self._powers[after]
            share = (power - low) / (high - low)
            return self._all * self._sizes[low].ratio ** (1 - share) * self._sizes[high].ratio ** share
        nearest = self._powers[0] if after == 0 else self._powers[-1]
        return self._all * self._sizes[nearest].ratio ** 0.5 ** (abs(power - nearest) / _NEAR)

    def note(self, tokens: int, ratio: float) -> None:
        """Record the ratio of a measured step."""
        power, expected = _power(tokens), self.at(tokens)
        change = min(max(ratio / expected, 1 / _MOST_CHANGE), _MOST_CHANGE)
        size = self._sizes.get(power)
        if size is None:
            size = self._sizes[power] = _Size()
            self._powers = sorted(self._sizes)
        for other in self._sizes.values():
            if other is not size and not other.known:
                other.ratio **= 1 - _FORGETTING
        if not size.known:
            size.learn(change * expected / self._all)
            return
        own = change**_KERNELS
        size.ratio *= own
        self._all *= (1 + _FOLLOWING * (change - 1)) / own


def _power(tokens: int) -> int:
    """Return the power of two that is no smaller: tiles of kernels end there."""
    return (tokens - 1).bit_length()


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
        self._decodes = 1.0  # measured over data-sheet time, of steps that only decode
        self._prompts = _PromptRatios()  # the same of other steps

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
            ratio = seconds / self._cost.step_s(work)
            if size[0]:
                self._decodes = _followed(self._decodes, ratio)
            else:
                self._prompts.note(work.tokens, ratio)

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
        return self._cost.step_s(work) * (self._decodes if _only_decodes(work) else self._prompts.at(work.tokens))

    def bound_s(self, work: StepWork) -> float:
        """Return an upper bound on the step's seconds on a healthy device; 0 while the device is unknown."""
        known = self._measured.get(_size_class(work))
        if known is not None:
            return known.bound_s(work)
        bounds = [measured.bound_s(work) for measured in self._measured.values()]
        if self._cost is not None:
            slower = max(_DOUBT, _CAUTION * max(self._decodes, self._prompts.most))
            bounds.append(slower * self._cost.step_s(work))
        return min(bounds, default=0.0)


def _followed(before: float, ratio: float) -> float:
    """Return the ratio that follows ``before`` once a step had ``ratio``."""
    ratio = min(max(ratio, before / _MOST_CHANGE), before * _MOST_CHANGE)
    return before + _FOLLOWING * (ratio - before)


def _only_decodes(work: StepWork) -> bool:
    return work.tokens == max(work.rows, work.logit_rows)  # a window has a row of logits for each token


def _size_class(work: StepWork) -> _SizeClass:
    return _only_decodes(work), work.tokens.bit_length(), int(work.attention_pairs).bit_length()
