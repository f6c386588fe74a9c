"""Retires steps in the order of computing, although sampler threads finish in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf

from edgepipe.ids import Epoch, StepId
from edgepipe.stage.sampler import StepResult
from edgepipe.wire.reports import StepDone, StepTiming


class Retirement:
    """Steps that end on this stage and are not yet reported. One without rows retires after all older ones."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._due: deque[StepId] = deque()  # not begun, in the order of their plans
        self._begun: deque[StepId] = deque()  # begun and not done, ordered as they are computed
        self._settled: dict[StepId, StepDone] = {}

    def due(self, step: StepId) -> None:
        """Add a planned step that ends on this stage."""
        self._due.append(step)

    def begin(self, step: StepId) -> None:
        """Note that the step is computed next."""
        self._due.remove(step)
        self._begun.append(step)

    def is_next(self, step: StepId) -> bool:
        """Return whether the step is the oldest of those that are computed and not settled."""
        return bool(self._begun) and self._begun[0] == step

    def settle(self, step: StepId, result: StepResult, timings: tuple[StepTiming, ...]) -> Iterator[StepDone]:
        """Finish a step. Yields the steps that can be reported now."""
        rows = result.sampled
        tokens = [each for row in rows for each in row if each.error is None]
        self._settled[step] = StepDone(
            epoch=self._epoch,
            step=step,
            ids=tuple([tuple([each.token for each in row if each.error is None]) for row in rows]),
            timings=timings,
            logprobs=tuple([(at, each.logprobs) for at, each in enumerate(tokens) if each.logprobs is not None]),
            prompt_logprobs=result.prompts,
            failures=tuple([(at, each.error) for at, row in enumerate(rows) for each in row if each.error is not None]),
            drafts=result.drafts,
        )
        while True:
            if self._begun and self._begun[0] in self._settled:
                yield self._settled.pop(self._begun.popleft())
            elif self._due and self._due[0] in self._settled and self._due[0] < min(self._begun, default=inf):
                yield self._settled.pop(self._due.popleft())
            else:
                return
