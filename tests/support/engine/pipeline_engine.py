"""A small engine for pipelines in this process: sequences, blocks, micro-batches; and backends that a test can hold."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from edgepipe_emulated import EmulatedBackend, EmulatedWeights, emulated_model_config

from edgepipe.backend.protocol import Backend
from edgepipe.backend.types import Activations, BackendOptions, BlockRun, Step, StepOutput, TokenIds
from edgepipe.ids import SequenceId, StepId
from edgepipe.sampling import SamplingParams
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.system import SystemClock
from edgepipe.wire.plans import PlanRow, StepPlan
from edgepipe.wire.registrations import Registration
from edgepipe.wire.reports import StepDone
from tests.support.engine.pipeline import BLOCK_SIZE, Driver, LocalStages, local_stages

NUM_LAYERS = 8
CONFIG = emulated_model_config(num_layers=NUM_LAYERS)
GREEDY = SamplingParams(temperature=0.0)


def emulated(_: int = 0) -> EmulatedBackend:
    """A backend that takes no time."""
    return EmulatedBackend(BackendOptions(device="rtx4090", settings={"time_factor": "0"}))


class HeldBackend:
    """An emulated backend whose steps wait in ``collect`` until released, and one of whose steps may break."""

    block_sizes: tuple[int, ...] = (16,)
    max_submitted = 1

    def __init__(self, inner: EmulatedBackend) -> None:
        self._inner = inner
        self._gates: dict[int, threading.Event] = {}
        self.collected: dict[int, threading.Event] = {step: threading.Event() for step in range(1, 64)}
        self.submitted: dict[int, threading.Event] = {step: threading.Event() for step in range(1, 64)}
        self.breaks_at: int | None = None

    def hold(self, step: int) -> threading.Event:
        """The step's ``collect`` waits until the event is set."""
        return self._gates.setdefault(step, threading.Event())

    def prepare(self, step: Step) -> tuple[Step, Any]:
        return step, self._inner.prepare(step)

    def submit(self, prepared: tuple[Step, Any], inputs: TokenIds | Activations, edits: Any = None) -> tuple[Step, Any]:
        if prepared[0].step == self.breaks_at:
            raise ArithmeticError("the device has fallen off its perch")
        ticket = self._inner.submit(prepared[1], inputs, edits)
        self.submitted[prepared[0].step].set()
        return prepared[0], ticket

    def collect(self, ticket: tuple[Step, Any]) -> StepOutput:
        step = ticket[0].step
        if step in self._gates:
            assert self._gates[step].wait(30)
        output = self._inner.collect(ticket[1])
        self.collected[step].set()
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@asynccontextmanager
async def stages(
    num_stages: int, *, over: str = "grpc", make_backend: Callable[[int], Any] = emulated, open_s: float = 30.0
) -> AsyncGenerator[LocalStages]:
    """Stages of the emulated model, layers split as evenly as they go."""
    cuts = [round(NUM_LAYERS * i / num_stages) for i in range(num_stages + 1)]
    ranges = [LayerRange(start, end) for start, end in pairwise(cuts)]

    def make(index: int) -> Backend:
        return make_backend(index)

    async with local_stages(
        make_backend=make,
        slices=make_slices(ranges, NUM_LAYERS),
        weights=EmulatedWeights(CONFIG),
        clock=SystemClock(),
        over=over,
        open_s=open_s,
    ) as local:
        yield local


@dataclass
class Decoding:
    """One sequence of the small engine."""

    number: SequenceId
    tokens: list[int]  # the prompt, then what was generated
    prompt_tokens: int
    sampling: SamplingParams = GREEDY
    done_tokens: int = 0  # computed or in flight
    num_blocks: int = 0
    registered: bool = False

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]


