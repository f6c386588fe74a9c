"""The scheduler's promises, one by one."""

from __future__ import annotations

import pytest

from edgepipe.errors import PromptTooLong, QueueFull, RequestInvalid
from edgepipe.scheduler import EndReason, SarathiPolicy
from tests.support.worlds.scheduler import World, limits, next_token, reference, spec


def test_one_sequence_gets_the_oracles_tokens() -> None:
    world = World(limits())
    world.submit(spec(1, 10, max_tokens=20))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert len(world.output[spec(1).sequence]) == 20


def test_a_steady_step_holds_only_what_changed() -> None:
    world = World(limits(micro_batches=1))
    world.submit(spec(1, 5, max_tokens=6))
    world.run()
    first, second = world.steps[:2]
    assert first.registers == (1,)
    assert (first.num_tokens, first.positions, first.samples) == ((5,), (0,), (1,))
    assert second.registers == ()
    assert (second.num_tokens, second.positions, second.block_rows) == ((1,), (5,), ())


def test_an_eos_ends_a_sequence_and_is_its_last_token() -> None:
    prompt = (5, 6, 7)
    tokens = [next_token(prompt)]
    tokens.append(next_token([*prompt, *tokens]))
    world = World(limits())
    world.submit(spec(1, prompt, max_tokens=50, stop_ids=frozenset({tokens[1]})))
    world.run()
    assert world.output[spec(1).sequence] == tokens
    assert world.ended[spec(1).sequence].reason is EndReason.STOP


def test_the_context_ends_a_sequence() -> None:
    world = World(limits(context_length=16))
    world.submit(spec(1, 10))
    world.run()
    assert len(world.output[spec(1).sequence]) == 6
    assert world.ended[spec(1).sequence].reason is EndReason.LENGTH


@pytest.mark.parametrize("contiguous_kv", [False, True])
def test_a_sequence_has_slots_behind_its_last_token_where_the_kv_needs_them(contiguous_kv: bool) -> None:
    """Also beside others, when blocks are short, and behind a cached beginning."""
    bounds = limits(num_blocks=24, context_length=500, rest_tokens=6, contiguous_kv=contiguous_kv)
    size = bounds.block_size
    world = World(bounds)
    for number in range(1, 4):
        world.submit(spec(number, tuple(range(9)), max_tokens=30))
    world.run()
    world.submit(spec(9, (*range(9), 3)))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    blocks: dict[int, int] = {}
    for step in world.steps:
        for sequence in step.registers:
            blocks[sequence] = 0
        for place, count in zip(step.block_rows, step.block_counts, strict=True):
            blocks[step.sequences[place]] += count
        for sequence, position, count in zip(step.sequences, step.positions, step.num_tokens, strict=True):
            assert blocks[sequence] * size >= position + count + 6
    assert 10 + len(world.output[spec(9).sequence]) == 24 * size - 6, "one sequence may fill the pool but for these"


def test_what_was_generated_before_is_never_sampled_again() -> None:
    whole = reference(spec(1, 6, max_tokens=12), context=200)
    world = World(limits())
    world.submit(spec(1, 6, max_tokens=12, generated=tuple(whole[:5])))
    world.run()
    world.check_outputs()
    assert sum(step.num_samples for step in world.steps) == 7


def test_a_false_prefix_is_believed() -> None:
    world = World(limits())
    world.submit(spec(1, 6, max_tokens=4, generated=(90, 91)))
    world.run()
    assert world.output[spec(1).sequence][:2] == [90, 91]
    assert world.output[spec(1).sequence][2] == next_token([*spec(1, 6).prompt, 90, 91])


@pytest.mark.parametrize(
    ("generated", "reason"), [((1, 2, 3), EndReason.LENGTH), ((1, 9), EndReason.STOP)], ids=["length", "stop"]
)
def test_what_was_complete_before_ends_without_a_step(generated: tuple[int, ...], reason: EndReason) -> None:
    world = World(limits())
    world.submit(spec(1, 6, max_tokens=3, generated=generated, stop_ids=frozenset({9})))
    assert world.fill() == 0
    assert world.ended[spec(1).sequence].reason is reason
    world.assert_invariants()


def test_chunks_of_one_prompt_are_in_flight_together() -> None:
    world = World(limits(micro_batches=3), SarathiPolicy(max_tokens=8))
    world.submit(spec(1, 20, max_tokens=3))
    assert world.fill() == 3
    assert [step.num_tokens for step in world.steps] == [(8,), (8,), (4,)]
    assert [step.samples for step in world.steps] == [(0,), (0,), (1,)]
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_decodes_and_a_chunk_share_a_step() -> None:
    world = World(limits(micro_batches=1), SarathiPolicy(max_tokens=8))
    world.submit(spec(1, 4, max_tokens=10))
    world.fill()
    world.submit(spec(2, 20, max_tokens=2))
    world.retire()
    world.fill()
    assert world.steps[-1].sequences == (1, 2)
    assert world.steps[-1].num_tokens == (1, 7)
    world.run()
    world.check_outputs()


