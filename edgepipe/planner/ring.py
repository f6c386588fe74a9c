"""Where a step is when, in an imagined ring of stages and links. PURE.

Devices and links are servers: each takes one step after the other, in step order. Latency is none. Sends never block
compute. Because a later step cannot overtake an earlier one anywhere, a step's whole way is known when it is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgepipe.backend.cost import Jitter, StepWork
from edgepipe.units import LinkShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStage:
    """A device with its layers, and the link that leaves it."""

    name: str
    step_s: Callable[[StepWork], float]  # without jitter
    link: LinkShape  # to the next stage; the last one's: what ids take on their way back to the engine
    token_bytes: int  # on that link: per token, on the last one per sampled token
    jitter: float = 0.0  # coefficient of variation of step times
    first_layer: int = 0  # of its layers: makes its jitter its own
    device: str = ""  # slices with one device share it; empty: it is its own


@dataclass(frozen=True, slots=True, kw_only=True)
class RingModel:
    """The stages in order."""

    stages: Sequence[RingStage]
    turn_s: float = 0.0  # sampling, and the scheduler's turn until the next step is planned
    seed: int = 0  # of the jitter

    @property
    def interleaved(self) -> bool:
        """Whether the ring passes through a device more than once."""
        named = [stage.device for stage in self.stages if stage.device]
        return len(set(named)) < len(named)

    @property
    def latency_s(self) -> float:
        """What a token's turn takes besides devices and links being busy."""
        return self.turn_s + sum(stage.link.one_way_s + stage.link.jitter_s / 2 for stage in self.stages)


class Course(NamedTuple):
    """A step's way around the ring."""

    stages: tuple[tuple[float, float], ...]  # per stage: when its device begins and ends
    uploads_s: tuple[float, ...]  # per link: how long it is busy
    back_s: float  # when its sampled tokens can be scheduled again


class RingTraffic:
    """The ring with what is under way."""

    def __init__(self, model: RingModel) -> None:
        self._stages = tuple(model.stages)
        self._turn_s = model.turn_s
        self._device_free_s = [0.0] * len(self._stages)
        self._link_free_s = [0.0] * len(self._stages)
        self._last_arrival_s = [0.0] * len(self._stages)
        self._jitters = [
            Jitter(variation=stage.jitter, entropy=(model.seed, stage.first_layer)) for stage in self._stages
        ]
        self._delays = np.random.default_rng((model.seed, 1 << 20))

    def send(self, work: StepWork, now_s: float) -> Course:
        """Plan a step at ``now_s``."""
        spans: list[tuple[float, float]] = []
        uploads: list[float] = []
        last = len(self._stages) - 1
        at_s = now_s
        for index, stage in enumerate(self._stages):
            start_s = max(at_s, self._device_free_s[index])
            end_s = start_s + stage.step_s(work) * self._jitters[index].factor()
            self._device_free_s[index] = end_s
            spans.append((start_s, end_s))
            num_bytes = stage.token_bytes * (work.logit_rows if index == last else work.tokens)
            upload_s = stage.link.upload_s(num_bytes)
            uploads.append(upload_s)
            at_s = self._cross(index, end_s, upload_s)
        return Course(tuple(spans), tuple(uploads), at_s + self._turn_s)

    def _cross(self, index: int, ready_s: float, upload_s: float) -> float:
        """When the last byte is at the other end of the link."""
        link = self._stages[index].link
        departs_s = max(ready_s, self._link_free_s[index]) + upload_s
        self._link_free_s[index] = departs_s
        delay_s = link.one_way_s + (link.jitter_s * float(self._delays.random()) if link.jitter_s else 0.0)
        arrives_s = max(self._last_arrival_s[index], departs_s + delay_s)
        self._last_arrival_s[index] = arrives_s
        return arrives_s
