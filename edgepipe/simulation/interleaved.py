"""Times of steps in a ring that passes through its devices more than once. PURE.

Slices of one device share it, and hops between the same two devices share their link. Each server takes the first
arrival, and the older step among those that wait. Within a slice steps keep their order, so none overtakes another.
"""

from __future__ import annotations

from bisect import bisect_right, insort

from edgepipe.backend.cost import Jitter, StepWork
from edgepipe.simulation.ring import Course, RingModel


class InterleavedTraffic:
    """A ring with its steps in flight, like ``RingTraffic``, but for slices that share devices."""

    def __init__(self, model: RingModel) -> None:
        self._model = model
        self._stages = tuple(model.stages)
        self._devices = {stage.device: _Server() for stage in self._stages}
        names = [stage.device for stage in self._stages]
        self._hops = list(zip(names, [*names[1:], ""], strict=True))
        self._links = {hop: _Server() for hop in self._hops}
        self._left_s = [0.0] * len(self._stages)  # times when the previous step left each slice's device
        # Times when the previous step arrived at the device after each slice.
        self._arrived_s = [0.0] * len(self._stages)
        self._jitters = [
            Jitter(variation=stage.jitter, entropy=(model.seed, stage.first_layer)) for stage in self._stages
        ]

    def send(self, work: StepWork, now_s: float) -> Course:
        """Plan a step at ``now_s`` and return its times."""
        spans: list[tuple[float, float]] = []
        uploads: list[float] = []
        at_s = now_s
        last = len(self._stages) - 1
        delays = self._model.delays_s(work)
        for server in (*self._devices.values(), *self._links.values()):
            server.forget_before(now_s)
        for index, stage in enumerate(self._stages):
            seconds = stage.step_s(work) * self._jitters[index].factor()
            start_s = self._devices[stage.device].take(max(at_s, self._left_s[index]), seconds)
            end_s = self._left_s[index] = start_s + seconds
            spans.append((start_s, end_s))
            upload_s = stage.link.upload_s(stage.token_bytes * (work.logit_rows if index == last else work.tokens))
            uploads.append(upload_s)
            departs_s = self._links[self._hops[index]].take(end_s, upload_s) + upload_s
            at_s = self._arrived_s[index] = max(self._arrived_s[index], departs_s + delays[index])
        return Course(tuple(spans), tuple(uploads), at_s)


class _Server:
    """A server for one job at a time. Planned jobs stay; a new job takes the first gap that is long enough."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []  # busy intervals (from, to), in order

    def take(self, at_s: float, seconds: float) -> float:
        """Reserve ``seconds`` for a job that arrives at ``at_s``. Return the start time."""
        if not seconds:
            return at_s
        start_s = at_s
        first = max(0, bisect_right(self._taken, (at_s, float("inf"))) - 1)
        for begins_s, ends_s in self._taken[first:]:
            if begins_s >= start_s + seconds:
                break
            start_s = max(start_s, ends_s)
        insort(self._taken, (start_s, start_s + seconds))
        return start_s

    def forget_before(self, now_s: float) -> None:
        """Drop intervals before ``now_s``; no later job may start before it."""
        if len(self._taken) > 64 and self._taken[32][1] < now_s:
            del self._taken[:32]
