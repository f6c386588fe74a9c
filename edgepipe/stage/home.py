"""The tokens' way home: a step that is planned ahead begins with the tokens that an earlier step samples."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgepipe.backend.types import TokenIds
from edgepipe.clock import Clock
from edgepipe.errors import EdgepipeError, RemoteProtocolError
from edgepipe.ids import SequenceId, StepId
from edgepipe.link.protocol import OnStep, Outgoing, StepBytes
from edgepipe.link.receiver import RingReceiver
from edgepipe.stage.lane import Lane
from edgepipe.stage.step_work import StageStep
from edgepipe.wire.plans import StepPlan

logger = logging.getLogger(__name__)

_ID_BYTES = 4  # a token on the way home is an int32


@dataclass(slots=True)
class _Sampling:
    """A step that samples, for the steps after it."""

    sequences: tuple[SequenceId, ...]  # the sequence of each sampling row
    ids: Sequence[int] = ()  # one for each; empty until they are sampled


class Home:
    """Holds the next step of the stage that embeds until its tokens are there. Any thread may call ``give``.

    One step is held at a time: steps keep the order of their plans.
    """

    def __init__(self, put: Callable[[StageStep], None], *, clock: Clock, kept: int) -> None:
        """
        put   takes a step with its tokens, on the thread that brings them
        kept  steps whose tokens are kept: at least as many as are in flight
        """
        self._put = put
        self._clock = clock
        self._kept = kept
        self._lock = threading.Lock()
        self._steps: OrderedDict[StepId, _Sampling] = OrderedDict()
        self._held: StageStep | None = None
        self._paused = False

    @property
    def holds(self) -> bool:
        """Whether a step waits for its tokens."""
        return self._held is not None

    def lacks(self, after: StepId) -> bool:
        """Return whether the tokens that a step ``after`` another one begins with are not there yet."""
        with self._lock:
            sampled = self._steps.get(after)
        return sampled is not None and not sampled.ids

    def planned(self, plan: StepPlan) -> None:
        """Note the rows of a plan that sample. Raises RemoteProtocolError if the step that it follows has others."""
        with self._lock:
            if plan.after is not None:
                self._check(plan, plan.after)
            sequences = tuple([row.sequence for row in plan.rows if row.sample])
            if plan.home and sequences:
                self._steps[plan.step] = _Sampling(sequences)
                if len(self._steps) > self._kept:
                    self._steps.popitem(last=False)

    def hold(self, work: StageStep) -> None:
        """Pass a step on once the tokens that it begins with are there."""
        with self._lock:
            self._held = work
            ready = self._take()
        if ready is not None:
            self._put(ready)

    def give(self, step: StepId, ids: Sequence[int]) -> None:
        """Take the sampled tokens of a step: one for each row that samples, in the order of the rows.

        A sequence that could not be sampled goes on with any token: the engine has ended it.
        """
        with self._lock:
            known = self._steps.get(step)
            if known is not None:
                known.ids = ids
            ready = self._take()
        if ready is not None:
            self._put(ready)

    def inputs(self, plan: StepPlan) -> TokenIds | None:
        """Return the tokens of a plan's rows; None while they are not there."""
        if plan.after is None:
            return np.array(plan.token_ids, np.int32)
        with self._lock:
            return self._tokens(plan.after, tuple([row.sequence for row in plan.rows]))

    def pause(self) -> None:
        """Pass no step on until ``resume``."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Pass steps on again."""
        with self._lock:
            self._paused = False
            ready = self._take()
        if ready is not None:
            self._put(ready)

    def close(self) -> None:
        """Drop the step that waits, and all tokens."""
        with self._lock:
            self._held = None
            self._steps.clear()

    def _take(self) -> StageStep | None:
        """Return the held step with its tokens as inputs, if they are there."""
        work = self._held
        if work is None or work.after is None or self._paused:
            return None
        tokens = self._tokens(work.after, work.sequences)
        if tokens is None:
            return None
        self._held = None
        work.give_inputs(tokens, arrived_s=self._clock.monotonic_s())
        return work

    def _tokens(self, after: StepId, sequences: tuple[SequenceId, ...]) -> TokenIds | None:
        """Return the tokens that a step sampled for the sequences."""
        sampled = self._steps.get(after)
        if sampled is None or not sampled.ids:
            return None
        if sampled.sequences == sequences:
            return np.array(sampled.ids, np.int32)
        tokens = dict(zip(sampled.sequences, sampled.ids, strict=True))
        return np.array([tokens[sequence] for sequence in sequences], np.int32)

    def _check(self, plan: StepPlan, after: StepId) -> None:
        known = self._steps.get(after)
        missing = {row.sequence for row in plan.rows}.difference(known.sequences if known is not None else ())
        if missing:
            raise RemoteProtocolError(
                f"the plan of step {plan.step} is invalid: it follows step {after}, "
                f"which samples nothing for sequence {min(missing)}"
            )


