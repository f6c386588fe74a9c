"""One slice's queue: plans and inputs arrive in either order, steps leave in step order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from edgepipe.backend.types import Activations, ActivationType, TokenIds
from edgepipe.clock import Clock
from edgepipe.errors import EdgepipeError, RemoteProtocolError, StepFailed
from edgepipe.ids import StepId
from edgepipe.link.deadline import Deadline
from edgepipe.link.protocol import Outgoing, StepBytes
from edgepipe.link.receiver import RingReceiver
from edgepipe.spec.facts import Slice
from edgepipe.stage.step_work import StageStep

Inputs: TypeAlias = "TokenIds | Activations"


class Lane:
    """Joins a slice's steps with their inputs: token ids, or activations of this or another stage.

    ``receiver``: set if another stage feeds the slice; ``sender``: set if the slice feeds another stage.
    """

    def __init__(
        self,
        part: Slice,
        *,
        hidden_size: int,
        activation_type: ActivationType,
        deadline_s: float,
        clock: Clock,
        on_late: Callable[[EdgepipeError], None],
    ) -> None:
        self.part = part
        self.receiver: RingReceiver | None = None
        self.sender: Outgoing | None = None
        self._hidden_size = hidden_size
        self._kind = activation_type
        self._clock = clock
        self._on_late = on_late
        self._planned: deque[StageStep] = deque()  # planned steps that are not dispatched
        # Inputs that are not dispatched, with arrival time (monotonic).
        self._arrived: deque[tuple[StepId, Inputs, float]] = deque()
        self._deadline = Deadline(limit_s=deadline_s, on_expired=self._late)
        self._deadline_s = deadline_s

    def plan(self, work: StageStep) -> None:
        """Queue a planned step. Raises RemoteProtocolError if its activations arrived with the wrong size."""
        self._planned.append(work)
        if self.receiver is not None:
            self.receiver.expect(work.step, work.num_tokens * self._hidden_size * self._kind.num_bytes)
        self._watch()

    def arrive(self, step: StepId, inputs: Inputs) -> None:
        """Take inputs for a step from the plan or from a slice of this stage."""
        self._arrived.append((step, inputs, self._clock.monotonic_s()))
        self._watch()

    def arrive_bytes(self, step: StepId, data: StepBytes) -> None:
        """Take inputs for a step from the link."""
        self.arrive(step, data.view(self._kind.numpy).reshape(-1, self._hidden_size))

    def held(self) -> None:
        """Start the deadline because activations came before their plan."""
        if not self._deadline.running:
            self._deadline.restart()

    def next_ready(self) -> StageStep | None:
        """Return the next step in order with its inputs; None while it waits for them."""
        if not self._planned or not self._arrived:
            return None
        step, inputs, arrived_s = self._arrived.popleft()
        work = self._planned.popleft()
        if step != work.step:
            raise RemoteProtocolError(f"inputs of step {step} came where those of step {work.step} were due")
        work.give_inputs(inputs, arrived_s=arrived_s)
        if self.receiver is not None:
            self.receiver.taken()
        self._deadline.stop()
        self._watch()
        return work

    def close(self) -> None:
        """Drop all steps and end the stream that feeds the slice."""
        self._deadline.close()
        self._planned.clear()
        self._arrived.clear()
        if self.receiver is not None:
            self.receiver.close()

    def _watch(self) -> None:
        """Run the deadline while the next step waits for its activations or its plan."""
        waits_for_inputs = self.receiver is not None and self._planned and not self._arrived
        waits_for_plan = self.receiver is not None and self.receiver.waiting_for_plan is not None
        if not waits_for_inputs and not waits_for_plan:
            self._deadline.stop()
        elif not self._deadline.running:
            self._deadline.restart()

    def _late(self) -> None:
        fact = f"waited {self._deadline_s:g} s"
        if self._planned:
            step = self._planned[0].step
            error = StepFailed(f"the activations of step {step} did not come from the stage before", fact=fact)
        else:
            step = self.receiver.waiting_for_plan if self.receiver is not None else None
            error = StepFailed(f"the plan of step {step} did not come from the engine", fact=fact)
        self._on_late(error)
