"""Sends never block compute, and stages compute at the same time."""

from __future__ import annotations

import asyncio
import threading

import pytest
from edgepipe_emulated import oracle

from tests.support.engine.pipeline import epoch
from tests.support.engine.pipeline_engine import CONFIG, HeldBackend, SmallEngine, emulated, stages
from tests.support.network.tcp_proxy import tcp_proxy

PROMPTS = [[10 * i + j for j in range(5)] for i in range(4)]


async def happened(event: threading.Event) -> None:
    """Wait for a compute thread's event without holding the loop."""
    assert await asyncio.to_thread(event.wait, 30)


@pytest.mark.parametrize("over", ["grpc", "memory"])
async def test_stage_0_computes_step_2_while_stage_1_computes_step_1(over: str) -> None:
    backends = [HeldBackend(emulated()), HeldBackend(emulated())]
    async with stages(2, over=over, make_backend=backends.__getitem__) as local, local.open(epoch(1)) as driver:
        engine = SmallEngine(driver)
        gate = backends[1].hold(1)
        engine.send(engine.new(PROMPTS[0]))
        engine.send(engine.new(PROMPTS[1]))
        await happened(backends[0].collected[2])
        gate.set()
        assert [(await engine.retire()).step for _ in range(2)] == [1, 2]
        on_first = {int(entry.step): entry for entry in local.stages[0].trace()}
        on_second = {int(entry.step): entry for entry in local.stages[1].trace()}
        assert on_first[2].collected_s < on_second[1].collected_s
        assert on_first[1].collected_s <= on_second[1].submitted_s


async def test_a_stage_whose_successor_takes_nothing_finishes_its_next_steps() -> None:
    backends = [HeldBackend(emulated()), HeldBackend(emulated())]
    async with stages(2, make_backend=backends.__getitem__) as local:
        async with local.open(epoch(1), max_in_flight=2) as driver:
            engine = SmallEngine(driver)
            gate = backends[1].hold(1)
            for prompt in PROMPTS:
                engine.send(engine.new(prompt))
            await happened(backends[0].collected[4])
            assert local.stages[1].progress().finished == 0
            gate.set()
            assert [(await engine.retire()).step for _ in range(4)] == [1, 2, 3, 4]


async def test_a_stalled_network_does_not_stop_the_stage_before_it() -> None:
    backends = [HeldBackend(emulated()), HeldBackend(emulated())]
    async with stages(2, make_backend=backends.__getitem__) as local, tcp_proxy(local.addresses[1]) as proxy:
        local.addresses[1] = proxy.address
        async with local.open(epoch(1)) as driver:
            engine = SmallEngine(driver)
            proxy.flowing.clear()
            sequences = [engine.new(prompt) for prompt in PROMPTS]
            for sequence in sequences:
                engine.send(sequence)
            await happened(backends[0].collected[4])
            assert local.stages[1].progress().started == 0
            proxy.flowing.set()
            for _ in PROMPTS:
                await engine.retire()
            wanted = [oracle.generate(prompt, 1, CONFIG, ignore_eos=True) for prompt in PROMPTS]
            assert [sequence.generated for sequence in sequences] == wanted


async def test_cuts_between_stages_change_no_token() -> None:
    async with stages(3) as local, tcp_proxy(local.addresses[1]) as first, tcp_proxy(local.addresses[2]) as second:
        local.addresses[1:] = [first.address, second.address]
        async with local.open(epoch(1)) as driver:
            engine = SmallEngine(driver)
            sequences = [engine.new(prompt) for prompt in PROMPTS]
            for _ in range(4):
                first.cut()
                await engine.generate([sequences[:2], sequences[2:]], len(sequences[0].generated) + 4)
                second.cut_after(100)
                await engine.generate([sequences[:2], sequences[2:]], len(sequences[0].generated) + 4)
            for sequence, prompt in zip(sequences, PROMPTS, strict=True):
                wanted = oracle.generate(prompt, len(sequence.generated), CONFIG, ignore_eos=True)
                assert sequence.generated == wanted
            assert first.connections >= 4
            assert second.connections >= 4


async def test_a_plan_that_comes_after_its_activations_is_joined_with_them() -> None:
    async with stages(2) as local, local.open(epoch(1)) as driver:
        engine = SmallEngine(driver)
        sequence = engine.new(PROMPTS[0])
        plan = engine.plan(sequence)
        driver.send(plan, to=[0])
        await driver.controls[0].reports.has_timings.wait()  # stage 0 is done and has sent
        driver.send(plan, to=[1])
        await engine.retire()
        assert sequence.generated == oracle.generate(PROMPTS[0], 1, CONFIG, ignore_eos=True)
