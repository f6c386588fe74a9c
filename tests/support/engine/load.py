"""Many tokens through real stages: prompts that begin alike, cancels, preemptions, lost stages; every token checked."""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass, field

from edgepipe.engine import EngineLimits
from edgepipe.scheduler import SchedulerStats
from edgepipe.spec.facts import ModelConfig
from edgepipe.wire.engines import DraftState
from tests.support.engine.lab import (
    CONFIG,
    EngineLab,
    FakeGateway,
    break_stage,
    engine_lab,
    lose_kv,
    oracle_tokens,
    submission,
)

CLIENTS_PER_GATEWAY = 8  # a gateway wakes all of its clients for every message
BLOCK_SIZE = 16  # tokens
STALL_S = 120.0  # without a token computed, a stage lost or an answer ended: no machine is so busy


@dataclass
class Load:
    """Users who ask again as soon as they have their answer, until the stages have computed enough tokens."""

    lab: EngineLab
    rng: random.Random
    wanted_tokens: int
    longest: int  # answer, in tokens
    config: ModelConfig = CONFIG
    opening_tokens: int = 160  # longest common beginning of prompts
    num_openings: int = 12  # with fewer, more prompts are cached
    num_tokens: int = 0  # tokens of prompts and answers that ended
    preemptions: int = 0  # preemptions in epochs that a lost stage ended
    restored_tokens: int = 0  # from host memory
    fetched_tokens: int = 0  # from disk
    cached_tokens: int = 0
    num_requests: int = 0
    num_cancelled: int = 0
    drafts: DraftState | None = None  # drafts of the last epoch
    openings: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._answered = asyncio.Event()
        self.openings = [
            [self.rng.randrange(250) for _ in range(self.opening_tokens)] for _ in range(self.num_openings)
        ]

    def stats(self) -> SchedulerStats:
        run = self.lab.engine._run  # pyright: ignore[reportPrivateUsage]
        assert run is not None
        return run.pump.stats()

    async def user(self, gateway: FakeGateway) -> None:
        while self.num_tokens < self.wanted_tokens:
            self.num_requests += 1
            await self._ask(gateway, f"r{self.num_requests}")

    async def lose_stages(self, count: int) -> None:
        """Break a stage ``count`` times, evenly over the tokens; most lose their KV, as a new process has none."""
        for index in range(1, count + 1):
            while self.num_tokens < index * self.wanted_tokens / (count + 1):
                self._answered.clear()
                await self._answered.wait()
            await self.lab.until(lambda: self.lab.engine.state().state == "ready")
            self.preemptions += self.stats().preemptions
            self.restored_tokens += self.stats().restored_tokens
            self.fetched_tokens += self.stats().fetched_tokens
            stage = self.rng.randrange(len(self.lab.stages.stages))
            if self.rng.random() < 0.7:
                lose_kv(self.lab, stage)
            recoveries = self.lab.engine.state().recoveries
            break_stage(self.lab, stage)
            await self.lab.until(lambda before=recoveries: self.lab.engine.state().recoveries > before)

    async def watch(self) -> None:
        """Raise AssertionError once nothing goes on. How long an answer takes depends on the machine's other work."""
        before, since_s = None, time.monotonic()
        while True:
            await asyncio.sleep(STALL_S / 20)
            state = self.lab.engine.state()
            run = self.lab.engine._run  # pyright: ignore[reportPrivateUsage]
            now = (self.num_tokens, state.recoveries, run and run.pump.num_retired)
            if now != before:
                before, since_s = now, time.monotonic()
            assert time.monotonic() < since_s + STALL_S, f"nothing goes on: {run and run.pump.stats()}"

    async def _ask(self, gateway: FakeGateway, name: str) -> None:
        rng = self.rng
        opening = rng.choice(self.openings)
        prompt = opening[: rng.randint(0, len(opening))] + [rng.randrange(250) for _ in range(rng.randint(1, 40))]
        max_tokens, choices = rng.randint(1, self.longest), rng.choice([1, 1, 1, 3])
        priority, group = int(rng.random() < 0.1), rng.choice([0, 0, 8])
        gateway.send(submission(name, prompt, max_tokens, num_choices=choices, priority=priority, group_tokens=group))
        if rng.random() < 0.2:
            await gateway.has(name, rng.randint(0, max_tokens))
            gateway.cancel(name, at_position=rng.randint(0, max_tokens))
        right = oracle_tokens(prompt, max_tokens, config=self.config)
        for choice in range(choices):
            answer = await gateway.ended(name, choice=choice)
            assert answer.ended is not None
            assert answer.error is None
            assert answer.ids == right[: len(answer.ids)]
            assert answer.ended.reason == ("length" if len(answer.ids) == max_tokens else "cancelled")
            assert answer.ended.cached_prompt_tokens < len(prompt)
            self.num_cancelled += len(answer.ids) < max_tokens
            self.cached_tokens += answer.ended.cached_prompt_tokens
            self.num_tokens += len(prompt) + len(answer.ids)
        gateway.forget(name)
        self._answered.set()


async def run_load(
    *,
    seed: int,
    tokens: int,
    contiguous_kv: bool,
    num_gateways: int,
    max_blocks: int,
    max_host_blocks: int = 0,
    max_disk_blocks: int = 0,
    longest: int = 160,
    config: ModelConfig = CONFIG,
    losses: int = 0,
    opening_tokens: int = 160,
    num_openings: int = 12,
    acceptance: str = "",
    kv: str = "",
    clients: int = CLIENTS_PER_GATEWAY,
    micro_batches: int = 4,
    link: str = "",
) -> Load:
    """Eight users at each gateway (``clients``) and a KV pool that is too small for them.

    ``losses``: stages to lose meanwhile; ``link``, ``acceptance`` of drafts and form of ``kv``: see ``engine_lab``.
    """
    rng = random.Random(seed)
    async with engine_lab(
        num_stages=3,
        micro_batches=micro_batches,
        link=link,
        max_blocks=max_blocks,
        max_host_blocks=max_host_blocks,
        max_disk_blocks=max_disk_blocks,
        contiguous_kv=contiguous_kv,
        limits=EngineLimits(max_prefill_tokens=256),
        block_size=BLOCK_SIZE,
        config=config,
        acceptance=acceptance,
        kv=kv,
        bandwidth_bytes_per_s=1e12,
        flops=1e14,
    ) as lab:
        load = Load(lab, rng, tokens, longest, config, opening_tokens, num_openings)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(load.watch())
            async with asyncio.TaskGroup() as users:
                users.create_task(load.lose_stages(losses))
                for index in range(num_gateways):
                    gateway = await lab.gateway(node_id=f"gateway{index}")
                    gateway.patience_s = math.inf
                    for _ in range(clients):
                        users.create_task(load.user(gateway))
            watch.cancel()
        assert load.num_cancelled
        load.preemptions += load.stats().preemptions
        load.restored_tokens += load.stats().restored_tokens
        load.fetched_tokens += load.stats().fetched_tokens
        load.drafts = lab.engine.state().drafts
        assert lab.engine.state().recoveries >= losses  # a step that a busy machine makes late ends an epoch, too
        return load
