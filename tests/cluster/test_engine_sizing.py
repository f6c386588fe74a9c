"""M follows load and network over real stages and links; only the arithmetic is replaced, and takes a known time."""

from __future__ import annotations

import time
from typing import Any

from edgepipe_emulated import EmulatedBackend

from edgepipe.backend.types import BackendOptions
from tests.support.engine.lab import engine_lab, oracle_tokens, submission

READ_S, ROW_S = 0.002, 0.001  # a step's time, and what each row adds
MAX_TOKENS = 150


class Paced(EmulatedBackend):
    """Takes as long as a device would whose weights are small."""

    def submit(self, prepared: Any, inputs: Any, edits: Any = None) -> Any:
        ticket = super().submit(prepared, inputs, edits)
        time.sleep(READ_S + ROW_S * len(prepared.step.rows))
        return ticket


def paced(_: int) -> Paced:
    return Paced(BackendOptions(device="rtx4090", settings={"time_factor": "0"}))


async def test_m_grows_with_latency_and_shrinks_when_sequences_leave() -> None:
    prompts = {f"r{i}": [i + 1, 7, 9] for i in range(24)}
    async with engine_lab(num_stages=2, link="10gbit,15ms", max_blocks=1024, make_backend=paced) as lab:
        gateway = await lab.gateway()
        assert lab.engine.state().micro_batches == 2
        gateway.send(*(submission(name, prompt, MAX_TOKENS) for name, prompt in prompts.items()))
        await lab.until(lambda: lab.engine.state().micro_batches >= 4 or gateway.answer("r0").ended is not None)
        grown = lab.engine.state()
        assert grown.micro_batches >= 4, "before any of them had its tokens"
        assert grown.latency_ms > 28, "two ways of 15 ms each: a step's and its token's"
        assert grown.bottleneck
        assert grown.predicted_tokens_per_s > 0
        for name in list(prompts)[1:]:
            gateway.cancel(name)
        await lab.until(lambda: lab.engine.state().micro_batches <= 1 or gateway.answer("r0").ended is not None)
        assert lab.engine.state().micro_batches == 1
        assert "one sequence" in lab.engine.state().why
        answer = await gateway.ended("r0")
        assert answer.ids == oracle_tokens(prompts["r0"], MAX_TOKENS)


async def test_m_that_was_asked_for_stays() -> None:
    async with engine_lab(num_stages=2, micro_batches=3, make_backend=paced) as lab:
        gateway = await lab.gateway()
        gateway.send(*(submission(f"r{i}", [i + 1, 2], 20) for i in range(8)))
        for i in range(8):
            await gateway.ended(f"r{i}")
        assert {state.micro_batches for state in lab.states} == {3}
        assert lab.engine.state().why == "3, as asked for"
        assert lab.engine.state().predicted_tokens_per_s > 0
