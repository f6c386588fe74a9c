"""What was computed once is not computed again: shared where stages read pages, copied where they read runs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.errors import KVCacheFull
from edgepipe.ids import SequenceId
from edgepipe.scheduler import KVPool, SarathiPolicy
from edgepipe.scheduler.kept_pools import KeptPools
from edgepipe.scheduler.kv import as_runs, next_key
from tests.support.worlds.scheduler import World, limits, spec

PROMPT = tuple(range(40))  # ten blocks of four


def computed(world: World, sequence: int) -> int:
    """Tokens of the sequence that went through the stages."""
    return sum(
        count
        for step in world.steps
        for s, count in zip(step.sequences, step.num_tokens, strict=True)
        if s == SequenceId(sequence)
    )


def copies_in(world: World) -> int:
    """Blocks that were copied."""
    return sum(len(step.copies) for step in world.steps)


@pytest.fixture(params=[False, True], ids=["shared", "copied"])
def contiguous_kv(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_a_prompt_that_was_computed_is_found(contiguous_kv: bool) -> None:
    world = World(limits(contiguous_kv=contiguous_kv))
    world.submit(spec(1, (*PROMPT, 50), max_tokens=3))
    world.run()
    world.submit(spec(2, (*PROMPT, 60, 61), max_tokens=3))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert computed(world, 2) == 2 + 2
    assert (world.ended[SequenceId(1)].cached_prompt_tokens, world.ended[SequenceId(2)].cached_prompt_tokens) == (0, 40)
    assert copies_in(world) == 0, "nobody else has them: they are taken as they are"
    stats = world.scheduler.stats()
    assert (stats.admitted_tokens, stats.cached_tokens) == (41 + 42, 40)


def test_blocks_of_a_prompt_that_runs_are_copied_where_tables_are_runs(contiguous_kv: bool) -> None:
    world = World(limits(contiguous_kv=contiguous_kv))
    world.submit(spec(1, (*PROMPT, 50), max_tokens=30))
    for _ in range(12):
        world.fill()
        world.retire()
    world.submit(spec(2, (*PROMPT, 60, 61), max_tokens=3))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert computed(world, 2) == 2 + 2
    assert copies_in(world) == (10 if contiguous_kv else 0)


def test_the_last_token_of_a_prompt_is_computed_always(contiguous_kv: bool) -> None:
    world = World(limits(contiguous_kv=contiguous_kv))
    for index in (1, 2):
        world.submit(spec(index, PROMPT, max_tokens=2))
        world.run()
    assert world.ended[SequenceId(2)].cached_prompt_tokens == 36
    world.check_outputs()


def test_output_serves_the_next_turn_of_a_conversation(contiguous_kv: bool) -> None:
    world = World(limits(contiguous_kv=contiguous_kv))
    world.submit(spec(1, PROMPT, max_tokens=21))
    world.run()
    world.submit(spec(2, (*PROMPT, *world.output[SequenceId(1)], 7, 8), max_tokens=2))
    world.run()
    assert world.ended[SequenceId(2)].cached_prompt_tokens == 60
    world.check_outputs()


def test_the_same_tokens_after_others_are_not_the_same(contiguous_kv: bool) -> None:
    world = World(limits(contiguous_kv=contiguous_kv))
    world.submit(spec(1, (*PROMPT, 1), max_tokens=1))
    world.run()
    world.submit(spec(2, (9, 9, 9, 9, *PROMPT[4:], 1), max_tokens=1))
    world.run()
    assert world.ended[SequenceId(2)].cached_prompt_tokens == 0
    world.check_outputs()


def test_choices_of_one_request_share_its_prefill(contiguous_kv: bool) -> None:
    world = World(limits(contiguous_kv=contiguous_kv, num_blocks=128), SarathiPolicy(max_tokens=16))
    world.submit(*(spec(index, (*PROMPT, 3), max_tokens=4) for index in (1, 2, 3, 4)))
    world.run()
    assert [computed(world, index) for index in (1, 2, 3, 4)] == [41 + 3, 1 + 3, 1 + 3, 1 + 3]
    world.check_outputs()
    world.assert_invariants()


def test_who_waits_for_a_prefix_goes_on_when_its_owner_is_cancelled(contiguous_kv: bool) -> None:
    world = World(limits(contiguous_kv=contiguous_kv, micro_batches=1), SarathiPolicy(max_tokens=8))
    world.submit(spec(1, (*PROMPT, 3), max_tokens=4), spec(2, (*PROMPT, 4), max_tokens=4))
    world.fill()
    world.retire()
    world.fill()
    world.cancel(1)
    world.run()
    assert computed(world, 2) < 41 + 3
    world.check_outputs()
    world.assert_invariants()


def test_requests_that_leave_before_their_first_step_do_not_stop_the_others() -> None:
    world = World(limits(num_blocks=40, contiguous_kv=True, micro_batches=1))
    world.submit(spec(1, (*PROMPT, 50), max_tokens=100))
    for _ in range(8):
        world.fill()
        world.retire()
    for index in range(2, 7):
        world.submit(spec(index, (*PROMPT, 60, index), max_tokens=3, alone=True))
        world.fill()  # a decode's step: the prompt is admitted, and its copies are planned
        assert world.scheduler.stats().running == 2
        assert SequenceId(index) not in world.in_flight[-1].sequences
        world.cancel(index)
        world.retire()
    world.submit(spec(7, 20, max_tokens=3))
    world.run()
    assert len(world.output[SequenceId(7)]) == 3
    world.check_outputs()
    world.assert_invariants()


@pytest.mark.parametrize("turns", range(6))
def test_a_request_that_leaves_while_its_copies_are_made_gives_all_blocks_back(turns: int) -> None:
    world = World(limits(contiguous_kv=True, micro_batches=2), SarathiPolicy(max_tokens=4))
    world.submit(spec(1, (*PROMPT, 50), max_tokens=40))
    for _ in range(20):
        world.fill()
        world.retire()
    world.submit(*(spec(index, (*PROMPT, 60, index, 61, 62, 63), max_tokens=3) for index in (2, 3)))
    for _ in range(turns):
        world.fill()
        world.retire()
    world.fill()
    world.cancel(2)
    world.run()
    assert copies_in(world) >= 10
    world.check_outputs()
    world.assert_invariants()


def test_prompts_whose_copies_no_step_holds_yet_are_not_taken_for_blocks_that_come_free() -> None:
    world = World(limits(num_blocks=26, contiguous_kv=True, micro_batches=1), SarathiPolicy(max_tokens=2))
    world.submit(spec(1, (*PROMPT, 50), max_tokens=60))
    for _ in range(30):
        world.fill()
        world.retire()
    world.submit(spec(2, (*PROMPT, 60, 61), max_tokens=3, alone=True), spec(3, 8, max_tokens=30))
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_a_preempted_sequence_finds_what_it_had_computed() -> None:
    world = World(limits(num_blocks=14, micro_batches=2))
    world.submit(spec(1, tuple(range(16)), max_tokens=24), spec(2, tuple(range(50, 66)), max_tokens=24))
    world.run()
    assert world.scheduler.stats().preemptions > 0
    assert world.scheduler.stats().cached_tokens > 0
    assert world.ended[SequenceId(2)].cached_prompt_tokens == 0, "that is not what clients call cached"
    world.check_outputs()


def test_a_cache_that_fills_the_pool_makes_room(contiguous_kv: bool) -> None:
    world = World(limits(num_blocks=24, contiguous_kv=contiguous_kv))
    for index in range(1, 12):
        world.submit(spec(index, tuple((index * 17 + i) % 90 for i in range(40)), max_tokens=8))
        world.run()
    assert world.scheduler.stats().preemptions == 0
    assert world.scheduler.stats().cached_blocks > 12
    world.check_outputs()
    world.assert_invariants()


def test_a_prompt_is_admitted_even_if_its_own_copies_would_not_fit() -> None:
    world = World(limits(num_blocks=22, contiguous_kv=True))
    world.submit(spec(1, (*PROMPT, 1, 2), max_tokens=4))
    world.run()
    world.submit(spec(2, (*PROMPT[:4], 3), max_tokens=2))  # holds the first block while the next one comes
    world.submit(spec(2 + 1, (*PROMPT, 1, 2), max_tokens=4))
    world.run()
    assert 0 < world.ended[SequenceId(2)].cached_prompt_tokens < 40
    world.check_outputs()
    world.assert_invariants()


def test_without_a_cache_everything_is_computed() -> None:
    world = World(limits(prefix_cache=False))
    for index in (1, 2):
        world.submit(spec(index, PROMPT, max_tokens=2))
        world.run()
    assert world.scheduler.stats().cached_blocks == world.scheduler.stats().cached_tokens == 0


def test_the_longest_idle_block_goes_first_and_a_tables_end_before_its_beginning() -> None:
    pool = KVPool(4, contiguous=False)
    keys = [next_key(b"", (index,)) for index in range(4)]
    old, new = pool.allocate(2, room=2), pool.allocate(2, room=2)
    for key, block in zip(keys, (0, 1, 2, 3), strict=True):
        pool.enter(key, block)
    pool.release(old)
    pool.release(new)
    assert pool.free_blocks == 4
    pool.allocate(1, room=1)
    assert [pool.find([key]) for key in keys] == [[0], [], [2], [3]]
    pool.hold([0])
    with pytest.raises(KVCacheFull, match="3 blocks are needed, 2 of 4"):
        pool.allocate(3, room=3)
    pool.release_references([0])
    pool.allocate(2, room=2)
    assert [pool.find([key]) for key in keys] == [[0], [], [], []]


def test_a_run_grows_over_idle_blocks_behind_it() -> None:
    pool = KVPool(8, contiguous=True)
    table, other = list(pool.allocate(2, room=2)), pool.allocate(6, room=6)
    for block in range(2, 8):
        pool.enter(next_key(b"", (block,)), block)
    pool.release(other)
    for _ in range(3):
        table += pool.extend(table, room=1)
    assert [(run.start, run.count) for run in table] == [(0, 2), (2, 1), (3, 1), (4, 1)]


def test_a_new_table_is_one_run_if_idle_blocks_can_make_it_so() -> None:
    pool = KVPool(8, contiguous=True)
    tables = [pool.allocate(1, room=1) for _ in range(8)]
    for block in (1, 3, 5):
        pool.enter(next_key(b"", (block,)), block)
    for table in tables[:6]:
        pool.release(table)
    assert [(run.start, run.count) for run in pool.allocate(3, room=3)] == [(0, 3)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), unique=True))
def test_runs_are_the_blocks_in_their_order(blocks: list[int]) -> None:
    runs = as_runs(blocks)
    assert [block for run in runs for block in range(run.start, run.start + run.count)] == blocks
    assert all(a.start + a.count != b.start for a, b in itertools.pairwise(runs))


def test_a_scheduler_begins_with_what_the_one_before_it_left(contiguous_kv: bool) -> None:
    world = World(limits(contiguous_kv=contiguous_kv))
    world.submit(spec(1, (*PROMPT, 3), max_tokens=30))
    for _ in range(12):
        world.fill()
        world.retire()
    world.next_epoch()
    world.run()
    stats = world.scheduler.stats()
    assert stats.kept_tokens >= 40
    assert stats.replayed_tokens == 0
    assert all(step.last_slice is None and not step.copies for step in world.steps)
    assert world.ended[SequenceId(1)].cached_prompt_tokens == 0, "it was not cached when it was asked"
    world.check_outputs()
    world.assert_invariants()


def test_what_the_first_slices_lost_is_replayed_by_them_alone(contiguous_kv: bool) -> None:
    world = World(limits(contiguous_kv=contiguous_kv), SarathiPolicy(max_tokens=16))
    world.submit(spec(1, (*PROMPT, 3), max_tokens=30), spec(2, (*PROMPT, 4), max_tokens=30))
    for _ in range(16):
        world.fill()
        world.retire()
    world.next_epoch(lost=(1,))
    world.run()
    replayed = [step for step in world.steps if step.last_slice == 1]
    assert sum(len(step.token_ids) for step in replayed) == world.scheduler.stats().replayed_tokens >= 40
    assert not any(step.num_samples or step.copies for step in replayed)
    world.check_outputs()
    world.assert_invariants()


def test_replays_and_decodes_take_turns() -> None:
    world = World(limits(num_blocks=200, micro_batches=1), SarathiPolicy(max_tokens=8))
    world.submit(*(spec(index, tuple((index * 17 + i) % 90 for i in range(40)), max_tokens=40) for index in (1, 2, 3)))
    for _ in range(40):
        world.fill()
        world.retire()
    world.next_epoch(lost=(0,))
    world.run()
    kinds = [step.last_slice == 0 for step in world.steps if step.num_samples or step.last_slice == 0]
    last_replay = len(kinds) - kinds[::-1].index(True)
    assert kinds[:last_replay].count(False) > 3, "who has been replayed goes on while others are"
    world.check_outputs()


def test_what_is_computed_anew_takes_the_place_of_a_stale_block() -> None:
    pool, key = KVPool(4, contiguous=False), next_key(b"", (1,))
    pool.enter(key, pool.allocate(1, room=1)[0].start)
    pool.release(as_runs([0]))
    pool = pool.carry_over()
    assert (pool.free_blocks, pool.find([key]), pool.num_current([0])) == (4, [0], 1)
    pools = KeptPools(context=pool)
    pools.lose(2)
    pools.lose(1)
    assert (pool.num_current([0]), pool.stale_to) == (0, 2)
    new = pool.allocate(1, room=1)
    pool.enter(key, new[0].start)
    assert (pool.find([key]), pool.num_current([new[0].start])) == ([1], 1)
    pool.release(new)
    assert pool.free_blocks == 4
