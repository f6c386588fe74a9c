"""PURE: the steps of one class that a hop still owes its receiver, and the limit on writing them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from edgepipe.backend.types import Activations, TokenIds
from edgepipe.errors import LocalProtocolError
from edgepipe.ids import StepId


@dataclass(frozen=True, slots=True)
class Parcel:
    """One step to send."""

    step: StepId
    data: memoryview  # bytes of the activations
    queued_s: float  # monotonic


class Outbox:
    """Steps in order, kept until acknowledged. A new stream begins again at the first unacknowledged step."""

    def __init__(self, *, max_queued: int) -> None:
        self._max_queued = max_queued
        self._parcels: deque[Parcel] = deque()
        self._written = 0  # number of parcels written to the stream in use
        self._allowed = 0  # number of parcels that the newest grant allows
        self._last = StepId(0)

    def __len__(self) -> int:
        return len(self._parcels)

    def put(self, step: StepId, activations: Activations | TokenIds, queued_s: float) -> None:
        """Queue a step. Raises LocalProtocolError if steps are not ascending or too many wait."""
        if step <= self._last:
            raise LocalProtocolError(f"step {step} was to be sent after step {self._last}")
        if len(self._parcels) >= self._max_queued:
            raise LocalProtocolError(
                f"step {step} would be the {len(self._parcels) + 1}th to wait for the next stage",
                fact=f"at most {self._max_queued} can be in flight",
            )
        self._last = step
        self._parcels.append(Parcel(step, activations.data.cast("B"), queued_s))

    def rewind(self) -> None:
        """Begin again after a broken stream: nothing counts as written, nothing is allowed until the next grant."""
        self._written = self._allowed = 0

    def grant(self, step: StepId, credits: int) -> bool:
        """Drop steps up to ``step``, which have arrived, and allow ``credits`` more. Return whether any was dropped."""
        before = len(self._parcels)
        while self._parcels and self._parcels[0].step <= step:
            self._parcels.popleft()
        gone = before - len(self._parcels)
        self._written = max(0, self._written - gone)
        self._allowed = credits
        return gone > 0

    def next(self) -> Parcel | None:
        """Return the step to write now; None if no step or no credit is left."""
        if self._written >= min(len(self._parcels), self._allowed):
            return None
        return self._parcels[self._written]

    def written(self, parcel: Parcel) -> None:
        """Note that the last piece of ``parcel`` is being written. The step may have been acknowledged before."""
        if self._written < len(self._parcels) and self._parcels[self._written] is parcel:
            self._written += 1
