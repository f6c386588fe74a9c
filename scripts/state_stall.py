"""Streams that wait after a lost stage: models with states or windows against a dense one of the same step times.

The real scheduler over three emulated stages in virtual time, so the figures are exact and the same on every machine.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from figures import Row, at_most

from edgepipe.backend.cost import StepWork
from edgepipe.ids import SequenceId
from edgepipe.scheduler import (
    ScheduledStep,
    Scheduler,
    SchedulerLimits,
    SequenceEnded,
    SequenceSpec,
    ThrottledPolicy,
    TokenSampled,
)
from edgepipe.simulation.imagined import ImaginedCluster, imagine
from edgepipe.simulation.ring import RingStage
from edgepipe.spec.memory_classes import MemoryClasses, StatePool
from edgepipe.units import LinkShape
from edgepipe.weights.mixes import named_model

MOST = 1.75  # times the dense model's stall
MODEL, DEVICE = "qwen3-8b:q4_k_m", "m4max"  # whose step times all models have
_CONTEXT, _WINDOW = 8192, 1024  # tokens
SLOTS = StatePool(num_slots=64, gap=1024)
_STAGES = 3
_VOCABULARY = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """What runs when a stage is lost."""

    what: str
    shared: int  # tokens that all prompts begin with
    own: Sequence[int]  # further tokens of each prompt
    answered: int = 0  # tokens of each answer before the loss
    computed: int = 0  # tokens of all before the loss


CHATS = (
    Chats(what="4 chats of 3,000 tokens", shared=0, own=(3000,) * 4, answered=100),
    Chats(what="8 answers to 3,000 tokens", shared=2980, own=(20,) * 8, answered=100),
    Chats(what="a prompt of 8,000 half read", shared=0, own=(8000,), computed=4000),
)


@dataclass
class Ring:
    """Stages and links that take one step after another, and the scheduler's view of them."""

    stages: Sequence[RingStage]
    limits: SchedulerLimits
    now_s: float = 0.0
    output: dict[SequenceId, list[int]] = field(default_factory=dict[SequenceId, list[int]])
    ended: set[SequenceId] = field(default_factory=set[SequenceId])

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, ThrottledPolicy())
        self._in_flight: deque[tuple[ScheduledStep, float]] = deque()
        self._device_free_s = [0.0] * len(self.stages)

    def next_token(self) -> None:
        """Send what is ready, and retire the oldest step."""
        while (step := self.scheduler.next_step()) is not None:
            self._in_flight.append((step, self._back_s(step)))
        step, back_s = self._in_flight.popleft()
        self.now_s = max(self.now_s, back_s)
        ids = [hash((step.step, row)) % _VOCABULARY for row in range(step.num_samples)]
        for event in self.scheduler.retire(step.step, ids):
            if isinstance(event, TokenSampled):
                self.output[event.sequence].append(event.token_id)
            elif isinstance(event, SequenceEnded):
                self.ended.add(event.sequence)

    def lose(self, lost: int) -> None:
        """Begin an epoch without the steps in flight and what the stage has kept."""
        pools = self.scheduler.hand_over()
        self.scheduler = Scheduler(self.limits, ThrottledPolicy())
        if lost < len(self.stages) - 1:
            pools.lose(lost)
            self.scheduler.take_over(pools)
        self._in_flight.clear()
        self._device_free_s = [self.now_s] * len(self.stages)

    def _back_s(self, step: ScheduledStep) -> float:
        work = StepWork.of_rows(step.positions, step.num_tokens, logit_rows=step.num_samples)
        at_s = self.now_s
        for index, stage in enumerate(self.stages[: None if step.last_slice is None else step.last_slice + 1]):
            at_s = self._device_free_s[index] = max(at_s, self._device_free_s[index]) + stage.step_s(work)
            at_s += stage.link.one_way_s + stage.link.upload_s(stage.token_bytes * work.tokens)
        return at_s


def virtual_stall_rows() -> list[Row]:
    """Lose the first, the middle and the last stage."""
    config, weights = named_model(MODEL)
    link = LinkShape(one_way_s=0.0005, bytes_per_s=125e6)
    imagined = imagine(
        ImaginedCluster(
            devices=[DEVICE] * _STAGES,
            config=config,
            weights=weights,
            link=link,
            context_length=_CONTEXT,
            kv_tokens=65_536,
        )
    )
    limits = imagined.limits
    classes = MemoryClasses(windows=(_WINDOW,), of_layer=(1,), context_length=_CONTEXT, slack=_CONTEXT // 8)
    windows = classes.pools(num_blocks=limits.num_blocks, block_size=limits.block_size)
    kinds = {"recurrent": replace(limits, states=SLOTS), "windowed": replace(limits, windows=windows)}
    rows: list[Row] = []
    for chats in CHATS:
        for place, lost in (("first", 0), ("middle", 1), ("last", 2)):
            dense_s = stall_s(Ring(imagined.ring.stages, limits), chats, lost)
            for kind, its_limits in kinds.items():
                took_s = stall_s(Ring(imagined.ring.stages, its_limits), chats, lost)
                what = f"stall, {kind}, {chats.what}, {place} stage lost"
                rows.append(at_most(what, took_s, "s", dense_s, "dense", MOST))
    return rows


def stall_s(ring: Ring, chats: Chats, lost: int) -> float:
    """Virtual seconds from the loss of a stage until every chat has another token."""
    rng = random.Random(1)
    shared, *own = [tuple(rng.randrange(_VOCABULARY) for _ in range(count)) for count in (chats.shared, *chats.own)]
    specs = [
        SequenceSpec(sequence=SequenceId(number), prompt=shared + part, max_tokens=2 * chats.answered + 1)
        for number, part in enumerate(own, start=1)
    ]
    ring.output = {spec.sequence: [] for spec in specs}
    ring.scheduler.submit(specs)
    while (
        min(map(len, ring.output.values())) < chats.answered or ring.scheduler.stats().computed_tokens < chats.computed
    ):
        ring.next_token()
    began_s, known = ring.now_s, {sequence: len(output) for sequence, output in ring.output.items()}
    ring.lose(lost)
    running = [spec for spec in specs if spec.sequence not in ring.ended]
    ring.scheduler.submit(
        [replace(spec, generated=tuple(ring.output[spec.sequence])) for spec in running], accepted=True
    )
    while any(len(ring.output[spec.sequence]) == known[spec.sequence] for spec in running):
        ring.next_token()
    return ring.now_s - began_s
