"""N stages give the tokens that one process gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from edgepipe_emulated import oracle

from edgepipe.backend.types import BlockCopy, BlockRun
from edgepipe.ids import Epoch, SequenceId, StepId
from edgepipe.sampling import SampleRow, SamplingParams, SequenceSampler, sample
from edgepipe.wire.plans import PlanRow, StepPlan
from edgepipe.wire.registrations import Registration
from tests.support.engine.pipeline import epoch
from tests.support.engine.pipeline_engine import CONFIG, SmallEngine, stages

PROMPTS = [[(7 * i + j) % 256 for j in range(3 + 9 * i)] for i in range(6)]


@pytest.mark.parametrize("over", ["grpc", "memory"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
async def test_greedy_tokens_do_not_depend_on_the_number_of_stages(num_stages: int, over: str) -> None:
    async with stages(num_stages, over=over) as local, local.open(epoch(1)) as driver:
        engine = SmallEngine(driver)
        sequences = [engine.new(prompt) for prompt in PROMPTS]
        await engine.generate([sequences[::2], sequences[1::2]], 20)
        for sequence, prompt in zip(sequences, PROMPTS, strict=True):
            assert sequence.generated == oracle.generate(prompt, 20, CONFIG, ignore_eos=True)


async def test_prompts_in_chunks_give_the_same_tokens_and_early_chunks_no_ids() -> None:
    async with stages(3) as local, local.open(epoch(1)) as driver:
        engine = SmallEngine(driver, chunk=7)
        sequence = engine.new(PROMPTS[5])
        for _ in range(0, len(PROMPTS[5]), 7):
            engine.send(sequence)
        dones = [await engine.retire() for _ in range(0, len(PROMPTS[5]), 7)]
        assert [done.ids for done in dones[:-1]] == [()] * (len(dones) - 1)
        await engine.generate([[sequence]], 10)
        assert sequence.generated == oracle.generate(PROMPTS[5], 10, CONFIG, ignore_eos=True)


async def test_draws_depend_on_seed_choice_and_output_position_alone() -> None:
    params = SamplingParams(temperature=0.8, seed=7)

    def choose(logits: npt.NDArray[np.float32], position: int) -> int:
        return sample(logits[None], [SampleRow(SequenceSampler(params), position)])[0].token

    wanted = oracle.generate(PROMPTS[2], 16, CONFIG, ignore_eos=True, choose=choose)
    async with stages(2) as local, local.open(epoch(1)) as driver:
        engine = SmallEngine(driver)
        drawn, greedy = engine.new(PROMPTS[2], params), engine.new(PROMPTS[1])
        await engine.generate([[greedy, drawn]], 16)
        assert drawn.generated == wanted
        assert greedy.generated == oracle.generate(PROMPTS[1], 16, CONFIG, ignore_eos=True)


async def test_a_step_without_rows_retires_in_its_turn() -> None:
    async with stages(2) as local, local.open(epoch(1)) as driver:
        engine = SmallEngine(driver)
        sequence = engine.new(PROMPTS[0])
        engine.send(sequence)
        driver.send(StepPlan(epoch=driver.epoch, step=StepId(2), last_slice=1, frees=(sequence.number,), token_ids=()))
        assert (await driver.next_done()).step == 1
        assert (await driver.next_done()).ids == ()


async def test_a_copied_block_goes_on_as_its_source() -> None:
    prompt = [1, 2, 3, 4, 5]
    registers = tuple(
        Registration(sequence=SequenceId(n), sampling=SamplingParams(temperature=0.0), prompt_tokens=5) for n in (1, 2)
    )
    async with stages(2) as local, local.open(epoch(1)) as driver:
        driver.register(*registers)
        first = PlanRow(SequenceId(1), 0, 5, 1, (BlockRun(0, 1),))
        driver.send(_plan(driver.epoch, 1, first, registers=(SequenceId(1),), token_ids=tuple(prompt)))
        wanted = (await driver.next_done()).ids
        second = PlanRow(SequenceId(2), 4, 1, 1, (BlockRun(9, 1),))
        driver.send(
            _plan(driver.epoch, 2, second, registers=(SequenceId(2),), token_ids=(5,), copies=(BlockCopy(0, 9),))
        )
        assert (await driver.next_done()).ids == wanted


async def test_stages_tell_where_the_time_went() -> None:
    async with stages(2) as local:
        async with local.open(epoch(1)) as driver:
            engine = SmallEngine(driver)
            sequence = engine.new(PROMPTS[1])
            engine.send(sequence)
            done = await engine.retire()
            first = driver.controls[0].reports
            await first.has_timings.wait()
        timing = done.timings[0]
        assert (timing.step, timing.slice_index, timing.num_tokens, timing.num_rows) == (1, 1, 12, 1)
        assert [(t.step, t.slice_index) for t in first.timings] == [(1, 0)]
        assert timing.started_us >= first.timings[0].started_us + first.timings[0].compute_us
        assert [(entry.step, entry.slice_index) for entry in local.stages[1].trace()] == [(1, 1)]
        counts = [stage.progress() for stage in local.stages]
        assert [(p.received, p.started, p.finished, p.sent) for p in counts] == [(1, 1, 1, 1)] * 2


def _plan(at: Epoch, step: int, row: PlanRow, **fields: Any) -> StepPlan:
    return StepPlan(epoch=at, step=StepId(step), last_slice=1, rows=(row,), **fields)
