"""Whatever comes, in whatever order: every sequence gets exactly its tokens, and every block comes back."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_world import VOCAB, World, limits, spec

from edgepipe.errors import PromptTooLong, QueueFull
from edgepipe.scheduler import EvenPolicy, SchedulerLimits

Action = tuple[str, int, int, int]

pipelines = st.builds(
    limits,
    num_blocks=st.integers(4, 40),
    block_size=st.sampled_from([1, 4, 16]),
    context_length=st.integers(20, 120),
    micro_batches=st.integers(1, 6),
    max_running=st.integers(1, 8),
    max_waiting=st.integers(1, 12),
)
actions = st.lists(
    st.tuples(st.sampled_from("ssrrrrrc"), st.integers(1, 30), st.integers(1, 40), st.integers(0, 12)), max_size=60
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=pipelines, chunk=st.integers(1, 40), actions=actions)
def test_every_sequence_gets_its_tokens_whatever_happens(
    pipeline: SchedulerLimits, chunk: int, actions: list[Action]
) -> None:
    world = World(pipeline, EvenPolicy(max_prefill_tokens=chunk))
    next_id = 0
    for kind, a, b, c in actions:
        if kind == "s":
            next_id += 1
            _try_submit(world, next_id, prompt=a, max_tokens=b, stop=c)
        elif kind == "r" and world.in_flight:
            world.retire()
        elif kind == "c" and next_id:
            world.cancel(a % next_id + 1, at_position=c)
        world.fill()
    world.run()
    world.check_outputs()
    world.assert_invariants()


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=2, max_size=12),
    num_blocks=st.integers(10, 30),
    micro_batches=st.integers(1, 4),
)
def test_nobody_starves_and_no_token_is_sampled_twice(prompts: list[int], num_blocks: int, micro_batches: int) -> None:
    world = World(limits(num_blocks=num_blocks, micro_batches=micro_batches))
    world.submit(*(spec(index, length, max_tokens=10) for index, length in enumerate(prompts, start=1)))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert sum(step.num_samples for step in world.steps) == 10 * len(prompts)
    first_token = [min(i for i, step in enumerate(world.steps) if s in step.sequences) for s in world.specs]
    assert first_token == sorted(first_token), "admission overtook"


@settings(max_examples=60, deadline=None)
@given(num_sequences=st.integers(1, 40), micro_batches=st.integers(1, 8), prompt=st.integers(1, 20))
def test_decodes_become_and_stay_even(num_sequences: int, micro_batches: int, prompt: int) -> None:
    world = World(limits(num_blocks=2048, micro_batches=micro_batches))
    world.submit(*(spec(index, prompt, max_tokens=100) for index in range(1, num_sequences + 1)))
    for _ in range(8 * micro_batches):
        world.fill()
        world.retire()
    for _ in range(micro_batches):
        world.fill()
        sizes = [step.num_rows for step in world.in_flight]
        assert sum(sizes) == num_sequences
        assert max(sizes) - min(sizes) <= 1
        world.retire()


def _try_submit(world: World, sequence: int, *, prompt: int, max_tokens: int, stop: int) -> None:
    stops = frozenset(range(0, VOCAB, 9)) if stop % 3 == 0 else frozenset[int]()
    generated = tuple((sequence + i) % VOCAB for i in range(stop % 4))
    try:
        world.submit(spec(sequence, prompt, max_tokens=max_tokens, stop_ids=stops, generated=generated))
    except (PromptTooLong, QueueFull):
        return
