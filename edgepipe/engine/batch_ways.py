"""Follow a batch's lengths, and choose the way to fill its steps in a child process."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from edgepipe.children.warm_child import ChildEnded, WarmChild
from edgepipe.clock import Clock
from edgepipe.engine.way_child import MODULE, question_for
from edgepipe.scheduler import Scheduler, SchedulerLimits
from edgepipe.scheduler.batch_ways import AUTO, TEMPORAL, THROTTLED, make_way
from edgepipe.scheduler.pacing import Pacer
from edgepipe.simulation.batch_choice import ChoiceTimes, facts_of

logger = logging.getLogger(__name__)
_START_S = 30.0  # a busy machine imports slowly
_CHOICE_S = 300.0  # simulations at low priority
_MOST_ANSWER_BYTES = 4096


class BatchWays:
    """The way in which one epoch's scheduler fills steps of batches."""

    def __init__(self, policy: str, scheduler: Scheduler, limits: SchedulerLimits, pacer: Pacer, clock: Clock) -> None:
        """``policy``: ``temporal`` or ``auto``; any other policy fills the steps of batches, too."""
        self._scheduler = scheduler
        self._limits = limits
        self._pacer = pacer
        self._clock = clock
        self._times = ChoiceTimes() if policy == AUTO else None
        self._due = asyncio.Event()
        self._way = THROTTLED
        if policy in (TEMPORAL, AUTO):
            self._set(TEMPORAL if policy == TEMPORAL else THROTTLED)

    @property
    def chooses(self) -> bool:
        """Whether the way follows from the lengths of answers, so that ``ended`` must be called."""
        return self._times is not None

    def ended(self) -> None:
        """Note that a sequence has ended. Wakes ``run`` when it is time to choose."""
        if self._times is not None and self._times.due(num_ended=self._num_ended, now_s=self._clock.monotonic_s()):
            self._due.set()

    async def run(self) -> None:
        """Choose whenever it is time, until cancelled."""
        child = WarmChild(MODULE, start_s=_START_S)
        try:
            while self._times is not None:
                await self._due.wait()
                self._due.clear()
                self._times.note(num_ended=self._num_ended, now_s=self._clock.monotonic_s())
                await self._choose(child)
                await child.end()  # its memory is free until the next choice
        finally:
            await child.end()

    @property
    def _num_ended(self) -> int:
        return self._scheduler.answer_lengths.num_ended

    async def _choose(self, child: WarmChild) -> None:
        facts = facts_of(self._scheduler, self._limits, self._pacer.times, seed=self._num_ended)
        if facts is None:
            return
        question = question_for(facts, self._way)
        try:
            answer = await child.ask(question, within_s=_CHOICE_S, most_bytes=_MOST_ANSWER_BYTES)
        except (TimeoutError, ChildEnded) as exc:
            logger.warning("steps of batches stay as they are (%s): the comparison of ways ended: %r", self._way, exc)
            return
        chosen: dict[str, Any] = json.loads(answer)
        logger.info("steps of batches: way=%s predicted_tokens_per_s=%s", chosen["way"], chosen["rates"])
        if chosen["way"] != self._way:
            self._set(chosen["way"])

    def _set(self, name: str) -> None:
        kv_tokens = self._limits.num_blocks * self._limits.block_size
        self._scheduler.set_batch_way(make_way(name, self._pacer, self._scheduler.answer_lengths, kv_tokens=kv_tokens))
        self._way = name