@pytest.mark.parametrize(("num_sequences", "micro_batches"), [(5, 4), (16, 2), (7, 3), (2, 4), (64, 5)])
def test_decode_micro_batches_are_even(num_sequences: int, micro_batches: int) -> None:
    world = World(limits(num_blocks=1024, micro_batches=micro_batches))
    world.submit(*(spec(index, 3, max_tokens=40) for index in range(1, num_sequences + 1)))
    for _ in range(4 * micro_batches):
        world.fill()
        world.retire()
    world.fill()
    sizes = [step.num_rows for step in world.in_flight]
    assert sum(sizes) == num_sequences
    assert max(sizes) - min(sizes) <= 1
    world.run()
    world.check_outputs()


def test_micro_batches_are_even_again_after_sequences_ended() -> None:
    world = World(limits(num_blocks=1024, micro_batches=4))
    world.submit(*(spec(index, 3, max_tokens=60) for index in range(1, 17)))
    for _ in range(16):
        world.fill()
        world.retire()
    world.fill()
    for sequence in world.in_flight[-1].sequences[:3]:
        world.cancel(sequence)
    for _ in range(12):
        world.retire()
        world.fill()
    sizes = [step.num_rows for step in world.in_flight]
    assert sum(sizes) == 13
    assert max(sizes) - min(sizes) <= 1
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_admission_is_in_order_of_arrival() -> None:
    world = World(limits(num_blocks=8, micro_batches=1))
    world.submit(spec(1, 20, max_tokens=4), spec(2, 24, max_tokens=2), spec(3, 2, max_tokens=2))
    world.run()
    first_steps = {s: next(i for i, step in enumerate(world.steps) if s in step.sequences) for s in (1, 2, 3)}
    assert first_steps[1] < first_steps[2] <= first_steps[3]
    world.check_outputs()
    world.assert_invariants()


def test_the_youngest_is_preempted_and_still_gets_its_tokens() -> None:
    world = World(limits(num_blocks=10, micro_batches=2))
    world.submit(*(spec(index, 8, max_tokens=24) for index in (1, 2, 3)))
    world.run()
    assert world.scheduler.stats().preemptions > 0
    assert list(world.ended) == [1, 2, 3]
    registered = [sequence for step in world.steps for sequence in step.registers]
    assert registered.count(spec(1).sequence) == 1
    world.check_outputs()
    world.assert_invariants()


def test_a_token_in_flight_survives_its_sequences_preemption() -> None:
    world = World(limits(num_blocks=6, micro_batches=2))
    world.submit(spec(1, 8, max_tokens=14), spec(2, 8, max_tokens=14))
    world.run()
    assert world.scheduler.stats().preemptions > 0
    sampled = sum(step.num_samples for step in world.steps)
    assert sampled == 28
    world.check_outputs()


@pytest.mark.parametrize("turns", range(6))
def test_cancel_at_any_moment_frees_everything(turns: int) -> None:
    world = World(limits(micro_batches=2), SarathiPolicy(max_tokens=6))
    world.submit(spec(1, 16, max_tokens=30), spec(2, 4, max_tokens=5))
    world.fill()
    for _ in range(turns):
        world.retire()
        world.fill()
    world.cancel(1)
    assert world.ended[spec(1).sequence].reason is EndReason.CANCELLED
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_blocks_of_a_cancelled_sequence_are_kept_until_its_steps_retire() -> None:
    world = World(limits(micro_batches=1))
    world.submit(spec(1, 16, max_tokens=30))
    world.fill()
    world.cancel(1)
    assert world.scheduler.stats().free_blocks == 60
    world.retire()
    assert world.scheduler.stats().free_blocks == 64


def test_cancel_at_a_later_position_lets_it_run_until_there() -> None:
    world = World(limits())
    world.submit(spec(1, 4, max_tokens=30))
    world.cancel(1, at_position=7)
    world.run()
    assert world.output[spec(1).sequence] == reference(spec(1, 4, max_tokens=7), context=200)
    assert world.ended[spec(1).sequence].reason is EndReason.CANCELLED
    world.assert_invariants()


def test_cancelling_the_unknown_and_the_ended_does_nothing() -> None:
    world = World(limits())
    world.submit(spec(1, 4, max_tokens=2))
    world.run()
    world.cancel(1)
    world.cancel(99)
    world.assert_invariants()


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    world = World(limits(context_length=16))
    with pytest.raises(PromptTooLong) as caught:
        world.scheduler.submit([spec(1, 16)])
    assert "16 tokens" in caught.value.what


def test_a_prompt_longer_than_the_kv_cache_is_refused_with_that_reason() -> None:
    world = World(limits(num_blocks=3))
    with pytest.raises(PromptTooLong, match="in the memory of the cluster"):
        world.scheduler.submit([spec(1, 12)])


