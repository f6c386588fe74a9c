"""Pools of windows that are too small for the prompts that share them: every request ends all the same, and soon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgepipe.scheduler import Policy, SarathiPolicy, SchedulerLimits, ThrottledPolicy
from tests.support.worlds.scheduler import World, spec, windowed

BLOCK_SIZE = 2  # tokens
CONTEXT = 120  # tokens
OPENING = 22  # tokens that prompts share
LOSSES = ((), (0,), (1,), (0, 1))  # slices of three
MOST_TIMES = 3  # that a token is computed: once, and again after a preemption


@dataclass(frozen=True)
class Request:
    """A prompt that begins like others, for windows that share blocks."""

    opening: int  # tokens of the shared text that it begins with
    own: int  # tokens
    max_tokens: int
    alone: bool  # suspected
    stays: int  # turns after which it is cancelled; 0: never


@st.composite
def scarce_windows(draw: st.DrawFn) -> SchedulerLimits:
    """Return a pipeline whose windows have blocks for one sequence, and few more."""
    micro_batches = draw(st.integers(1, 3))
    sizes = st.tuples(st.integers(2, 9), st.integers(1, 3))  # window, slack, in blocks
    windows = [
        (window * BLOCK_SIZE, slack * BLOCK_SIZE)
        for window, slack in draw(st.lists(sizes, min_size=1, max_size=2, unique=True))
    ]
    pipeline = windowed(
        *windows,
        num_blocks=draw(st.integers(2, 4)) * CONTEXT // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        context_length=CONTEXT,
        micro_batches=micro_batches,
        contiguous_kv=draw(st.sampled_from([False, False, True])),
    )
    pools = [
        replace(pool, num_blocks=min(pipeline.num_blocks, pool.most_blocks + draw(st.integers(0, 14))))
        for pool in pipeline.windows
    ]
    return replace(pipeline, windows=tuple(pools))


requests = st.lists(
    st.builds(
        Request,
        opening=st.sampled_from([0, 9, OPENING, OPENING, OPENING, OPENING]),
        own=st.integers(10, 70),
        max_tokens=st.integers(1, 25),
        alone=st.booleans(),
        stays=st.sampled_from([0, 0, 0, 0, 0, 9]),
    ),
    min_size=3,
    max_size=6,
)
policies = st.one_of(
    st.just(ThrottledPolicy()),
    st.builds(ThrottledPolicy, max_prefill_tokens=st.integers(4, 60), min_prefill_tokens=st.integers(4, 20)),
    st.builds(SarathiPolicy, max_tokens=st.integers(4, 40)),
)
# Turns before a stage is lost, and the slices that it takes with it.
losses = st.lists(st.tuples(st.integers(1, 40), st.sampled_from(LOSSES)), max_size=3)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=scarce_windows(), policy=policies, requests=requests, losses=losses)
def test_every_request_ends_though_windows_are_short_of_blocks(
    pipeline: SchedulerLimits, policy: Policy, requests: list[Request], losses: list[tuple[int, Sequence[int]]]
) -> None:
    check_progress(pipeline, policy, requests, losses)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=scarce_windows(), policy=policies, requests=requests, losses=losses)
def test_every_request_ends_in_many_more_worlds(
    pipeline: SchedulerLimits, policy: Policy, requests: list[Request], losses: list[tuple[int, Sequence[int]]]
) -> None:
    check_progress(pipeline, policy, requests, losses)


def test_a_suspected_prompt_that_waits_for_blocks_lets_others_go_on() -> None:
    pipeline = windowed((24, 4), num_blocks=160, micro_batches=1)
    (pool,) = pipeline.windows
    world = World(replace(pipeline, windows=(replace(pool, num_blocks=12),)))
    opening = range(31)
    world.submit(spec(1, opening, max_tokens=1))
    world.run()
    suspects = [spec(2, [*opening, *[2] * 31], max_tokens=53, alone=True), spec(3, [*opening, *[3] * 82], alone=True)]
    world.submit(*suspects, spec(4, [*opening, *[4] * 60], max_tokens=15))
    while turn(world):
        pass
    world.check_outputs()
    world.assert_invariants()


def check_progress(
    pipeline: SchedulerLimits, policy: Policy, requests: Sequence[Request], losses: Sequence[tuple[int, Sequence[int]]]
) -> None:
    """A warm cache, all requests at once, and stages that are lost meanwhile."""
    world = World(pipeline, policy)
    opening = range(OPENING)
    world.submit(spec(1, opening, max_tokens=1))
    world.run()
    for number, request in enumerate(requests, start=2):
        prompt = [*opening[: request.opening], *[number] * request.own]
        world.submit(spec(number, prompt, max_tokens=request.max_tokens, alone=request.alone))
    leaving = {number: request.stays for number, request in enumerate(requests, start=2) if request.stays}
    for turns, lost in losses:
        for _ in range(turns):
            turn(world)
            leave(world, leaving)
        world.next_epoch(lost=lost)
    tokens = sum(len(each.prompt) + (each.max_tokens or 0) for each in world.specs.values())
    steps = 0
    while turn(world):
        leave(world, leaving)
        steps += 1
        assert steps <= MOST_TIMES * tokens, "the same tokens are computed again and again"
    world.check_outputs()
    world.assert_invariants()


def turn(world: World) -> bool:
    """Send what can be sent, and let the oldest step retire. Return whether there was one."""
    world.fill()
    if not world.in_flight:
        assert set(world.ended) == set(world.specs), "requests wait, and no step is left that could change it"
        return False
    world.retire()
    return True


def leave(world: World, leaving: dict[int, int]) -> None:
    """Cancel those whose turns are over."""
    for number in list(leaving):
        leaving[number] -= 1
        if not leaving[number]:
            del leaving[number]
            world.cancel(number)


def test_blocks_of_a_window_that_a_step_in_flight_still_uses_are_waited_for() -> None:
    """The sequence that leaves frees what the others need: none of them is preempted."""
    pipeline = windowed((16, 4), num_blocks=64, block_size=4, context_length=100, micro_batches=2)
    pipeline = replace(pipeline, windows=(replace(pipeline.windows[0], num_blocks=12),))
    world = World(pipeline, ThrottledPolicy())
    world.submit(*[spec(number, 12, max_tokens=16) for number in (1, 2, 3)])
    world.go(6)
    world.fill()
    world.cancel(1)
    world.retire()
    world.run()
    assert world.scheduler.stats().preemptions == 0
    world.check_outputs()
