"""Gateways that submit, cancel, break off and come back at random, over a KV pool that is too small for all of it."""

from __future__ import annotations

import asyncio
import random

import pytest

from edgepipe.engine import EngineLimits
from edgepipe.errors import PeerClosed
from tests.support.engine.lab import EngineLab, FakeGateway, engine_lab, oracle_tokens, submission

PATIENCE_S = 100.0  # a seed computes for up to 6 s; a machine with other work gives it a small share


class Client:
    """One request's life: asked, perhaps cancelled, perhaps resumed over another stream."""

    def __init__(self, lab: EngineLab, rng: random.Random, name: str) -> None:
        self.lab = lab
        self.rng = rng
        self.name = name
        self.prompt = [rng.randrange(250) for _ in range(rng.randint(1, 60))]
        self.max_tokens = rng.randint(1, 50)

    async def run(self, gateway: FakeGateway) -> None:
        gateway.patience_s = PATIENCE_S
        gateway.send(submission(self.name, self.prompt, self.max_tokens))
        fate = self.rng.random()
        if fate < 0.25:
            await self._cancelled(gateway)
        elif fate < 0.5:
            await self._resumed(gateway)
        else:
            assert (await gateway.ended(self.name)).ids == oracle_tokens(self.prompt, self.max_tokens)

    async def _cancelled(self, gateway: FakeGateway) -> None:
        await gateway.has(self.name, self.rng.randint(0, self.max_tokens))
        gateway.cancel(self.name, at_position=self.rng.randint(0, self.max_tokens))
        answer = await gateway.ended(self.name)
        assert answer.ids == oracle_tokens(self.prompt, len(answer.ids))

    async def _resumed(self, gateway: FakeGateway) -> None:
        have = (await gateway.has(self.name, self.rng.randint(0, self.max_tokens))).ids
        other = await self.lab.gateway(node_id=gateway.node_id)
        other.patience_s = PATIENCE_S
        other.answer(self.name).ids = list(have)
        other.resume(self.name, [len(have)])
        answer = await other.ended(self.name)
        if isinstance(answer.error, PeerClosed):  # the new stream overtook the request, still on the old one
            other.answer(self.name, attempt=2).ids = list(have)
            other.send(submission(self.name, self.prompt, self.max_tokens, attempt=2, generated=(tuple(have),)))
            answer = await other.ended(self.name, attempt=2)
        assert answer.ids == oracle_tokens(self.prompt, self.max_tokens)


async def storm(seed: int) -> None:
    """Thirty clients over three gateways."""
    rng = random.Random(seed)
    limits = EngineLimits(max_prefill_tokens=rng.choice([7, 32, 512]), max_running=rng.choice([3, 8, 64]))
    num_stages, micro_batches = rng.choice([1, 2, 3]), rng.choice([0, 1, 2, 4])
    async with engine_lab(
        num_stages=num_stages, micro_batches=micro_batches, max_blocks=rng.randint(8, 24), limits=limits
    ) as lab:
        gateways = [await lab.gateway(node_id=f"gateway{index}") for index in range(3)]
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            for index in range(30):
                tasks.create_task(Client(lab, rng, f"r{index}").run(rng.choice(gateways)))


@pytest.mark.parametrize("seed", range(4))
async def test_every_client_gets_its_tokens(seed: int) -> None:
    await storm(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4, 30))
async def test_every_client_gets_its_tokens_with_more_seeds(seed: int) -> None:
    await storm(seed)
