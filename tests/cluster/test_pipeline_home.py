"""Steps that are planned ahead begin with the tokens that another stage samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from edgepipe_emulated import oracle

from edgepipe.backend.types import ActivationType
from edgepipe.errors import RemoteProtocolError
from edgepipe.ids import PipelineId, StepId
from edgepipe.link.receiver import RingReceiver
from edgepipe.wire.pipelines import OpenRing
from edgepipe.wire.sizes import MAX_PLANS
from tests.support.engine.pipeline import epoch
from tests.support.engine.pipeline_engine import CONFIG, HeldBackend, SmallEngine, emulated, stages
from tests.support.processes.waiting import until

PROMPTS = [[3, 1, 4, 1, 5], [7 * i % 90 for i in range(41)], [2, 7, 1]]


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    return oracle.generate(prompt, num_tokens, CONFIG, ignore_eos=True)


async def retire_for_ever(engine: SmallEngine) -> None:
    """Raises the error that ends the epoch."""
    while True:
        await engine.retire()


@asynccontextmanager
async def engine_of(num_stages: int, *, over: str = "memory") -> AsyncGenerator[SmallEngine]:
    """A small engine whose stages have said that tokens go home."""
    async with stages(num_stages, over=over) as local, local.open(epoch(1), home=True) as driver:
        engine = SmallEngine(driver)
        await engine.generate([[engine.new([1])]], 1)
        if num_stages > 1:
            await asyncio.wait_for(driver.last.home_opened.wait(), 20)
        engine.home = True
        yield engine


@pytest.mark.parametrize("turns", [1, 6])
@pytest.mark.parametrize("over", ["grpc", "memory"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
async def test_tokens_are_the_same_where_every_step_is_planned_ahead(num_stages: int, over: str, turns: int) -> None:
    async with engine_of(num_stages, over=over) as engine:
        chats = [engine.new(prompt) for prompt in PROMPTS]
        await engine.generate_ahead(chats, 24, turns=turns)
        assert [chat.generated for chat in chats] == [answer(prompt, 24) for prompt in PROMPTS]


async def test_two_groups_take_turns_ahead() -> None:
    async with engine_of(2) as engine:
        chats = [engine.new(prompt) for prompt in PROMPTS[:2]]
        plans = [engine.send(chat) for chat in chats]
        for _ in range(8):
            plans = [engine.plan_ahead(plan, chat) for plan, chat in zip(plans, chats, strict=True)]
            for plan in plans:
                engine.driver.send(plan)
            for _ in plans:
                await engine.retire()
        for _ in plans:
            await engine.retire()
        assert [chat.generated for chat in chats] == [answer(prompt, 9) for prompt in PROMPTS[:2]]


async def test_a_prompt_passes_a_step_that_waits_for_its_token() -> None:
    held = HeldBackend(emulated())
    async with stages(2, over="memory", make_backend=lambda index: held if index else emulated()) as local:
        async with local.open(epoch(1), home=True) as driver:
            engine = SmallEngine(driver, home=True)
            chat, prompt = engine.new(PROMPTS[0]), engine.new(PROMPTS[1])
            gate = held.hold(1)
            driver.send(first := engine.plan(chat))
            driver.send(engine.plan_ahead(first, chat))
            driver.send(engine.plan(prompt))
            await asyncio.to_thread(held.submitted[1].wait, 20)
            await until(lambda: local.stages[0].progress().started == 2)
            gate.set()
            assert [(await engine.retire()).step for _ in range(3)] == [1, 3, 2]
            assert (chat.generated, prompt.generated) == (answer(PROMPTS[0], 2), answer(PROMPTS[1], 1))


@pytest.mark.parametrize(("num_stages", "order"), [(1, [3, 6, 4, 5]), (2, [6, 3, 4, 5])])
async def test_a_prompt_waits_for_one_step_planned_ahead_at_most(num_stages: int, order: list[int]) -> None:
    held = HeldBackend(emulated())
    async with stages(num_stages, over="memory", make_backend=lambda index: emulated() if index else held) as local:
        async with local.open(epoch(1), home=True) as driver:
            engine = SmallEngine(driver, home=True)
            chat, prompt = engine.new(PROMPTS[0]), engine.new(PROMPTS[1])
            gates = [held.hold(step) for step in (1, 2, 3)]
            plans = [engine.plan(chat)]
            for _ in range(4):
                plans.append(engine.plan_ahead(plans[-1], chat))
            driver.send(*plans)
            await asyncio.to_thread(held.submitted[1].wait, 20)
            gates[0].set()
            await asyncio.to_thread(held.submitted[2].wait, 20)
            driver.send(engine.plan(prompt))
            await until(lambda: local.stages[0].progress().received == 6)
            gates[1].set()
            assert [(await engine.retire()).step for _ in range(2)] == [1, 2]
            gates[2].set()
            assert [(await engine.retire()).step for _ in range(4)] == order
            assert (chat.generated, prompt.generated) == (answer(PROMPTS[0], 5), answer(PROMPTS[1], 1))


async def test_more_plans_in_a_message_than_an_engine_sends_end_the_epoch() -> None:
    async with engine_of(1) as engine:
        chat = engine.new(PROMPTS[0])
        plans = [engine.plan(chat)]
        for _ in range(MAX_PLANS):
            plans.append(engine.plan_ahead(plans[-1], chat))
        engine.driver.send(*plans)
        with pytest.raises(RemoteProtocolError, match="too many plans together"):
            await retire_for_ever(engine)


async def test_the_first_stage_reports_the_tokens_that_it_used() -> None:
    async with engine_of(2) as engine:
        chat = engine.new(PROMPTS[0])
        await engine.generate_ahead([chat], 6)
        reports = engine.driver.controls[0].reports
        await until(lambda: len(reports.home) == 6)
        assert [tokens.ids for tokens in reports.home] == [(token,) for token in chat.generated]


async def test_a_plan_that_follows_a_step_without_such_a_sequence_ends_the_epoch() -> None:
    async with engine_of(1) as engine:
        first, other = engine.new(PROMPTS[0]), engine.new(PROMPTS[2])
        plan = engine.send(first)
        await engine.retire()
        engine.send(other)
        wrong = engine.plan_ahead(plan, other)
        engine.driver.send(wrong)
        with pytest.raises(RemoteProtocolError, match=f"follows step {plan.step}, which samples nothing for"):
            await retire_for_ever(engine)


@pytest.mark.parametrize("field", ["after", "token_ids"])
async def test_a_plan_with_tokens_behind_a_step_ends_the_epoch(field: str) -> None:
    async with engine_of(1) as engine:
        chat = engine.new(PROMPTS[0])
        plan = engine.plan_ahead(engine.send(chat), chat)
        engine.driver.send(replace(plan, **{"after": {"after": plan.step}, "token_ids": {"token_ids": (5,)}}[field]))
        with pytest.raises(RemoteProtocolError, match=f"the plan of step {plan.step} is invalid"):
            await retire_for_ever(engine)


@asynccontextmanager
async def played_last_stage() -> AsyncGenerator[tuple[SmallEngine, RingReceiver]]:
    """The first of two stages, and what takes its tokens: the test plays the last stage."""
    async with stages(2, over="memory") as local, local.open(epoch(1)) as driver:
        opening = OpenRing(
            pipeline_id=PipelineId("pipeline"),
            epoch=epoch(1),
            slice=0,
            hidden_size=CONFIG.hidden_size,
            activation_type=ActivationType.BF16,
        )
        yield SmallEngine(driver, home=True), await local.stages[0].find_receiver(opening)


@pytest.mark.parametrize("ids", [[-1], [1 << 30], [5, 6]])
async def test_tokens_that_cannot_be_are_refused(ids: list[int]) -> None:
    async with played_last_stage() as (engine, receiver):
        chat = engine.new(PROMPTS[2])
        plan = engine.send(chat)
        await until(lambda: receiver._assemblers[plan.is_bulk].awaits(plan.step))
        with pytest.raises(RemoteProtocolError):
            receiver.frame(StepId(plan.step), 0, np.array(ids, np.int32).tobytes(), 0, bulk=plan.is_bulk)