class HomeFeed:
    """Brings the tokens that another stage samples to the slice that embeds, in the order of the plans."""

    def __init__(
        self,
        home: Home,
        lane: Lane,
        *,
        make_receiver: Callable[[OnStep], RingReceiver],
        vocab_size: int,
        on_tokens: Callable[[StepId, Sequence[int]], None],
    ) -> None:
        """``on_tokens``: called when the tokens of a step came, and those of later steps may be computed."""
        self._home = home
        self._lane = lane
        self._vocab_size = vocab_size
        self._on_tokens = on_tokens
        self._waiting: deque[StepPlan] = deque()  # express steps without tokens, or behind such a step
        self.receiver = make_receiver(self._came)

    def planned(self, plan: StepPlan) -> None:
        """Take the size of a step's tokens from its plan. Raises RemoteProtocolError."""
        if plan.home:
            num_rows = sum([1 for row in plan.rows if row.sample])
            self.receiver.expect(plan.step, _ID_BYTES * num_rows, bulk=plan.is_bulk)

    def give(self, plan: StepPlan) -> None:
        """Give the lane the tokens of an express step, now or when they come."""
        self._waiting.append(plan)
        self._drain()

    def close(self) -> None:
        """End the stream, and drop what waits."""
        self.receiver.close()
        self._waiting.clear()

    def _came(self, step: StepId, data: StepBytes, bulk: bool) -> None:
        """Take the tokens of a step. Raises RemoteProtocolError."""
        ids: list[int] = data.view(np.int32).tolist()
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise RemoteProtocolError(
                f"the last stage sent tokens of step {step} that the model does not have",
                fact=f"{min(ids)} to {max(ids)}; ids go from 0 to {self._vocab_size - 1}",
            )
        self._home.give(step, ids)
        self._drain()
        self._on_tokens(step, ids)
        self.receiver.taken(bulk=bulk)

    def _drain(self) -> None:
        waiting = self._waiting
        while waiting and (tokens := self._home.inputs(waiting[0])) is not None:
            self._lane.arrive(waiting.popleft().step, tokens, bulk=False)


class WayHome:
    """Sends the tokens of a stage that samples to the stage that embeds, where that is another one."""

    def __init__(self, sender: Outgoing) -> None:
        self._sender = sender
        self._is_open = False  # the other stage takes tokens
        self._due: dict[StepId, bool] = {}  # planned steps whose tokens go home, and whether each is bulk

    async def run(self) -> None:
        """See ``Outgoing.run``. Where no connection can be made, return: then no steps are planned ahead."""
        try:
            await self._sender.run()
        except EdgepipeError as exc:
            if self._is_open:
                raise
            logger.info("no steps are planned ahead, as the first stage takes no tokens: %s", exc)

    async def opened(self) -> None:
        """Wait until the other stage takes tokens."""
        await self._sender.connected()
        self._is_open = True

    def planned(self, plan: StepPlan) -> None:
        """Note a planned step."""
        if plan.home:
            self._due[plan.step] = plan.is_bulk

    def send(self, step: StepId, ids: Sequence[int]) -> None:
        """Send the tokens of a step if its plan says so, once. Steps come in the order of computing.

        ``ids``: the newest token of each row that samples; 0 for a sequence that was not sampled and ends
        """
        bulk = self._due.pop(step, None)
        if bulk is not None:
            self._sender.send(step, np.array(ids, np.int32), bulk=bulk)
