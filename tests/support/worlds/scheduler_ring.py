"""A ring that only counts: steps come back in order, every token is the same. For prompts too long for the oracle."""

from __future__ import annotations

from collections import Counter, deque

from edgepipe.ids import SequenceId
from edgepipe.scheduler import (
    Policy,
    ScheduledStep,
    Scheduler,
    SchedulerLimits,
    SequenceEnded,
    SequenceSpec,
    ThrottledPolicy,
)


class Ring:
    """Keeps M steps in flight."""

    def __init__(self, limits: SchedulerLimits, policy: Policy | None = None) -> None:
        self.scheduler = Scheduler(limits, policy or ThrottledPolicy())
        self.steps: list[ScheduledStep] = []
        self._in_flight: deque[ScheduledStep] = deque()
        self.tokens: Counter[int] = Counter()  # sampled, by sequence
        self.ended: set[int] = set()

    def submit(self, *specs: SequenceSpec) -> None:
        self.scheduler.submit(specs)

    def fill(self) -> None:
        """Send steps until the scheduler has none."""
        while (step := self.scheduler.next_step()) is not None:
            self.steps.append(step)
            self._in_flight.append(step)

    def go(self, steps: int) -> None:
        """Retire so many steps; the freed places are filled again."""
        for _ in range(steps):
            self.fill()
            if not self._in_flight:
                return
            oldest = self._in_flight.popleft()
            for event in self.scheduler.retire(oldest.step, [[5]] * oldest.num_samples):
                if isinstance(event, SequenceEnded):
                    self.ended.add(event.sequence)
                else:
                    self.tokens[event.sequence] += 1
        self.fill()

    def steps_until_token(self, sequence: int, *, most: int) -> int:
        """Steps that retire from now until the sequence has one more token."""
        had = self.tokens[sequence]
        for count in range(1, most + 1):
            self.go(1)
            if self.tokens[sequence] > had:
                return count
        raise AssertionError(f"no token for {sequence} in {most} steps")

    def cancel(self, sequence: int) -> None:
        self.scheduler.cancel(SequenceId(sequence))
