"""Share of a layer's experts that the tokens of a step read together: D(T). PURE.

Of E experts a token uses k. If T tokens choose independently and each expert as likely, they read
``1 - (1 - k/E)^T`` of them: an upper bound, since real choices prefer some experts. A running model shows its own
shares. They count as those of fewer independent tokens, ``T^a`` of T, with ``a`` from 0 to 1; ``a`` varies slowly with
T, so it is interpolated. One token always reads k/E.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import log, log1p

_SMOOTHING = 0.05  # weight of the newest step: about the last forty of its size count
_ENOUGH = 8  # steps of a size until their mean counts
_EVERY = 8  # steps of one size; the first is counted, so a probe's few steps are enough
_MOST_TOKENS = 512  # steps with more tokens read nearly all experts
_ALL = 1e-9  # share of experts that are not read, at least, so that its logarithm is finite


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """Mean share of a layer's experts that steps of about so many tokens read."""

    tokens: float  # tokens of the step, above 1
    share: float  # 0..1


def distinct_share(tokens: float, token_share: float, measured: Sequence[ExpertShare] = ()) -> float:
    """Return the share of the experts that ``tokens`` tokens use together.

    ``token_share``: k / E. ``measured``: by tokens, ascending; empty: the upper bound of independent choices.
    """
    if tokens <= 0 or token_share >= 1:
        return 1.0 if tokens > 0 else 0.0
    alone = tokens ** _exponent(tokens, token_share, measured) if measured and tokens > 1 else tokens
    return 1.0 - (1.0 - token_share) ** alone


def skewed_shares(count: int, used: int, skew: float) -> tuple[ExpertShare, ...]:
    """Return the shares of independent choices of ``used`` from ``count`` experts with unequal odds.

    Expert i is chosen (i + 1)^-skew times as often as the first, as far as no token chooses an expert twice.
    """
    odds = _inclusion(count, used, skew)
    return tuple(
        ExpertShare(tokens, sum(1.0 - (1.0 - each) ** tokens for each in odds) / count)
        for tokens in (1 << octave for octave in range(1, 13))
    )


def _inclusion(count: int, used: int, skew: float) -> list[float]:
    """Return each expert's probability to be among a token's, in proportion to its odds and at most 1."""
    for certain in range(used):  # odds descend: the first of the rest may exceed 1
        odds = [((certain + 1) / (index + 1)) ** skew for index in range(certain, count)]  # 1, then less, down to 0
        share = (used - certain) / sum(odds)
        if share < 1:
            return [1.0] * certain + [each * share for each in odds]
    return [1.0] * used + [0.0] * (count - used)


def _exponent(tokens: float, token_share: float, measured: Sequence[ExpertShare]) -> float:
    """Return ``a`` at ``tokens``: linear in the logarithm of tokens between measurements, constant beyond."""
    points, at = _points(tuple(measured), token_share), log(tokens)
    if at <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in pairwise(points):
        if at <= high:
            return before + (after - before) * (at - low) / (high - low)
    return points[-1][1]


@lru_cache(maxsize=64)
def _points(measured: tuple[ExpertShare, ...], token_share: float) -> list[tuple[float, float]]:
    """Return the logarithm of tokens and the exponent of each measurement."""
    return [(log(each.tokens), _own_exponent(each, token_share)) for each in measured]


def _own_exponent(measured: ExpertShare, token_share: float) -> float:
    alone = log(max(_ALL, 1.0 - measured.share)) / log1p(-token_share)  # independent tokens with that share
    return min(1.0, max(0.0, log(max(1.0, alone)) / log(measured.tokens)))


def cleaned(shares: Iterable[ExpertShare]) -> tuple[ExpertShare, ...]:
    """Return the shares that ``distinct_share`` can use, by tokens, one for each number of tokens."""
    usable = {each.tokens: each for each in shares if each.tokens > 1 and 0 < each.share <= 1}
    return tuple(usable[tokens] for tokens in sorted(usable))


class CountedSteps:
    """Chooses the steps whose experts a backend counts: of each number of tokens the first, and every eighth then."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}  # number of steps so far, by their number of tokens

    def takes(self, tokens: int) -> bool:
        """Note a step of ``tokens`` tokens. Return whether to count it."""
        if not 1 < tokens <= _MOST_TOKENS:
            return False
        steps = self._steps[tokens] = self._steps.get(tokens, 0) + 1
        return steps % _EVERY == 1


@dataclass(slots=True)
class _Mean:
    tokens: float
    share: float
    count: int

    def note(self, tokens: int, share: float) -> None:
        self.count += 1
        weight = max(_SMOOTHING, 1 / self.count)
        self.tokens += weight * (tokens - self.tokens)
        self.share += weight * (share - self.share)


class ExpertMeter:
    """Shares that a running model's steps read, as means by the octave of a step's tokens: 2, to 4, to 8, and so on."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}  # mean share of each octave

    def note(self, tokens: int, share: float) -> None:
        """Record a step's mean share over its layers. Ignores steps of one token, whose share is known."""
        if tokens < 2 or not 0 < share <= 1:
            return
        mean = self._means.setdefault((tokens - 1).bit_length(), _Mean(0.0, 0.0, 0))
        mean.note(tokens, share)

    def shares(self) -> tuple[ExpertShare, ...]:
        """Return the means of all octaves with enough steps, by tokens."""
        means = [self._means[octave] for octave in sorted(self._means)]
        return tuple(ExpertShare(mean.tokens, mean.share) for mean in means if mean.count >= _ENOUGH)
