"""Retires steps in the order of computing, although sampler threads finish in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from edgepipe.ids import Epoch, StepId
from edgepipe.stage.sampler import StepResult
from edgepipe.wire.plans import StepDone, StepTiming


class Retirement:
    """Computed steps that end on this stage and are not yet reported."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._due: deque[StepId] = deque()
        self._settled: dict[StepId, StepDone] = {}

    def due(self, step: StepId) -> None:
        """Add a step that is computed next and ends on this stage."""
        self._due.append(step)

    def settle(self, step: StepId, result: StepResult, timings: tuple[StepTiming, ...]) -> Iterator[StepDone]:
        """Finish a step. Yields the steps that can be reported now."""
        sampled = list(enumerate(result.sampled))
        self._settled[step] = StepDone(
            epoch=self._epoch,
            step=step,
            ids=tuple(each.token for each in result.sampled),
            timings=timings,
            logprobs=tuple((index, each.logprobs) for index, each in sampled if each.logprobs is not None),
            prompt_logprobs=result.prompts,
            failures=tuple((index, each.error) for index, each in sampled if each.error is not None),
        )
        while self._due and self._due[0] in self._settled:
            yield self._settled.pop(self._due.popleft())
