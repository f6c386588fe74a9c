"""Trials: streams under way, one fault among them, and the judgement of what the clients saw."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgepipe.system import SystemClock
from tests.support.faults.chaos.client import RecordingClient
from tests.support.faults.chaos.cluster import WHOLE_S, ChaosCluster
from tests.support.faults.chaos.link_faults import LINK_FAULTS
from tests.support.faults.chaos.machine_faults import MACHINE_FAULTS
from tests.support.faults.chaos.nemesis import LOOK_S, Nemesis
from tests.support.faults.chaos.process_faults import PROCESS_FAULTS
from tests.support.faults.chaos.requests import draw_request, stop_inside
from tests.support.faults.history import Answer, Ended, Given, History, Struck, assert_holds, check
from tests.support.processes.nodes import kv_is_free

FAULTS = {**PROCESS_FAULTS, **MACHINE_FAULTS, **LINK_FAULTS}
_ANSWER_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one fault did to the streams."""

    fault: str
    stalls_s: tuple[float, ...]  # per stream that it met under way: the longest time without a token

    @property
    def in_time(self) -> bool:
        """Whether it struck before the streams had ended."""
        return bool(self.stalls_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A request and the answer that it was given without faults."""

    body: Mapping[str, Any]
    answer: Answer


class ChaosRun:
    """Trials against one cluster, all drawn from one seed."""

    def __init__(self, cluster: ChaosCluster, *, seed: int, max_tokens: int = 120, exact: bool = True) -> None:
        """``exact``: what is computed does not depend on what is computed beside it. Where it does, as on real models,
        only the number of tokens is known, and that nothing is sent twice."""
        self.cluster = cluster
        self.trials: list[Trial] = []
        self._seed = seed
        self._random = random.Random(seed)
        self._max_tokens = max_tokens
        self._exact = exact
        self._clock = SystemClock()
        self._nemesis = Nemesis(cluster, random=self._random, clock=self._clock)
        self._known: list[_Known] = []
        self._number = 0

    async def prepare(self, *, num_requests: int = 5) -> None:
        """Draw requests and let each be answered without faults: that answer is the right one ever after."""
        await self.cluster.until_ready()
        for index in range(num_requests):
            body = draw_request(self._random, index=index, model=self.cluster.model, max_tokens=self._max_tokens)
            answer = await self._answer_of(body)
            if index % 3 == 2 and self._exact:
                body = {**body, "stop": [stop_inside(answer.texts[0], self._random)]}
                answer = await self._answer_of(body)
            self._known.append(_Known(body=body, answer=answer))

    async def trial(
        self,
        fault: str,
        *,
        num_streams: int = 0,
        strike_at: float | None = None,
        one_leaves: bool = False,
        most_pause_s: float = 30.0,
    ) -> Trial:
        """Start streams, strike when one of them is at a random token, wait for all to end, check all rules, heal.

        ``strike_at``: the share of the first stream's tokens at which to strike; None: drawn. ``one_leaves``: a client
        hangs up right after the fault. Raises AssertionError with seed and timeline.
        """
        history = History(seed=self._seed)
        drawn = [self._random.choice(self._known) for _ in range(num_streams or self._random.randint(1, 4))]
        streams = {self._name(): known for known in drawn}
        share = self._random.uniform(0.0, 0.7) if strike_at is None else strike_at
        await self._ask_and_strike(fault, streams, history, share=share, one_leaves=one_leaves)
        self._judge(streams, history, most_pause_s=most_pause_s)
        await self._nemesis.heal()
        await self.cluster.until_ready()
        await self.cluster.first.until(kv_is_free)
        trial = Trial(fault=fault, stalls_s=_stalls_s(history, streams))
        self.trials.append(trial)
        return trial

    async def _ask_and_strike(
        self, fault: str, streams: Mapping[str, _Known], history: History, *, share: float, one_leaves: bool
    ) -> None:
        """From the first request to the end of the last stream."""
        client = RecordingClient(history, http_port=self.cluster.http_port, clock=self._clock)
        names = list(streams)
        first, last = names[0], names[-1]
        struck_at_tokens = int(share * streams[first].answer.completion_tokens)
        self._nemesis.begin(history, moment=partial(client.reached, first, struck_at_tokens))
        async with asyncio.TaskGroup() as tasks:
            asking = {
                name: tasks.create_task(client.ask(name, known.body, answer_s=_ANSWER_S), name=name)
                for name, known in streams.items()
            }
            await FAULTS[fault](self._nemesis)
            if one_leaves and asking[last].cancel():
                client.left(last)

    def _judge(self, streams: Mapping[str, _Known], history: History, *, most_pause_s: float) -> None:
        """Raises AssertionError with seed and timeline if a rule is broken."""
        ended_at_s = self._clock.monotonic_s()
        answers = {name: known.answer for name, known in streams.items()}
        if not self._exact:
            for name, answer in answers.items():
                counts = [list(map(len, known.ids)) for known in (history.answer(name), answer)]
                assert counts[0] == counts[1], f"seed {self._seed}: {name} has {counts[0]} tokens, not {counts[1]}"
        expected = answers if self._exact else {}
        found = check(history, expected=expected, most_pause_s=most_pause_s, ended_at_s=ended_at_s)
        assert_holds(history, found)

    async def _answer_of(self, body: Mapping[str, Any]) -> Answer:
        history = History(seed=self._seed)
        client = RecordingClient(history, http_port=self.cluster.http_port, clock=self._clock)
        async with asyncio.timeout(WHOLE_S):
            while True:
                name = self._name()
                await client.ask(name, body, answer_s=_ANSWER_S)
                last = history.of(name)[-1]
                if isinstance(last, Ended) and last.how == "done":
                    return history.answer(name)
                if any(isinstance(event, Given) for event in history.of(name)):
                    raise AssertionError(f"seed {self._seed}: no answer without faults: {last}")
                await asyncio.sleep(LOOK_S)  # the gateway has not heard of the model yet

    def _name(self) -> str:
        self._number += 1
        return f"stream-{self._number}"


def _stalls_s(history: History, streams: Mapping[str, _Known]) -> tuple[float, ...]:
    """Of the streams that the first blow met under way."""
    struck_at_s = next(event.at_s for event in history.events if isinstance(event, Struck))
    stalls = (history.stall_s(name, since_s=struck_at_s) for name in streams)
    return tuple(stall for stall in stalls if stall is not None)
