"""A request that waits for blocks or slots begins as soon as they are free, not when another one ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgepipe.scheduler.sequence import Sequence
from edgepipe.scheduler.tables import BlockTables
from tests.support.scheduler_world import World, limits, spec, stateful, windowed


@pytest.mark.parametrize("micro_batches", [2, 6])
def test_a_prompt_begins_when_the_one_before_it_gives_back_its_slack(micro_batches: int) -> None:
    pipeline = windowed((64, 128), num_blocks=200, context_length=700, micro_batches=micro_batches)
    (pool,) = pipeline.windows
    world = World(replace(pipeline, windows=(replace(pool, num_blocks=64),)))
    world.submit(spec(1, 400, max_tokens=200))
    world.submit(spec(2, 180, max_tokens=1))
    while not world.output[2]:  # type: ignore[index]
        world.fill()
        world.retire()
    assert len(world.output[1]) < 50, "it waited for the end of the first answer"  # type: ignore[index]
    world.run()
    world.check_outputs()
    world.assert_invariants()


@pytest.mark.parametrize("arrival", range(16))
def test_a_prompt_begins_when_a_snapshot_is_no_longer_in_use(arrival: int) -> None:
    pipeline = stateful(num_slots=4, gap=64, num_blocks=100, block_size=16, context_length=400, micro_batches=1)
    world = World(pipeline)
    world.submit(*[spec(number, 40 + number, max_tokens=100) for number in (1, 2, 3)])
    for _ in range(20 + arrival):
        world.fill()
        world.retire()
    world.submit(spec(4, 30, max_tokens=1))
    turns = 0
    while not world.output[4]:  # type: ignore[index]
        world.fill()
        world.retire()
        turns += 1
    assert turns < 10
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_a_prompt_that_does_not_fit_is_not_looked_up_at_every_step_once_all_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(limits(num_blocks=56))
    world.submit(spec(1, 40, max_tokens=1))
    world.run()
    world.next_epoch(lost=[0])
    world.submit(spec(2, spec(1, 40).prompt, max_tokens=60), spec(3, 20, max_tokens=60))
    while not (world.output[2] and world.output[3]):  # type: ignore[index]
        world.fill()
        world.retire()
    world.submit(spec(4, 190, max_tokens=1))
    looked_up: list[Sequence] = []
    admit = BlockTables.admit

    def counted(tables: BlockTables, sequence: Sequence, **more: Any) -> bool:
        looked_up.append(sequence)
        return admit(tables, sequence, **more)

    monkeypatch.setattr(BlockTables, "admit", counted)
    for _ in range(40):
        world.fill()
        world.retire()
    assert not world.output[4]  # type: ignore[index]
    assert len(looked_up) == 1
    world.run()
    world.check_outputs()
    world.assert_invariants()
