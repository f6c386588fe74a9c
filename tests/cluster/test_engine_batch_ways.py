"""Steps of batches over real stages: in phases, and in a way that the engine chooses; the answers are the same."""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager

import pytest

from tests.support.engine.lab import EngineLab, engine_lab, oracle_tokens, submission


def lab_with(policy: str) -> AbstractAsyncContextManager[EngineLab]:
    """An engine that expects step times, from the rates of its devices."""
    return engine_lab(max_blocks=64, constraints={"policy": policy}, bandwidth_bytes_per_s=1e12, flops=1e14)


async def run_batch(lab: EngineLab, count: int, *, first: int = 0) -> None:
    """Send requests of batch priority, and compare the answers."""
    numbers = range(first, first + count)
    prompts = {f"r{number}": [number % 90 + 1, *range(10 + number % 17)] for number in numbers}
    gateway = await lab.gateway()
    gateway.send(*[submission(name, prompt, 12, priority=1) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert (await gateway.ended(name)).ids == oracle_tokens(prompt, 12)


async def test_a_batch_in_phases_gets_the_same_answers() -> None:
    async with lab_with("temporal") as lab:
        await run_batch(lab, 40)
        trace = lab.engine._trace(0)  # pyright: ignore[reportPrivateUsage]
        assert trace is not None
        steps = trace.steps
        both = [step for step in steps if step.decode_rows and step.prefill_tokens]
        assert len(both) <= len(steps) // 10, "only while the ring's times are not known, and where blocks ran out"


async def test_the_engine_compares_the_ways_once_enough_answers_have_ended(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="edgepipe.engine.batch_ways"):
        async with lab_with("auto") as lab:
            sent = 0
            while not any("predicted_tokens_per_s" in each.message for each in caplog.records):
                await run_batch(lab, 40, first=sent)
                sent += 40
    assert sent > 40
    assert not any(each.levelno >= logging.WARNING for each in caplog.records)
