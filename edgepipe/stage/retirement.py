"""PURE: steps retire in the order of their plans, whatever the order in which sampler threads finish."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from edgepipe.ids import Epoch, StepId
from edgepipe.wire.plans import StepDone, StepTiming


class Retirement:
    """The steps that end on this stage and have not been reported."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._due: deque[StepId] = deque()
        self._settled: dict[StepId, StepDone] = {}

    def due(self, step: StepId) -> None:
        """A plan ends on this stage."""
        self._due.append(step)

    def settle(self, step: StepId, ids: tuple[int, ...], timings: tuple[StepTiming, ...]) -> Iterator[StepDone]:
        """The step is finished. Gives what can be reported now."""
        self._settled[step] = StepDone(epoch=self._epoch, step=step, ids=ids, timings=timings)
        while self._due and self._due[0] in self._settled:
            yield self._settled.pop(self._due.popleft())