@dataclass
class SmallEngine:
    """Plans steps of given sequences. Blocks are never given back: tests are short."""

    driver: Driver
    chunk: int = 1 << 30  # most prompt tokens of a sequence in a step
    home: bool = False  # whether steps may follow steps in flight
    _steps: int = 0
    _next_block: int = 0
    _sequences: int = 0
    in_flight: dict[int, list[Decoding]] = field(default_factory=dict)

    def new(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> Decoding:
        """A sequence that is not planned yet."""
        self._sequences += 1
        return Decoding(SequenceId(self._sequences), list(prompt), len(prompt), sampling)

    def plan(self, *group: Decoding) -> StepPlan:
        """The next step of a micro-batch, its new sequences told already."""
        self._steps += 1
        rows, ids, registers, sampling = [], [], [], []
        for sequence in group:
            count = min(self.chunk, len(sequence.tokens) - sequence.done_tokens)
            start, end = sequence.done_tokens, sequence.done_tokens + count
            sample = int(end == len(sequence.tokens))
            rows.append(PlanRow(sequence.number, start, count, sample, self._blocks(sequence, end)))
            ids += sequence.tokens[start:end]
            sequence.done_tokens = end
            if not sequence.registered:
                self.driver.register(_registration(sequence))
                registers.append(sequence.number)
                sequence.registered = True
            if sample:
                sampling.append(sequence)
        self.in_flight[self._steps] = sampling
        return StepPlan(
            epoch=self.driver.epoch,
            step=StepId(self._steps),
            last_slice=self.driver.last_slice,
            rows=tuple(rows),
            token_ids=tuple(ids),
            registers=tuple(registers),
            home=self.home and bool(sampling),
        )

    def plan_ahead(self, before: StepPlan, *group: Decoding) -> StepPlan:
        """The step of these sequences that begins with the tokens of a step in flight."""
        self._steps += 1
        rows: list[PlanRow] = []
        for sequence in group:
            start = sequence.done_tokens
            sequence.done_tokens += 1
            rows.append(PlanRow(sequence.number, start, 1, 1, self._blocks(sequence, start + 1)))
        self.in_flight[self._steps] = list(group)
        return StepPlan(
            epoch=self.driver.epoch,
            step=StepId(self._steps),
            last_slice=self.driver.last_slice,
            rows=tuple(rows),
            after=before.step,
            home=True,
        )

    async def generate_ahead(self, group: Sequence[Decoding], num_tokens: int, *, turns: int = 1) -> None:
        """Plan steps of a group so many turns ahead, each of which begins with the tokens of the one before it.

        Once none of them is left, the next ones are told together.
        """
        plan = self.send(*group)
        planned = 1
        for retired in range(num_tokens):
            if planned == retired + 1 < num_tokens:
                plans: list[StepPlan] = []
                for _ in range(min(turns, num_tokens - planned)):
                    plans.append(plan := self.plan_ahead(plan, *group))
                    planned += 1
                self.driver.send(*plans)
            await self.retire()

    def send(self, *group: Decoding) -> StepPlan:
        """Plan a step and tell it to all stages."""
        plan = self.plan(*group)
        self.driver.send(plan)
        return plan

    async def retire(self) -> StepDone:
        """Wait for the next StepDone and append its tokens."""
        done = await self.driver.next_done()
        for sequence, tokens in zip(self.in_flight.pop(done.step), done.ids, strict=True):
            sequence.tokens += tokens
        return done

    async def generate(self, groups: Sequence[Sequence[Decoding]], num_tokens: int) -> None:
        """Keep one step of every group in flight until all have ``num_tokens``."""
        waiting = {self.send(*group).step: group for group in groups}
        while waiting:
            group = waiting.pop((await self.retire()).step)
            if any(len(sequence.generated) < num_tokens for sequence in group):
                waiting[self.send(*group).step] = group

    def _blocks(self, sequence: Decoding, end: int) -> tuple[BlockRun, ...]:
        count = -(-end // BLOCK_SIZE) - sequence.num_blocks
        if count <= 0:
            return ()
        run = BlockRun(self._next_block, count)
        self._next_block += count
        sequence.num_blocks += count
        return (run,)


def _registration(sequence: Decoding) -> Registration:
    return Registration(
        sequence=sequence.number, sampling=sequence.sampling, choice=0, prompt_tokens=sequence.prompt_tokens
    )
