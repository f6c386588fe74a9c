"""What a token's turn takes beside computing, waiting and uploading: the ring's latency, on one clock.

The engine's clock sees a plan leave and its token come back. Stages tell how long the step stayed with each of them
(waiting for the device included), links how long an upload takes. What is left of the turn is latency: all one-way
delays, sampling, the way of the plan and of the token, and what event loops add. Only durations are subtracted, so the
clocks of two machines are never compared, and a path that is slower one way than the other is counted right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgepipe.ids import StepId

_SMOOTHING = 0.05  # weight of the newest value: about the last forty count
_MAX_OPEN = 1024  # steps of which something has not been told yet
_PROMPT_TOKENS = 32  # in a step that is still taken: with more, the upload is large and its error, too


@dataclass(slots=True)
class _Open:
    num_tokens: int
    sent_s: float
    turn_s: float | None = None
    stayed_s: float = 0.0
    told: int = 0  # slices


class TurnLedger:
    """Puts together what is told of each step, in whatever order it comes."""

    def __init__(self, *, num_slices: int, upload_s: Callable[[int], float]) -> None:
        self._num_slices = num_slices
        self._upload_s = upload_s  # of a step of so many tokens, over all links
        self._open: dict[StepId, _Open] = {}  # in the order of sending
        self._latency_s = 0.0
        self._count = 0

    @property
    def latency_s(self) -> float:
        """Smoothed; 0 while nothing is known."""
        return max(0.0, self._latency_s)

    def sent(self, step: StepId, *, num_rows: int, num_tokens: int, now_s: float) -> None:
        """A plan left."""
        if num_tokens > num_rows + _PROMPT_TOKENS:
            return
        self._open[step] = _Open(num_tokens, now_s)
        if len(self._open) > _MAX_OPEN:
            del self._open[next(iter(self._open))]

    def stayed(self, step: StepId, seconds: float) -> None:
        """The step was with one slice for so long, from its inputs' arrival to its output's departure."""
        known = self._open.get(step)
        if known is not None:
            known.stayed_s += seconds
            known.told += 1
            self._settle(step, known)

    def retired(self, step: StepId, now_s: float) -> None:
        """Its token came back."""
        known = self._open.get(step)
        if known is not None:
            known.turn_s = now_s - known.sent_s
            self._settle(step, known)

    def _settle(self, step: StepId, known: _Open) -> None:
        if known.turn_s is None or known.told < self._num_slices:
            return
        del self._open[step]
        left_s = known.turn_s - known.stayed_s - self._upload_s(known.num_tokens)
        self._count += 1
        self._latency_s += max(_SMOOTHING, 1 / self._count) * (left_s - self._latency_s)