def test_the_queue_is_bounded_and_takes_all_or_none() -> None:
    world = World(limits(max_waiting=3))
    world.scheduler.submit([spec(1), spec(2)])
    with pytest.raises(QueueFull):
        world.scheduler.submit([spec(3), spec(4)])
    assert world.scheduler.stats().waiting == 2


def test_submitting_and_cancelling_all_day_keeps_the_queue_short() -> None:
    world = World(limits(num_blocks=4, micro_batches=1))
    world.submit(spec(1, 10, max_tokens=3), spec(2, 10, max_tokens=3))
    world.fill()
    for index in range(3, 1000):
        world.submit(spec(index))
        world.cancel(index)
    assert world.scheduler._waiting.num_entries < 100  # pyright: ignore[reportPrivateUsage]
    world.run()
    world.assert_invariants()


def test_nonsense_is_refused() -> None:
    with pytest.raises(RequestInvalid, match="empty"):
        spec(1, ())
    with pytest.raises(RequestInvalid, match="output"):
        spec(1, 4, max_tokens=0)


def test_a_step_retires_once_and_with_its_tokens() -> None:
    world = World(limits())
    world.submit(spec(1, 4, max_tokens=3))
    world.fill()
    step = world.in_flight[0].step
    with pytest.raises(ValueError, match="samples in 1 rows, tokens of 2 came"):
        world.scheduler.retire(step, [[1], [2]])
    world.retire()
    with pytest.raises(ValueError, match="is not in flight"):
        world.scheduler.retire(step, [[1]])


def test_a_decode_retires_before_a_prompt_s_chunk_that_it_passed() -> None:
    world = World(limits(micro_batches=2), SarathiPolicy(max_tokens=120))
    world.submit(spec(1, 4, max_tokens=20))
    world.go(2)
    world.fill()
    world.submit(spec(2, 100, max_tokens=3))
    world.go(1)
    world.fill()
    assert [step.is_bulk for step in world.in_flight] == [True, False]
    before = len(world.output[spec(1).sequence])
    for _ in range(3):
        assert world.passing() == 1
        world.retire(1)
        world.fill()
    assert len(world.output[spec(1).sequence]) == before + 3
    world.run()
    world.check_outputs()
    world.assert_invariants()


def test_more_micro_batches_may_be_asked_for_while_running() -> None:
    world = World(limits(micro_batches=1))
    world.submit(*(spec(index, 4, max_tokens=20) for index in range(1, 7)))
    world.fill()
    world.scheduler.set_micro_batches(3)
    for _ in range(8):
        world.fill()
        world.retire()
    world.fill()
    assert len(world.in_flight) == 3
    world.run()
    world.check_outputs()


def test_decode_keeps_runs_whole_while_there_is_room() -> None:
    world = World(limits(num_blocks=256, micro_batches=2))
    world.submit(*(spec(index, 9, max_tokens=60) for index in range(1, 9)))
    world.run()
    runs: dict[int, list[tuple[int, int]]] = {}
    for step in world.steps:
        for row, start, count in zip(step.block_rows, step.block_starts, step.block_counts, strict=True):
            table = runs.setdefault(step.sequences[row], [])
            if table and sum(table[-1]) == start:
                table[-1] = (table[-1][0], table[-1][1] + count)
            else:
                table.append((start, count))
    assert all(len(table) == 1 for table in runs.values())


def test_a_step_begins_no_more_than_stages_can_be_told_at_once() -> None:
    """Twelve sequences of 300 KB, and one that is larger than a step's bound by itself."""
    world = World(limits(micro_batches=1, num_blocks=400))
    sizes = dict.fromkeys(range(1, 13), 300000) | {5: 3_000_000}
    world.submit(*(spec(number, 6, max_tokens=4, registration_base_bytes=size) for number, size in sizes.items()))
    world.run()
    world.check_outputs()
    begun = [[sizes[sequence] for sequence in step.registers] for step in world.steps if step.registers]
    assert sum(map(len, begun)) == 12
    assert all(sum(registered) <= 1 << 20 or len(registered) == 1 for registered in begun)
    assert len(begun) <= 6
    world.assert_invariants()


def test_what_is_told_of_a_sequence_grows_with_its_output() -> None:
    world = World(limits(micro_batches=1, num_blocks=400))
    known = tuple(reference(spec(1, 6, max_tokens=12), context=200)[:10])
    specs = [spec(n, 6, max_tokens=12, generated=known, registration_token_bytes=60_000) for n in (1,)]
    specs += [spec(n, 6, max_tokens=12, registration_base_bytes=500_000) for n in (2, 3)]
    world.submit(*specs)
    world.run()
    assert [len(step.registers) for step in world.steps if step.registers] == [1, 2]
