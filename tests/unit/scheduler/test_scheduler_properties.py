"""Whatever comes, in whatever order: every sequence gets exactly its tokens, and every block comes back."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from edgepipe.backend.cost import StepWork
from edgepipe.errors import PromptTooLong, QueueFull
from edgepipe.scheduler import POLICIES, Policy, SarathiPolicy, SchedulerLimits, ThrottledPolicy, make_policy
from edgepipe.scheduler.pacing import Pacer, RingTimes
from tests.support.worlds.scheduler import VOCAB, World, limits, spec

Action = tuple[str, int, int, int]

LOSSES = ((0,), (1,), (0, 1), (2,))  # slices of three

pipelines = st.builds(
    limits,
    num_blocks=st.integers(4, 40),
    block_size=st.sampled_from([1, 4, 16]),
    context_length=st.integers(20, 120),
    micro_batches=st.integers(1, 6),
    max_running=st.integers(1, 8),
    max_waiting=st.integers(1, 12),
    contiguous_kv=st.booleans(),
    prefix_cache=st.sampled_from([True, True, False]),
)
policies = st.one_of(
    st.builds(SarathiPolicy, max_tokens=st.integers(1, 40)),
    st.builds(
        ThrottledPolicy,
        max_prefill_tokens=st.integers(1, 60),
        min_prefill_tokens=st.integers(1, 20),
        spread_steps=st.integers(1, 8),
        kv_threshold=st.sampled_from([0.0, 0.05, 0.5]),
    ),
)
actions = st.lists(
    st.tuples(st.sampled_from("sssrrrrrppcmea"), st.integers(1, 30), st.integers(1, 40), st.integers(0, 12)),
    max_size=60,
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=pipelines, policy=policies, actions=actions)
@example(  # cancelled in the middle of replaying what a stage had lost, and wanted by the next one
    pipeline=limits(num_blocks=4, block_size=1, context_length=20, max_running=1, max_waiting=1),
    policy=SarathiPolicy(max_tokens=1),
    actions=[("s", 2, 2, 0), ("r", 1, 1, 0), ("r", 1, 1, 0), ("e", 1, 1, 0), ("c", 1, 1, 0), ("s", 3, 1, 0)],
)
def test_every_sequence_gets_its_tokens_whatever_happens(
    pipeline: SchedulerLimits, policy: Policy, actions: list[Action]
) -> None:
    play(pipeline, policy, actions)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=pipelines, policy=policies, actions=actions)
def test_every_sequence_gets_its_tokens_in_many_more_worlds(
    pipeline: SchedulerLimits, policy: Policy, actions: list[Action]
) -> None:
    play(pipeline, policy, actions)


def _pacer(*, stages: int, most_tokens: int, goal_s: float | None) -> Pacer:
    """A ring whose stages take 2 ms and 0.1 ms per token."""

    def step_s(work: StepWork) -> float:
        return 2e-3 + 1e-4 * work.tokens

    ring = RingTimes([[step_s]] * stages, [lambda tokens: 2e-4 * tokens] * (stages - 1), lambda: 1e-3)
    return Pacer(ring, most_tokens=most_tokens, goal_s=goal_s)


def play(
    pipeline: SchedulerLimits,
    policy: Policy,
    actions: list[Action],
    *,
    acceptance: float | None = None,
    flies: bool = False,
) -> World:
    """Do all this, then let the rest run."""
    world = World(pipeline, policy, acceptance, flies=flies)
    next_id = 0
    for kind, a, b, c in actions:
        if kind == "s":
            next_id += 1
            _try_submit(world, next_id, prompt=a, max_tokens=b, fate=c)
        elif kind == "r" and world.in_flight:
            world.retire()
        elif kind == "p" and (place := world.passing()) is not None:
            world.retire(place)
        elif kind == "c" and next_id:
            world.cancel(a % next_id + 1, at_position=c)
        elif kind == "m":
            world.scheduler.set_micro_batches(a % 6 + 1)
            world.scheduler.set_pacer(_pacer(stages=a % 4 + 1, most_tokens=b + 1, goal_s=c * 1e-3 if c % 2 else None))
        elif kind == "a":
            world.plan_ahead(a % 6 + 1)
        elif kind == "e":
            world.next_epoch(lost=LOSSES[c % len(LOSSES)] if b % 2 else ())
        world.fill()
    world.run()
    world.check_outputs()
    world.assert_invariants()
    return world


@settings(max_examples=60, deadline=None)
@given(
    policy=policies,
    micro_batches=st.integers(1, 4),
    contiguous_kv=st.sampled_from([True, True, False]),
    num_blocks=st.integers(30, 80),
    prompt=st.integers(8, 40),
    guests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9), st.booleans()), min_size=1, max_size=6),
)
def test_requests_that_leave_at_any_moment_leave_no_block_behind(
    policy: Policy,
    micro_batches: int,
    contiguous_kv: bool,
    num_blocks: int,
    prompt: int,
    guests: list[tuple[int, int, bool]],  # tokens of their own, turns that they stay, suspected
) -> None:
    shared = range(prompt)
    pipeline = limits(num_blocks=num_blocks, contiguous_kv=contiguous_kv, micro_batches=micro_batches)
    world = World(pipeline, policy)
    world.submit(spec(1, (*shared, 90), max_tokens=60))
    while not world.output[spec(1).sequence]:
        world.fill()
        world.retire()
    for number, (own, _, alone) in enumerate(guests, start=2):
        world.submit(spec(number, (*shared, *[number] * (own + 1)), max_tokens=4, alone=alone))
    for turn in range(10):
        world.fill()
        for number, (_, stays, _) in enumerate(guests, start=2):
            if stays == turn and number % 2:
                world.cancel(number)
        if world.in_flight:
            world.retire()
    world.run()
    world.check_outputs()
    world.assert_invariants()


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=2, max_size=12),
    num_blocks=st.integers(10, 30),
    micro_batches=st.integers(1, 4),
    policy=st.sampled_from(POLICIES),
)
def test_nobody_starves_and_no_token_is_sampled_twice(
    prompts: list[int], num_blocks: int, micro_batches: int, policy: str
) -> None:
    world = World(limits(num_blocks=num_blocks, micro_batches=micro_batches), make_policy(policy))
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
    world.submit(*(spec(index, prompt, max_tokens=200) for index in range(1, num_sequences + 1)))
    for _ in range(8 * micro_batches + 32):
        world.fill()
        world.retire()
    for _ in range(micro_batches):
        world.fill()
        sizes = [step.num_rows for step in world.in_flight]
        assert sum(sizes) == num_sequences
        assert max(sizes) - min(sizes) <= 1
        world.retire()


def _try_submit(world: World, sequence: int, *, prompt: int, max_tokens: int, fate: int) -> None:
    """``fate`` chooses stop ids, an earlier attempt's tokens, the priority, whose prompt its own resembles, and whether
    it is suspected."""
    stops = frozenset(range(0, VOCAB, 9)) if fate % 3 == 0 else frozenset[int]()
    generated = tuple((sequence + i) % VOCAB for i in range(fate % 4))
    more = {
        "max_tokens": max_tokens,
        "stop_ids": stops,
        "generated": generated,
        "priority": fate % 5 // 3,
        "alone": fate % 4 == 3,
    }
    alike = prompt * (fate % 7) // 7 if fate % 2 else prompt
    tokens = [(i * 7 if i < alike else sequence * 13 + i) % VOCAB for i in range(prompt)]
    try:
        world.submit(spec(sequence, tokens, **more))
    except (PromptTooLong, QueueFull):
        return
