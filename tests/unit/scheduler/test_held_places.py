"""What a new engine takes over of its stages' memory: what all hold alike, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.scheduler import HeldTiers, StageHolds, takeover
from edgepipe.scheduler.held_places import Held
from tests.support.worlds.scheduler import NUM_SLICES, World, spec
from tests.unit.scheduler.test_disk_tier import CHATS, LATER, PIPELINES, over_disk, taken_turns

KEYS = [bytes([number]) * 16 for number in range(5)]


@st.composite
def helds(draw: st.DrawFn) -> Held:
    """Some keys in any order, each in a place of its own."""
    keys = draw(st.lists(st.sampled_from(KEYS), unique=True))
    places = draw(st.lists(st.integers(0, 5), min_size=len(keys), max_size=len(keys), unique=True))
    return dict(zip(keys, places, strict=True))


two_classes = st.tuples(helds(), helds())
tiers = st.builds(
    lambda device, host, disk: HeldTiers(device=device, host=host, disk=disk),
    two_classes,
    two_classes,
    st.just(()) | two_classes,
)
stages = st.integers(1, 4).flatmap(
    lambda count: st.lists(tiers, min_size=count, max_size=count).filter(
        lambda each: len({bool(own.disk) for own in each}) == 1
    )
)


@settings(max_examples=40, deadline=None)
@given(stages, st.permutations(range(4)))
def test_only_what_all_stages_behind_the_last_lost_one_hold_in_the_same_place(
    held: list[HeldTiers], order: list[int]
) -> None:
    reports = [StageHolds(order[index], own) for index, own in enumerate(held)]
    found = takeover(reports)
    lost = max([report.last_slice for report in reports if not report.held], default=-1)
    behind = [tiers_of(report.held) for report in reports if report.last_slice > lost]
    alike = [
        [(key, place) for key, place in held.items() if all(other[number].get(key) == place for other in behind)]
        for number, held in enumerate(behind[0] if behind else [])
    ]
    if found is None:
        assert not any(alike)
    else:
        assert [[*held.items()] for held in tiers_of(found.held)] == alike, (
            "the longest unused first, as the stage says"
        )
        assert found.stale_to == (lost if lost >= 0 else None)


def tiers_of(held: HeldTiers) -> list[Held]:
    return [*held.device, *held.host, *held.disk]


def test_a_stage_that_holds_nothing_at_the_end_leaves_nothing() -> None:
    full, empty = HeldTiers(device=({},), host=({KEYS[0]: 1},)), HeldTiers(device=({},), host=({},))
    assert takeover([StageHolds(0, full), StageHolds(1, empty)]) is None
    found = takeover([StageHolds(0, empty), StageHolds(1, full)])
    assert found is not None
    assert (found.held, found.stale_to, found.num_blocks) == (full, 0, 1)


def test_found_blocks_are_those_of_the_context_in_any_tier() -> None:
    """A window's blocks and a block that is in two tiers count no second time."""
    held = HeldTiers(
        device=({KEYS[4]: 5}, {}), host=({KEYS[0]: 1, KEYS[1]: 2}, {}), disk=({KEYS[1]: 0, KEYS[2]: 3}, {KEYS[0]: 0})
    )
    found = takeover([StageHolds(0, held)])
    assert found is not None
    assert found.num_blocks == 4


def ask_all_again(world: World) -> list[int]:
    """Let each conversation go on. Return how many of its tokens were found."""
    last = LATER[-CHATS:]
    for number in last:
        known = [*world.specs[number].prompt, *world.output[number]]  # type: ignore[index]
        world.submit(spec(100 + number, [*known, 5, 6, 7, 8], max_tokens=2))
        world.run()
    world.check_outputs()
    world.assert_invariants()
    return [world.ended[100 + number].cached_prompt_tokens for number in last]  # type: ignore[index]


@pytest.mark.parametrize("over", ["host", "disk"])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_new_engine_finds_what_the_one_before_pushed_out(name: str, over: str) -> None:
    pipeline = over_disk(PIPELINES[name], host=200 if over == "host" else 70)
    world = taken_turns(replace(pipeline, disk_places=()) if over == "host" else pipeline)
    found = world.next_engine()
    assert found is not None
    assert found.stale_to is None
    cached = ask_all_again(world)
    assert cached[0] == 100, "all full blocks of the first conversation, which was pushed out long ago"
    assert sum(cached) > 0.6 * CHATS * 100


def test_a_turn_that_waits_for_the_new_engine_counts_what_is_found_as_cached() -> None:
    world = taken_turns(over_disk(PIPELINES["shared"]))
    first = LATER[-CHATS]
    known = [*world.specs[first].prompt, *world.output[first]]  # type: ignore[index]
    world.submit(spec(200, [*known, 5, 6, 7, 8], max_tokens=2))
    world.next_engine()
    world.run()
    world.check_outputs()
    assert world.ended[200].cached_prompt_tokens == 100  # type: ignore[index]
    assert world.scheduler.stats().kept_tokens == 0


def test_what_the_slices_behind_a_lost_one_hold_is_replayed_up_to_that_one() -> None:
    world = taken_turns(over_disk(PIPELINES["shared"]))
    found = world.next_engine(lost=(1,))
    assert found is not None
    assert found.stale_to == 1
    ask_all_again(world)
    assert world.computed[0] == world.computed[1] > 2 * world.computed[2]


def test_after_the_loss_of_the_last_slice_all_slices_compute() -> None:
    world = taken_turns(over_disk(PIPELINES["shared"]))
    assert world.next_engine(lost=(NUM_SLICES - 1,)) is None
    assert ask_all_again(world) == [0] * CHATS


def test_the_oldest_of_what_was_found_goes_first() -> None:
    """The order of use survives the engine, so the newest conversations stay."""
    world = taken_turns(replace(over_disk(PIPELINES["shared"], host=120), disk_places=()))
    world.next_engine()
    host = world.scheduler._tables.host  # pyright: ignore[reportPrivateUsage]
    assert host is not None
    before = [*host._places]  # pyright: ignore[reportPrivateUsage]
    world.submit(spec(200, [77] * 100, max_tokens=30))
    world.submit(spec(201, [78] * 100, max_tokens=30))
    world.run()
    gone = [key for key in before if key not in host]
    assert gone == before[: len(gone)]
