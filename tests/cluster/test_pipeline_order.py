"""In which order a stage computes steps whose activations come piece by piece, mixed with those of other steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from edgepipe_emulated import EmulatedBackend, oracle

from edgepipe.backend.types import Activations, ActivationType, BlockRun, Step, StepRow
from edgepipe.errors import RemoteProtocolError, StepFailed
from edgepipe.ids import PipelineId, SequenceId, StepId
from edgepipe.link.receiver import RingReceiver
from edgepipe.wire.pipelines import OpenRing
from edgepipe.wire.plans import StepPlan
from tests.support.engine.pipeline import epoch
from tests.support.engine.pipeline_engine import CONFIG, Decoding, SmallEngine, emulated, stages

CHAT = [3, 1, 4, 1, 5]
LONG = [7 * i % 90 for i in range(41)]
PIECES = 8


@dataclass
class ByHand:
    """The last of two stages. The test plays the engine and the stage before, whose backend it uses."""

    engine: SmallEngine
    receiver: RingReceiver
    backend: EmulatedBackend
    runs: dict[SequenceId, tuple[BlockRun, ...]] = field(default_factory=dict[SequenceId, tuple[BlockRun, ...]])

    def plan(self, sequence: Decoding) -> tuple[StepPlan, list[bytes]]:
        """Plan a sequence's next step on both stages; return the plan and the pieces of its activations."""
        plan = self.engine.plan(sequence)
        self.engine.driver.send(plan, to=[1])
        data = self._activations(plan).tobytes()
        size = -(-len(data) // PIECES)
        return plan, [data[start : start + size] for start in range(0, len(data), size)]

    def bring(self, plan: StepPlan, pieces: list[bytes], *, first: int = 0, end: int = PIECES) -> None:
        """Let some pieces arrive."""
        for chunk in range(first, min(end, len(pieces))):
            self.receiver.frame(plan.step, chunk, pieces[chunk], 0, bulk=plan.is_bulk)

    async def planned(self, plan: StepPlan) -> None:
        """Wait until the stage has taken the plan."""
        for _ in range(1000):
            if self.receiver._assemblers[plan.is_bulk].awaits(plan.step):
                return
            await asyncio.sleep(0)
        raise AssertionError(f"the plan of step {plan.step} did not come")

    async def retired(self) -> int:
        """Return the next step that retires."""
        return (await self.engine.retire()).step

    async def decode_for_ever(self, chat: Decoding) -> None:
        """Bring one token after another. Raises the error that ends the epoch."""
        while True:
            self.bring(*self.plan(chat))
            await self.retired()

    def _activations(self, plan: StepPlan) -> Activations:
        rows: list[StepRow] = []
        for row in plan.rows:
            runs = self.runs[row.sequence] = (*self.runs.get(row.sequence, ()), *row.new_blocks)
            rows.append(StepRow(sequence=row.sequence, position=row.position, num_tokens=row.num_tokens, runs=runs))
        step = Step(step=plan.step, slice_index=0, rows=tuple(rows), logit_rows=np.zeros(0, np.int32))
        ticket = self.backend.submit(self.backend.prepare(step), np.array(plan.token_ids, np.int32))
        activations = self.backend.collect(ticket).activations
        assert activations is not None
        return activations


@asynccontextmanager
async def by_hand(*, step_deadline_ms: int = 20_000) -> AsyncGenerator[ByHand]:
    backends = [emulated(), emulated()]
    async with stages(2, over="memory", make_backend=backends.__getitem__) as local:
        async with local.open(epoch(1), step_deadline_ms=step_deadline_ms) as driver:
            opening = OpenRing(
                pipeline_id=PipelineId("pipeline"),
                epoch=epoch(1),
                slice=1,
                hidden_size=CONFIG.hidden_size,
                activation_type=ActivationType.BF16,
            )
            receiver = await local.stages[1].find_receiver(opening)
            yield ByHand(SmallEngine(driver), receiver, backends[0])


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    return oracle.generate(prompt, num_tokens, CONFIG, ignore_eos=True)


async def test_decodes_are_computed_before_a_prompt_whose_activations_have_not_all_come() -> None:
    async with by_hand() as stage:
        chat, prompt = stage.engine.new(CHAT), stage.engine.new(LONG)
        stage.bring(*stage.plan(chat))
        assert await stage.retired() == 1
        chunk = stage.plan(prompt)
        stage.bring(*chunk, end=5)
        for step in (3, 4, 5):
            stage.bring(*stage.plan(chat))
            assert await stage.retired() == step
        stage.bring(*chunk, first=5)
        assert await stage.retired() == 2
        assert chat.generated == answer(CHAT, 4)
        assert prompt.generated == answer(LONG, 1)


async def test_a_prompt_that_is_there_goes_before_a_later_decode() -> None:
    async with by_hand() as stage:
        chat, prompt = stage.engine.new(CHAT), stage.engine.new(LONG)
        stage.bring(*stage.plan(chat))
        assert await stage.retired() == 1
        chunk, decode = stage.plan(prompt), stage.plan(chat)
        await stage.planned(decode[0])
        stage.bring(*chunk)
        stage.bring(*decode)
        assert [await stage.retired(), await stage.retired()] == [2, 3]


async def test_a_step_of_the_same_sequence_waits_for_the_one_before_it_and_holds_up_later_decodes() -> None:
    async with by_hand() as stage:
        stage.engine.chunk = 40
        prompt, other = stage.engine.new(LONG), stage.engine.new(CHAT[:1])
        chunk, rest, single = stage.plan(prompt), stage.plan(prompt), stage.plan(other)
        assert [plan.is_bulk for plan, _ in (chunk, rest, single)] == [True, False, False]
        await stage.planned(single[0])
        stage.bring(*rest)
        stage.bring(*single)
        stage.bring(*chunk)
        assert [await stage.retired() for _ in range(3)] == [1, 2, 3]
        assert prompt.generated == answer(LONG, 1)
        assert other.generated == answer(CHAT[:1], 1)


async def test_a_prompt_that_stays_away_is_late_whatever_passes_it() -> None:
    async with by_hand(step_deadline_ms=300) as stage:
        chat, prompt = stage.engine.new(CHAT), stage.engine.new(LONG)
        stage.bring(*stage.plan(chat))
        assert await stage.retired() == 1
        stage.bring(*stage.plan(prompt), end=5)  # the stage before dies in the middle of it
        with pytest.raises(StepFailed, match="activations of step 2 did not come from the stage before"):
            await stage.decode_for_ever(chat)


@pytest.mark.parametrize(
    ("chunk", "bulk", "why"),
    [
        (6, True, "a chunk of step 2 is missing"),
        (5, False, "disagree on its class"),
        (0, False, "disagree on its class"),
    ],
)
async def test_a_piece_out_of_order_or_of_the_other_class_is_refused_by_name(chunk: int, bulk: bool, why: str) -> None:
    async with by_hand() as stage:
        chat, prompt = stage.engine.new(CHAT), stage.engine.new(LONG)
        stage.bring(*stage.plan(chat))
        assert await stage.retired() == 1
        plan, pieces = stage.plan(prompt)
        stage.bring(plan, pieces, end=5)
        await stage.planned(plan)
        with pytest.raises(RemoteProtocolError, match=why):
            stage.receiver.frame(plan.step, chunk, pieces[chunk], 0, bulk=bulk)


async def test_a_doubled_piece_changes_nothing() -> None:
    async with by_hand() as stage:
        chat, prompt = stage.engine.new(CHAT), stage.engine.new(LONG)
        chunk, decode = stage.plan(prompt), stage.plan(chat)
        stage.bring(*chunk, end=5)
        stage.bring(*chunk, end=4)
        stage.bring(*chunk, first=5)
        stage.bring(*decode)
        assert [await stage.retired(), await stage.retired()] == [1, 2]
        assert prompt.generated == answer(LONG, 1)
        assert stage.receiver.repeats == 4


async def test_half_steps_without_end_are_refused() -> None:
    """A class has one incomplete step at a time, and as many without a plan as the window allows."""
    async with by_hand() as stage:
        window = stage.receiver.grant().credits
        for bulk in (False, True):
            for step in range(1, window + 1):
                stage.receiver.frame(StepId(window * bulk + step), 0, b"x", 0, bulk=bulk)
            for step in range(window + 1, 1000):
                with pytest.raises(RemoteProtocolError, match="beyond the credits"):
                    stage.receiver.frame(StepId(window * bulk + step), 0, b"x", 0, bulk=bulk)
