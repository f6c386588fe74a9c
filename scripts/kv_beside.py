"""Measure the gaps between tokens of chats while other conversations come from host memory or disk, or go there.

Two engines run one after another in short rounds. Both take the same steps: the same chats decode, and the same
visitors come. The copies of one take their time, those of the other take none.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from edgepipe_emulated import EmulatedBackend, emulated_model_config
from edgepipe_emulated.prepared import PreparedStep

from edgepipe.backend.types import BackendOptions
from edgepipe.planner.profiles import slice_costs
from edgepipe.spec.facts import LayerRange, ModelConfig, Slice, make_slices
from tests.support.engine.lab import EngineLab, FakeGateway, engine_lab, submission

BLOCK = 16  # tokens
AS_MODEL, DEVICE, LAYERS = "qwen2.5-32b:q4_k_m", "rtx4090", 64
CHATS, VISITORS, VISIT = 4, 4, 4_096  # chats that decode; conversations that take turns, and the tokens of each
QUESTION, ANSWER = 16, 4  # tokens of a visitor's next turn
NEW = 512  # tokens of a new prompt that pushes others out
PAUSE_S = 0.7  # between two visits
_RATE = 1e12


class Gaps(NamedTuple):
    """What chats see while visitors come."""

    seconds: np.ndarray  # each gap between two tokens of a chat, s
    growths: np.ndarray  # of each step with chats: its time on all devices with copies, over that without them
    visits_s: list[float]  # times to the first token of visitors
    copied_bytes: int  # on one stage, to and from host memory


class _Counting(EmulatedBackend):
    """Counts what copies add to the time of steps with decodes."""

    def __init__(self, options: BackendOptions, *, free: bool) -> None:
        super().__init__(options)
        self._free = free
        self.times_s: dict[int, tuple[float, float]] = {}  # by step: without and with its moves, on this device
        self.num_moves = 0

    def _seconds_of_moves(self, classes: Sequence[tuple[int, Sequence[Slice]]], block_size: int) -> tuple[float, ...]:
        seconds = super()._seconds_of_moves(classes, block_size)
        return tuple(0.0 for _ in seconds) if self._free else seconds

    def _step_s(self, prepared: PreparedStep) -> float:
        taken_s = super()._step_s(prepared)
        self.num_moves += len(prepared.step.moves)
        if any(row.num_tokens == 1 for row in prepared.step.rows):
            self.times_s[prepared.step.step] = (prepared.device_s, taken_s)
        return taken_s


class _Arrivals(FakeGateway):
    """Remembers when the tokens of each request came."""

    def __init__(self, address: str, **more: str) -> None:
        super().__init__(address, **more)
        self.times_s: dict[str, list[float]] = {}

    async def _take(self, event: Any) -> None:
        now_s = time.perf_counter()
        for tokens in event.tokens:
            self.times_s.setdefault(tokens.request_id, []).extend([now_s] * len(tokens.ids))
        await super()._take(event)


def gaps_beside_copies(*, free: bool, disk: bool, visits: int) -> Gaps:
    """Let conversations take turns beside chats that decode. ``free``: copies to and from host memory take no time."""
    return asyncio.run(_gaps(free=free, disk=disk, visits=visits))


async def _gaps(*, free: bool, disk: bool, visits: int) -> Gaps:
    config = emulated_model_config(num_layers=LAYERS, context_length=2 * VISIT)
    options = BackendOptions(device=DEVICE, settings={"time_factor": "1", "as_model": AS_MODEL})
    backend = EmulatedBackend(options)
    slices = make_slices([LayerRange(0, LAYERS // 2), LayerRange(LAYERS // 2, LAYERS)], LAYERS)
    bandwidth, flops = _rates_like(backend, config)
    block_bytes = backend.kv_block_bytes(config, slices[:1], BLOCK)
    made: list[_Counting] = []

    def make_backend(_: int) -> _Counting:
        made.append(_Counting(options, free=free))
        return made[-1]

    async with engine_lab(
        config=config,
        max_blocks=(2 * VISIT + CHATS * 1_024 + NEW) // BLOCK,
        max_host_blocks=(2 if disk else 2 * VISITORS) * VISIT // BLOCK,
        max_disk_blocks=2 * VISITORS * VISIT // BLOCK if disk else 0,
        make_backend=make_backend,
        bandwidth_bytes_per_s=bandwidth,
        flops=flops,
        kv_block_bytes=block_bytes,
    ) as lab:
        seconds, visits_s, begun = await _visited(lab, made, visits)
        both = [each.times_s for each in made]
        growths = [
            sum(times[step][1] for times in both) / sum(times[step][0] for times in both)
            for step in both[0].keys() & both[1].keys()
            if step > begun.step
        ]
        copied_bytes = (made[0].num_moves - begun.num_moves) * block_bytes
    return Gaps(np.array(seconds), np.array(growths), visits_s, copied_bytes)


def _rates_like(backend: EmulatedBackend, config: ModelConfig) -> tuple[float, float]:
    """Return the bandwidth and flops with which the engine expects of ``config`` what the emulated model takes."""
    (part,) = make_slices([LayerRange(0, LAYERS)], LAYERS)
    real = backend._cost(config).slice_cost(part)  # pyright: ignore[reportPrivateUsage]
    profile = replace(backend.profile(), bandwidth_bytes_per_s=_RATE, flops=_RATE)
    small = slice_costs(profile, config, [part])[part.index]
    return _RATE * small.read_s / real.read_s, _RATE * small.token_s / real.token_s


class _Begun(NamedTuple):
    step: int  # the last one before the first visit
    num_moves: int


async def _visited(lab: EngineLab, made: Sequence[_Counting], visits: int) -> tuple[list[float], list[float], _Begun]:
    """Return the chats' gaps, the times to the visitors' first tokens, and where the visits began."""
    gateway = _Arrivals(lab.address)
    await lab.join(gateway)
    gateway.patience_s = 120.0
    known = [_text(visitor, VISIT) for visitor in range(VISITORS)]
    for visitor, text in enumerate(known):
        known[visitor] = [*text, *await _ask(gateway, f"begin-{visitor}", text, ANSWER)]
    chats = [f"chat-{chat}" for chat in range(CHATS)]
    for chat, name in enumerate(chats):
        gateway.send(submission(name, _text(90 + chat, 64), 5_000))
    for name in chats:
        await gateway.has(name, 8)
    begun = _Begun(max(made[0].times_s), made[0].num_moves)
    begun_s, visits_s = time.perf_counter(), list[float]()
    for visit in range(visits):
        visitor, asked_s = visit % VISITORS, time.perf_counter()
        known[visitor] += _text(200 + visit, QUESTION)
        known[visitor] += await _ask(gateway, f"visit-{visit}", known[visitor], ANSWER)
        visits_s.append(gateway.times_s[f"visit-{visit}"][0] - asked_s)
        await _ask(gateway, f"new-{visit}", _text(300 + visit, NEW), 1)
        await asyncio.sleep(PAUSE_S)
    ended_s = time.perf_counter()
    assert all(gateway.answer(name).ended is None for name in chats), "a chat ended before the visits"
    for name in chats:
        gateway.cancel(name)
        await gateway.ended(name)
    assert lab.engine.state().restored_tokens >= visits * (VISIT - BLOCK) // 2, "the visits did not come from below"
    seconds = [
        after - before
        for name in chats
        for before, after in itertools.pairwise(gateway.times_s[name])
        if begun_s < after < ended_s
    ]
    return seconds, visits_s, begun


async def _ask(gateway: FakeGateway, name: str, prompt: Sequence[int], count: int) -> list[int]:
    gateway.send(submission(name, prompt, count))
    return (await gateway.ended(name)).ids


def _text(number: int, count: int) -> list[int]:
    return [(31 * index * index + 7 * index + 977 * number) % 241 + 5 for index in range(count)]
