"""Measures the ring's latency on one clock: a token's turn without computing, waiting and uploading.

The engine measures the time from sending a plan to its token's return. Stages report how long they held the step,
including the wait for the device; links report upload times. The rest of the turn is latency: all one-way delays,
sampling, the trips of plan and token, and event loops. Only durations are subtracted, so clocks of two machines are
never compared, and a path that is slower in one direction is counted correctly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgepipe.ids import StepId

_SMOOTHING = 0.05  # weight of the newest value: about the last forty count
_MAX_OPEN = 1024  # steps with missing reports
_PROMPT_TOKENS = 32  # limit for a measured step: with more, the upload and its error are large


@dataclass(slots=True)
class _Open:
    num_tokens: int
    sent_s: float
    follows: bool  # its turn begins when the token of the step before it comes back
    turn_s: float | None = None
    stayed_s: float = 0.0
    reported: int = 0  # slices


class TurnLedger:
    """Combines the reports of each step, in any order."""

    def __init__(self, *, num_slices: int, upload_s: Callable[[int], float]) -> None:
        self._num_slices = num_slices
        self._upload_s = upload_s  # seconds of a step's upload over all links, by its tokens
        self._open: dict[StepId, _Open] = {}  # steps in the order of sending
        self._followers: dict[StepId, StepId] = {}  # steps that were planned ahead, by the step that they follow
        self._latency_s = 0.0
        self._count = 0
        self._token_s = 0.0
        self._num_tokens = 0

    @property
    def latency_s(self) -> float:
        """Smoothed latency in seconds; 0 before the first measurement."""
        return max(0.0, self._latency_s)

    @property
    def token_s(self) -> float:
        """Smoothed time between the tokens of steps that were planned ahead; 0 before the first measurement."""
        return self._token_s

    def sent(self, step: StepId, *, num_rows: int, num_tokens: int, now_s: float, after: StepId | None = None) -> None:
        """Record that a plan was sent. Ignores steps with many prompt tokens.

        The turn of a step ``after`` another one in flight begins when that one's token comes back.
        """
        if num_tokens > num_rows + _PROMPT_TOKENS:
            return
        if after is not None:
            self._followers[after] = step
        self._open[step] = _Open(num_tokens, now_s, after is not None)
        if len(self._open) > _MAX_OPEN:
            del self._open[next(iter(self._open))]

    def stayed(self, step: StepId, seconds: float) -> None:
        """Record how long one slice held the step, from its input's arrival to its output's departure."""
        known = self._open.get(step)
        if known is not None:
            known.stayed_s += seconds
            known.reported += 1
            self._settle(step, known)

    def retired(self, step: StepId, now_s: float) -> None:
        """Record that the step's token came back."""
        follower = self._open.get(self._followers.pop(step, StepId(0)))
        if follower is not None:
            follower.sent_s = now_s
        known = self._open.get(step)
        if known is not None:
            known.turn_s = now_s - known.sent_s
            if known.follows:
                self._num_tokens += 1
                self._token_s += max(_SMOOTHING, 1 / self._num_tokens) * (known.turn_s - self._token_s)
            self._settle(step, known)

    def _settle(self, step: StepId, known: _Open) -> None:
        if known.turn_s is None or known.reported < self._num_slices:
            return
        del self._open[step]
        left_s = known.turn_s - known.stayed_s - self._upload_s(known.num_tokens)
        self._count += 1
        self._latency_s += max(_SMOOTHING, 1 / self._count) * (left_s - self._latency_s)
