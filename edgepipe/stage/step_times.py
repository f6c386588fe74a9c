"""How long steps of a size take, and how long one may take before it counts as hung."""

from __future__ import annotations

_FACTOR = 8.0  # ARCHITECTURE: deadline max(5 s, 8 x predicted for its tokens)
_LEAST_S = 5.0
_FIRST_S = 60.0  # a size not seen before: kernels are compiled, caches are cold; also for what is no step
_WEIGHT = 0.2  # of the newest time


class StepTimes:
    """Written on the compute thread, read on the loop: single values only, so that no lock is needed."""

    def __init__(self) -> None:
        self._taken_s: dict[int, float] = {}  # by size class, powers of two: smoothed seconds
        self._running = 0  # tokens of the newest step started
        self._calling = False

    def starts(self, num_tokens: int) -> None:
        """A step of that size was submitted."""
        self._running = num_tokens

    def ended(self, num_tokens: int, seconds: float) -> None:
        """A step of that size took so long."""
        size = num_tokens.bit_length()
        known_s = self._taken_s.get(size)
        self._taken_s[size] = seconds if known_s is None else known_s + _WEIGHT * (seconds - known_s)

    def calls(self, *, calling: bool) -> None:
        """Something that is no step begins or ends: loading, allocating, profiling."""
        self._calling = calling

    def limit_s(self) -> float:
        """For what runs now."""
        if self._calling:
            return _FIRST_S
        if not self._running:
            return _LEAST_S
        known_s = self._taken_s.get(self._running.bit_length())
        return _FIRST_S if known_s is None else max(_LEAST_S, _FACTOR * known_s)
