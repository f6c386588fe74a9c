"""A request that waits for blocks or slots begins as soon as it fits, and is looked up only when that may change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from edgepipe.scheduler import KVPool, SarathiPolicy, ScheduledStep, SchedulerLimits
from edgepipe.scheduler.sequence_pool import SequencePool
from edgepipe.scheduler.tables import BlockTables
from tests.support.worlds.scheduler import World, limits, reference, spec, stateful, windowed

CONTEXT = 50  # tokens
PIPELINES = ("shared blocks", "copied blocks", "windows", "states")
Scene = tuple[int, int, int, tuple[int, Sequence[int]] | None]
"""Blocks; turn of the last prompt's arrival; tokens of it that others compute; turns until slices are lost, and which.
"""
FEW: Sequence[Scene] = [*product((20, 28, 29), range(3, 7), (7, 10), (None,)), (28, 5, 7, (6, (0, 1)))]
MANY: Sequence[Scene] = list(product(range(19, 31), range(8), (0, 3, 7, 10), (None, (1, (0,)), (3, (1,)), (6, (0, 1)))))


@pytest.mark.parametrize("micro_batches", [2, 6])
def test_a_prompt_begins_when_the_one_before_it_gives_back_its_slack(micro_batches: int) -> None:
    pipeline = windowed((64, 128), num_blocks=200, context_length=700, micro_batches=micro_batches)
    (pool,) = pipeline.windows
    world = World(replace(pipeline, windows=(replace(pool, num_blocks=64),)))
    world.submit(spec(1, 400, max_tokens=200))
    world.submit(spec(2, 180, max_tokens=1))
    while not world.output[2]:  # type: ignore[index]
        world.go(1)
    assert len(world.output[1]) < 50, "it waited for the end of the first answer"  # type: ignore[index]
    world.run()
    world.check_outputs()
    world.assert_invariants()


@pytest.mark.parametrize("arrival", range(16))
def test_a_prompt_begins_when_a_snapshot_is_no_longer_in_use(arrival: int) -> None:
    pipeline = stateful(num_slots=4, gap=64, num_blocks=100, block_size=16, context_length=400, micro_batches=1)
    world = World(pipeline)
    world.submit(*[spec(number, 40 + number, max_tokens=100) for number in (1, 2, 3)])
    world.go(20 + arrival)
    world.submit(spec(4, 30, max_tokens=1))
    turns = 0
    while not world.output[4]:  # type: ignore[index]
        world.go(1)
        turns += 1
    assert turns < 10
    world.run()
    world.check_outputs()
    world.assert_invariants()


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_prompt_begins_when_it_would_if_it_were_looked_up_at_every_step(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_starts(kind, FEW, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("kind", PIPELINES)
def test_a_prompt_begins_as_soon_in_many_more_worlds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_starts(kind, MANY, monkeypatch)


@pytest.mark.parametrize("replayed", [True, False], ids=["replayed", "left stale"])
def test_a_prompt_that_does_not_fit_is_looked_up_once_while_others_decode(
    replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(limits(num_blocks=56))
    world.submit(spec(1, 40, max_tokens=1))
    world.run()
    world.next_epoch(lost=[0])
    world.submit(spec(2, spec(1 if replayed else 2, 40).prompt, max_tokens=60), spec(3, 20, max_tokens=60))
    while not (world.output[2] and world.output[3]):  # type: ignore[index]
        world.go(1)
    world.submit(spec(4, 190, max_tokens=1))
    lookups = count_calls(monkeypatch, "admit")
    world.go(40)
    assert not world.output[4]  # type: ignore[index]
    assert len(lookups) == 1
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_prompts_that_wait_for_blocks_of_another_cost_nothing_until_these_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(limits(num_blocks=400, context_length=900, micro_batches=1), SarathiPolicy(max_tokens=16))
    first = spec(1, 640, max_tokens=1)
    world.submit(first)
    world.go(1)
    world.submit(*[spec(number, [*first.prompt[: 16 * number], 90], max_tokens=1) for number in range(10, 40)])
    world.go(1)
    questions = count_calls(monkeypatch, "coming_from", of=KVPool)
    world.go(6)
    assert not questions
    world.run()
    assert all(world.ended[number].cached_prompt_tokens == 16 * number for number in range(10, 40))  # type: ignore[index]
    world.check_outputs()
    world.assert_invariants()


def count_calls(
    monkeypatch: pytest.MonkeyPatch, name: str, *, of: type[BlockTables | KVPool] = BlockTables
) -> list[None]:
    """Return a list that grows by one at each call of a method."""
    calls: list[None] = []
    method = getattr(of, name)

    def counted(*values: Any, **more: Any) -> Any:
        calls.append(None)
        return method(*values, **more)

    monkeypatch.setattr(of, name, counted)
    return calls


def check_starts(kind: str, scenes: Iterable[Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps are those of a scheduler that looks the first waiting prompt up at every step."""
    for scene in scenes:
        steps = play(kind, *scene)
        with monkeypatch.context() as always:
            always.setattr(SequencePool, "head_does_not_fit", property(lambda _: False, lambda *_: None), raising=False)
            assert steps == play(kind, *scene), scene


def play(
    kind: str, num_blocks: int, arrival: int, shared: int, loss: tuple[int, Sequence[int]] | None
) -> list[ScheduledStep]:
    """Return the steps of three prompts. Two compute the same blocks, and the one that others would await leaves."""
    world = World(made(kind, num_blocks), SarathiPolicy(max_tokens=4))
    first = spec(1, 25, max_tokens=6)
    known = [*first.prompt, *reference(first, context=CONTEXT)]
    world.submit(first, spec(2, first.prompt, max_tokens=5, reuse_prefix=False))
    steps: list[ScheduledStep] = []
    for turn in range(500):
        world.fill()
        if turn == 2:
            world.cancel(1)
        if turn == arrival:
            world.submit(spec(3, [*known[: 21 + shared], 90], max_tokens=4))
        if loss is not None and turn == arrival + loss[0]:
            steps += world.steps
            world.next_epoch(lost=loss[1])
        world.fill()
        if world.in_flight:
            world.retire()
        elif turn > arrival:
            break
    world.check_outputs()
    world.assert_invariants()
    return [*steps, *world.steps]


def made(kind: str, num_blocks: int) -> SchedulerLimits:
    """Return a pipeline in which blocks of one kind are scarce."""
    sizes: dict[str, Any] = {"block_size": 2, "context_length": CONTEXT, "micro_batches": 1}
    if kind == "windows":
        pipeline = windowed((6, 4), share=1, num_blocks=60, **sizes)
        pools = [replace(pool, num_blocks=max(pool.most_blocks, num_blocks - 8)) for pool in pipeline.windows]
        return replace(pipeline, windows=tuple(pools))
    if kind == "states":
        return stateful(num_slots=num_blocks // 5, gap=4, num_blocks=60 if num_blocks % 2 else num_blocks + 10, **sizes)
    return limits(num_blocks=num_blocks, contiguous_kv=kind == "copied blocks", **sizes)
