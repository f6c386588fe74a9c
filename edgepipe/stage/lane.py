"""One slice's queues: plans and inputs arrive in either order, steps leave in step order or pass bulk ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import takewhile
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


class _Queue:
    """A slice's steps of one class, which arrive in step order: express ones, or bulk ones."""

    def __init__(self, *, bulk: bool, deadline: Deadline) -> None:
        self.bulk = bulk
        self.planned: deque[StageStep] = deque()  # planned steps that are not dispatched
        # Inputs that are not dispatched, with arrival time (monotonic).
        self.arrived: deque[tuple[StepId, Inputs, float]] = deque()
        self.deadline = deadline

    @property
    def is_ready(self) -> bool:
        """Whether the first planned step has its inputs."""
        return bool(self.planned and self.arrived)

    def take(self) -> StageStep:
        """Remove and return the first planned step, which has its inputs."""
        step, inputs, arrived_s = self.arrived.popleft()
        work = self.planned.popleft()
        if step != work.step:
            raise RemoteProtocolError(f"inputs of step {step} came where those of step {work.step} were due")
        work.give_inputs(inputs, arrived_s=arrived_s)
        return work

    def watch(self, receiver: RingReceiver) -> None:
        """Run the deadline while the next step waits for its activations or its plan."""
        waits_for_inputs = self.planned and not self.arrived
        if not waits_for_inputs and receiver.waiting_for_plan(bulk=self.bulk) is None:
            self.deadline.stop()
        elif not self.deadline.running:
            self.deadline.restart()


class Lane:
    """Joins a slice's steps with their inputs: token ids, or activations of this or another stage.

    ``receiver``: set if another stage feeds the slice; ``sender``: set if the slice feeds another stage;
    ``lacks_tokens``: set if this stage samples the tokens of its own steps: whether those of a step are not there yet.
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
        self.lacks_tokens: Callable[[StepId], bool] = _never
        self._hidden_size = hidden_size
        self._kind = activation_type
        self._clock = clock
        self._on_late = on_late
        self._deadline_s = deadline_s
        self._express, self._bulk = self._queues = tuple(
            _Queue(bulk=bulk, deadline=Deadline(limit_s=deadline_s, on_expired=partial(self._late, bulk)))
            for bulk in (False, True)
        )

    def plan(self, work: StageStep) -> None:
        """Queue a planned step. Raises RemoteProtocolError if its activations arrived with the wrong size."""
        queue = self._queues[work.bulk]
        queue.planned.append(work)
        if self.receiver is not None:
            num_bytes = work.num_tokens * self._hidden_size * self._kind.num_bytes
            self.receiver.expect(work.step, num_bytes, bulk=work.bulk)
        self._watch(queue)

    def arrive(self, step: StepId, inputs: Inputs, *, bulk: bool) -> None:
        """Take inputs for a step from the plan or from a slice of this stage."""
        self._queues[bulk].arrived.append((step, inputs, self._clock.monotonic_s()))

    def arrive_bytes(self, step: StepId, data: StepBytes, *, bulk: bool) -> None:
        """Take inputs for a step from the link. Then call ``watch``, once the steps that are ready have left."""
        self.arrive(step, data.view(self._kind.numpy).reshape(-1, self._hidden_size), bulk=bulk)

    def held(self) -> None:
        """Start the deadline because activations came before their plan."""
        for queue in self._queues:
            self._watch(queue)

    def watch(self, *, bulk: bool) -> None:
        """Run or stop the deadline of a class."""
        self._watch(self._queues[bulk])

    def next_ready(self) -> StageStep | None:
        """Return the next step with its inputs; None while it waits for them. Then call ``left``.

        That is the oldest planned step. While its activations are on their way, an express step may pass bulk ones. A
        bulk step may pass express steps that were planned ahead, while these wait for their inputs.
        """
        queue = self._next_queue()
        return queue.take() if queue is not None else None

    def left(self, work: StageStep) -> None:
        """Note that a step is on its way to the device: its credit goes back, and the next one's deadline begins."""
        if self.receiver is not None:
            self.receiver.taken(bulk=work.bulk)
            queue = self._queues[work.bulk]
            queue.deadline.stop()
            self._watch(queue)

    def close(self) -> None:
        """Drop all steps and end the stream that feeds the slice."""
        for queue in self._queues:
            queue.deadline.close()
            queue.planned.clear()
            queue.arrived.clear()
        if self.receiver is not None:
            self.receiver.close()

    def _next_queue(self) -> _Queue | None:
        """Return the queue whose first step is computed next; None while that step waits for its inputs."""
        express, bulk = self._express, self._bulk
        first, other = express, bulk
        if not express.planned or (bulk.planned and bulk.planned[0].step < express.planned[0].step):
            first, other = bulk, express
        if first.is_ready and not self._lacks_tokens(first):
            return first
        if other.is_ready and self._passes(other.planned[0], first):
            return other
        return first if first.is_ready else None

    def _lacks_tokens(self, queue: _Queue) -> bool:
        after = queue.planned[0].after
        return after is not None and self.lacks_tokens(after)

    def _passes(self, work: StageStep, queue: _Queue) -> bool:
        """Return whether a step may pass all older steps of the other class."""
        older = takewhile(lambda each: each.step < work.step, queue.planned)
        return all((queue.bulk or each.after is not None) and work.uses.may_pass(each.uses) for each in older)

    def _watch(self, queue: _Queue) -> None:
        if self.receiver is not None:
            queue.watch(self.receiver)

    def _late(self, bulk: bool) -> None:
        fact = f"waited {self._deadline_s:g} s"
        queue = self._queues[bulk]
        if queue.planned:
            step = queue.planned[0].step
            error = StepFailed(f"the activations of step {step} did not come from the stage before", fact=fact)
        else:
            step = self.receiver.waiting_for_plan(bulk=bulk) if self.receiver is not None else None
            error = StepFailed(f"the plan of step {step} did not come from the engine", fact=fact)
        self._on_late(error)


def _never(after: StepId) -> bool:
    """Default: another stage, or the plan, brings the tokens."""
    return False
