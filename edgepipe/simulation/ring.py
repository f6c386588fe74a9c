"""Times of steps in a modelled ring of stages and links. PURE.

Devices and links are servers: each takes one step after another, in step order. Latency is not a server. Sends never
block compute. Since no step overtakes an earlier one, all times of a step are known when it is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from edgepipe.backend.cost import Jitter, StepWork
from edgepipe.planner.hosts import hop_host_s, turn_host_s
from edgepipe.scheduler.pacing import RingTimes
from edgepipe.units import LinkShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStage:
    """A device with its layers, and the link that leaves it."""

    name: str
    step_s: Callable[[StepWork], float]  # time without jitter; for decodes, linear in their KV tokens
    link: LinkShape  # link to the next stage; the last stage's link carries ids back to the engine
    token_bytes: int  # size on that link: per token; on the last link per sampled token
    jitter: float = 0.0  # coefficient of variation of step times
    first_layer: int = 0  # seeds its jitter
    device: str = ""  # slices with the same name share a device; empty: its own device
    host_s: float = 0.0  # cost of one small message on its machine; 0: hosts take no time


@dataclass(frozen=True, slots=True, kw_only=True)
class RingModel:
    """Stages of a ring, in order."""

    stages: Sequence[RingStage]
    seed: int = 0  # seed of the jitter

    @property
    def interleaved(self) -> bool:
        """Whether the ring passes through a device more than once."""
        named = [stage.device for stage in self.stages if stage.device]
        return len(set(named)) < len(named)

    def delays_s(self, work: StepWork) -> tuple[float, ...]:
        """Return a step's delay after each stage, to the next stage or back to the first, without the upload.

        That is the link's one-way latency without jitter, and the hosts' time. Neither blocks other steps.
        """
        hops = (
            stage.link.one_way_s + hop_host_s(following.host_s, stage.token_bytes * work.tokens)
            for stage, following in pairwise(self.stages)
        )
        first, last = self.stages[0], self.stages[-1]
        return (*hops, last.link.one_way_s + turn_host_s(first.host_s, work.logit_rows))

    def times(self) -> RingTimes:
        """Return the times of steps without jitter, as an engine measures them."""
        devices: dict[str, list[Callable[[StepWork], float]]] = {}
        for index, stage in enumerate(self.stages):
            devices.setdefault(stage.device or str(index), []).append(stage.step_s)
        one = StepWork.of_rows((0,), (1,), logit_rows=1)
        return RingTimes(
            stages=list(devices.values()),
            uploads=[partial(_upload_s, stage) for stage in self.stages[:-1]],
            latency_s=lambda: self.latency_s(one),
        )

    def latency_s(self, work: StepWork) -> float:
        """Return the part of the step's turn in which it occupies no device or link."""
        return sum(self.delays_s(work)) + sum(stage.link.jitter_s / 2 for stage in self.stages)


def _upload_s(stage: RingStage, num_tokens: int) -> float:
    return stage.link.upload_s(stage.token_bytes * num_tokens)


class Course(NamedTuple):
    """A step's times around the ring."""

    stages: tuple[tuple[float, float], ...]  # start and end of each stage on its device
    uploads_s: tuple[float, ...]  # busy time of each link
    back_s: float  # time when its sampled tokens can be scheduled again


class Repeated(NamedTuple):
    """Repeated steps; both lists have one entry per step."""

    planned_s: list[float]  # planning time: when the same step's previous turn was back
    courses: list[Course]
    stopped: bool  # the ``stop`` function ended the repetition


class _Server:
    """A stage's device and outgoing link, and when each becomes free."""

    __slots__ = ("device_free_s", "jitter", "last_arrival_s", "link", "link_free_s", "step_s", "token_bytes")

    def __init__(self, stage: RingStage, *, seed: int) -> None:
        self.step_s = stage.step_s
        self.link = stage.link
        self.token_bytes = stage.token_bytes
        self.jitter = Jitter(variation=stage.jitter, entropy=(seed, stage.first_layer))
        self.device_free_s = self.link_free_s = self.last_arrival_s = 0.0


class RingTraffic:
    """A ring with its steps in flight."""

    def __init__(self, model: RingModel) -> None:
        self._model = model
        self._servers = [_Server(stage, seed=model.seed) for stage in model.stages]
        self._delays = np.random.default_rng((model.seed, 1 << 20))

    def send(self, work: StepWork, now_s: float) -> Course:
        """Plan a step at ``now_s`` and return its times."""
        times = [server.step_s(work) for server in self._servers]
        return self._go(times, self._uploads_s(work), self._model.delays_s(work), now_s)

    def _uploads_s(self, work: StepWork) -> tuple[float, ...]:
        """Return the seconds that each link is busy with the step."""
        uploads = [server.link.upload_s(server.token_bytes * work.tokens) for server in self._servers[:-1]]
        last = self._servers[-1]
        return (*uploads, last.link.upload_s(last.token_bytes * work.logit_rows))

    def repeat(
        self,
        works: Sequence[StepWork],
        courses: Sequence[Course],
        *,
        most: int,
        until_s: float,
        stop: Callable[[StepWork, Course], bool] | None,
    ) -> Repeated:
        """Plan decode steps repeatedly in their order, each as soon as it is back, each row one token further.

        works, courses  of the steps in flight, oldest first
        most            maximum number of steps to plan, all before ``until_s``
        stop            called with every step that is back; True ends the repetition before that step
        """
        first = [[server.step_s(work) for server in self._servers] for work in works]
        slopes = [
            [server.step_s(work.later(1)) - now_s for server, now_s in zip(self._servers, times, strict=True)]
            for work, times in zip(works, first, strict=True)
        ]
        count, newest, uploads = len(works), list(courses), [course.uploads_s for course in courses]
        delays = [self._model.delays_s(work) for work in works]
        again = Repeated([], [], stopped=False)
        for number in range(most):
            index, turn = number % count, number // count + 1
            back = newest[index]
            if back.back_s > until_s:
                break
            if stop is not None and stop(works[index], back):
                return again._replace(stopped=True)
            times = [at_s + turn * slope for at_s, slope in zip(first[index], slopes[index], strict=True)]
            newest[index] = course = self._go(times, uploads[index], delays[index], back.back_s)
            again.planned_s.append(back.back_s)
            again.courses.append(course)
        return again

    def _go(
        self, times_s: Sequence[float], uploads_s: tuple[float, ...], delays_s: tuple[float, ...], now_s: float
    ) -> Course:
        """Move a step around the ring. This runs for every step, so it avoids repeated look-ups."""
        spans: list[tuple[float, float]] = []
        at_s = now_s
        for server, time_s, upload_s, delay_s in zip(self._servers, times_s, uploads_s, delays_s, strict=True):
            free_s = server.device_free_s
            start_s = at_s if at_s > free_s else free_s
            end_s = start_s + time_s * server.jitter.factor()
            server.device_free_s = end_s
            spans.append((start_s, end_s))
            free_s = server.link_free_s
            departs_s = (end_s if end_s > free_s else free_s) + upload_s
            server.link_free_s = departs_s
            at_s = departs_s + delay_s
            if server.link.jitter_s:
                at_s += server.link.jitter_s * float(self._delays.random())
            if at_s < server.last_arrival_s:
                at_s = server.last_arrival_s
            server.last_arrival_s = at_s
        return Course(tuple(spans), uploads_s, at_s)
