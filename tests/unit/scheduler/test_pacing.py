"""Prompt chunks: how large, how many in flight, and what they add to a decode's turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edgepipe.backend.cost import SliceCost, StepWork
from edgepipe.errors import ConfigInvalid
from edgepipe.scheduler import ThrottledPolicy
from edgepipe.scheduler.chunk_sizes import MIN_CHUNK_TOKENS
from edgepipe.scheduler.pacing import (
    HOST_S,
    Chunk,
    Pacer,
    RingTimes,
    Waiting,
    most_prompt_steps,
    parse_itl_goal,
)
from edgepipe.scheduler.step_time import SliceTimes
from tests.support.worlds.scheduler import World, limits, spec

MOST = 2048


@dataclass(frozen=True)
class Server:
    """Seconds of a step: fixed, per token, and per pair of a token and one that it attends to."""

    fixed: float
    token: float
    pair: float = 0.0

    def step_s(self, work: StepWork) -> float:
        return self.fixed + self.token * work.tokens + self.pair * work.attention_pairs


def ring_of(stages: list[Server], *, upload: float = 0.0, latency: float = 1e-3) -> RingTimes:
    def upload_s(tokens: int) -> float:
        return upload * tokens

    return RingTimes([[stage.step_s] for stage in stages], [upload_s] * (len(stages) - 1), lambda: latency)


def chunks_of(pacer: Pacer, tokens: int) -> list[tuple[int, int, Chunk]]:
    """The chunks of a lone prompt: position, tokens and the choice."""
    found: list[tuple[int, int, Chunk]] = []
    position = 0
    while position < tokens:
        chunk = pacer.chunk(Waiting(prompt=1, position=position, left=tokens - position, others=0))
        assert chunk is not None
        count = min(chunk.step_tokens, tokens - position)
        found.append((position, count, chunk))
        position += count
    return found


def work(position: int, tokens: int) -> StepWork:
    return StepWork.of_rows((position,), (tokens,), logit_rows=1)


def ends_s(ring: RingTimes, chunks: list[tuple[int, int]], in_flight: int) -> float:
    """Seconds until the last of the chunks is back: every server takes them in order."""
    servers: list[Callable[[StepWork], float]] = []
    for index, (stage,) in enumerate(ring.stages):
        servers.append(stage)
        if index < len(ring.uploads):
            servers.append(lambda each, upload_s=ring.uploads[index]: upload_s(each.tokens))
    free, back = [0.0] * len(servers), []
    for number, (position, tokens) in enumerate(chunks):
        at = back[number - in_flight] if number >= in_flight else 0.0
        for index, server in enumerate(servers):
            at = free[index] = max(at, free[index]) + server(work(position, tokens))
        back.append(at + ring.latency_s())
    return back[-1]


servers = st.builds(Server, st.floats(1e-3, 0.03), st.floats(1e-5, 5e-4), st.floats(0, 2e-9))
rings = st.builds(
    lambda stages, upload, latency: ring_of(stages, upload=upload, latency=latency),
    st.lists(servers, min_size=1, max_size=5),
    st.floats(0, 3e-4),
    st.floats(1e-4, 0.02),
)


@settings(deadline=None)
@given(rings, st.integers(1, 60_000))
def test_a_lone_prompt_is_cut_into_chunks_of_equal_time_without_a_crumb(ring: RingTimes, tokens: int) -> None:
    pacer = Pacer(ring, most_tokens=MOST)
    chunks = chunks_of(pacer, tokens)
    assert sum(count for _, count, _ in chunks) == tokens
    assert all(1 <= count <= MOST for _, count, _ in chunks)
    assert all(1 <= chunk.in_flight <= most_prompt_steps(len(ring.stages)) for _, _, chunk in chunks)
    if len(ring.stages) == 1:
        assert {chunk.in_flight for _, _, chunk in chunks} == {1}
    assume(len(chunks) > 3 and min(count for _, count, _ in chunks[:-3]) > MIN_CHUNK_TOKENS)
    assume(max(count for _, count, _ in chunks) < MOST // 2)  # the bound on tokens makes others unequal
    times_s = [passage.server_s for at, count, _ in chunks if (passage := pacer.passage(work(at, count)))]
    assert max(times_s) <= 1.35 * min(times_s), "the last chunks share what is left, and none is a crumb"


@settings(deadline=None, max_examples=60)
@given(rings, st.integers(200, 30_000))
def test_no_number_of_equal_chunks_ends_a_lone_prompt_much_sooner(ring: RingTimes, tokens: int) -> None:
    chosen = chunks_of(Pacer(ring, most_tokens=MOST), tokens)
    in_flight = max(chunk.in_flight for _, _, chunk in chosen)
    took_s = ends_s(ring, [(at, count) for at, count, _ in chosen], in_flight)
    for number in (-(-tokens // MOST), 4, 8, 16, 32, 64):
        size = min(MOST, max(MIN_CHUNK_TOKENS, -(-tokens // number)))
        others = [(at, min(size, tokens - at)) for at in range(0, tokens, size)]
        host_s = HOST_S * (len(others) + len(ring.stages))  # what the pacer counts for messages of each step
        most = most_prompt_steps(len(ring.stages)) if len(ring.stages) > 1 else 1
        assert took_s <= 1.09 * ends_s(ring, others, most) + host_s
        assert took_s <= 1.05 * ends_s(ring, others, 1) + host_s, "one at a time is never faster"


def test_the_number_of_chunks_is_about_the_root_of_the_work_over_the_fixed_work() -> None:
    fixed, token, stages, tokens = 0.01, 1e-4, 4, 40_000
    chunks = chunks_of(Pacer(ring_of([Server(fixed, token)] * stages), most_tokens=MOST), tokens)
    best = (token * tokens * (stages - 1) / fixed) ** 0.5
    assert 0.5 * best <= len(chunks) <= 1.3 * best
    taken_s = fixed + token * chunks[0][1]
    assert fixed <= 0.15 * taken_s


def test_chunks_that_take_links_longer_than_devices_keep_the_link_busy() -> None:
    pacer = Pacer(ring_of([Server(1e-3, 1e-5)] * 2, upload=1e-4), most_tokens=MOST)
    chunk = pacer.chunk(Waiting(prompt=1, position=0, left=10_000, others=0))
    assert chunk is not None
    assert chunk.bound == "link 0-1"
    assert chunk.in_flight >= 2


def test_chunks_in_flight_have_room_in_the_windows() -> None:
    ring = ring_of([Server(0.05, 1e-5)] * 3)
    for _, count, chunk in chunks_of(Pacer(ring, most_tokens=MOST, most_in_flight_tokens=1024), 9000):
        assert count * chunk.in_flight <= 1024 or chunk.in_flight == 1


def test_early_chunks_leave_windows_room_for_the_next_one() -> None:
    """Early chunks have more tokens, since attention grows: they must not take the room of the chunk that follows."""
    ring = ring_of([Server(0.02, 4e-4, 4e-8), Server(0.01, 2e-4, 2e-8)], latency=0.01)
    chunks = chunks_of(Pacer(ring, most_tokens=MOST, most_in_flight_tokens=2048), 16_384)
    assert {chunk.in_flight for _, _, chunk in chunks} == {2}
    free = [(at, min(512, 16_384 - at)) for at in range(0, 16_384, 512)]
    took_s = ends_s(ring, [(at, count) for at, count, _ in chunks], 2)
    assert took_s <= 1.02 * ends_s(ring, free, 4)


def beside(ring: RingTimes, goal_s: float | None, *, decodes: int = 6, **more: int) -> Chunk:
    pacer = Pacer(ring, most_tokens=MOST, goal_s=goal_s)
    load = Waiting(prompt=1, position=2000, left=20_000, others=0, decodes=decodes, context=500, protected=True)
    chunk = pacer.chunk(load._replace(**more))
    assert chunk is not None
    return chunk


@settings(deadline=None)
@given(rings, st.floats(0.01, 1.0), st.integers(1, 40), st.integers(1, 6))
def test_a_turn_with_prompt_tokens_keeps_the_goal_or_says_by_how_much_it_fails(
    ring: RingTimes, goal_s: float, decodes: int, micro_batches: int
) -> None:
    pacer = Pacer(ring, most_tokens=MOST, goal_s=goal_s)
    chunk = beside(ring, goal_s, decodes=decodes, micro_batches=micro_batches)
    rows = -(-decodes // micro_batches)
    alone = pacer.passage(StepWork(rows, rows, rows * 500, float(rows * 500), rows))
    riding = pacer.passage(work(2000, chunk.step_tokens))
    assert alone is not None
    assert riding is not None
    if chunk.over_goal_s:
        assert chunk.step_tokens == MIN_CHUNK_TOKENS
        assert chunk.bound == "goal"
    else:
        turn_s = max(riding.turn_s, chunk.in_flight * riding.server_s)
        slower = 1e-9 + 500 * decodes * sum(stage.__self__.pair for (stage,) in ring.stages)  # type: ignore[attr-defined]
        assert turn_s <= max(alone.turn_s, micro_batches * alone.server_s) + goal_s + slower


@settings(deadline=None)
@given(rings, st.floats(0.01, 0.5), st.floats(1.1, 10.0))
def test_a_wider_goal_never_makes_prompts_much_slower(ring: RingTimes, goal_s: float, wider: float) -> None:
    def rate(chunk: Chunk) -> float:
        passage = Pacer(ring, most_tokens=MOST).passage(work(2000, chunk.step_tokens))
        assert passage is not None
        return chunk.step_tokens / max(passage.server_s, passage.turn_s / chunk.in_flight)

    assert rate(beside(ring, goal_s * wider)) >= 0.9 * rate(beside(ring, goal_s))


def test_short_prompts_take_smaller_steps_beside_chats_than_long_ones() -> None:
    """Where larger steps end prompts a fifth sooner, chats are worth more than that of a short one."""
    ring = ring_of([Server(0.02, 1e-4)] * 2)
    short, long = (beside(ring, 0.3, left=tokens) for tokens in (1024, 1025))
    assert short.rides
    assert not long.rides
    assert short.step_tokens < long.step_tokens
    assert short.seconds < long.seconds


def test_the_last_tokens_of_a_long_prompt_are_no_short_prompt() -> None:
    ring = ring_of([Server(0.02, 1e-4)] * 2)
    end = beside(ring, 0.3, position=23_500, left=500, begun=23_500)
    cached = beside(ring, 0.3, position=23_500, left=500)
    assert not end.rides
    assert cached.rides
    assert cached.step_tokens < end.step_tokens


@settings(deadline=None)
@given(rings, st.floats(0.03, 0.5), st.integers(0, 40_000))
def test_a_choice_keeps_the_goal_until_the_next_one(ring: RingTimes, goal_s: float, position: int) -> None:
    pacer = Pacer(ring, most_tokens=MOST, goal_s=goal_s)
    alone = pacer.passage(StepWork(1, 1, 500, 500.0, 1))
    assert alone is not None
    chosen: Chunk | None = None
    for at in range(position, position + 2_000, 250):
        chunk = pacer.chunk(
            Waiting(prompt=1, position=at, left=60_000 - at, others=0, decodes=1, context=500, protected=True)
        )
        assert chunk is not None
        if chunk is chosen and not chunk.over_goal_s:
            riding = pacer.passage(work(at, chunk.step_tokens))
            assert riding is not None
            slower = 1e-9 + 500 * sum(stage.__self__.pair for (stage,) in ring.stages)  # type: ignore[attr-defined]
            assert max(riding.turn_s, chunk.in_flight * riding.server_s) <= alone.turn_s + goal_s + slower
        chosen = chunk


def test_prompts_are_not_the_context_of_decodes_beside_them() -> None:
    class Recorder(Pacer):
        contexts: list[int]

        def chunk(self, waiting: Waiting) -> Chunk | None:
            if waiting.decodes:
                self.contexts.append(waiting.context)
            return super().chunk(waiting)

    world = World(limits(num_blocks=2000, context_length=6_000, micro_batches=2), ThrottledPolicy())
    pacer = Recorder(ring_of([Server(0.02, 1e-4)] * 2), most_tokens=MOST, goal_s=0.1)
    pacer.contexts = []
    world.scheduler.set_pacer(pacer)
    world.submit(spec(1, 5, max_tokens=60), spec(2, 9, max_tokens=60))
    world.go(6)
    world.submit(spec(3, 5_000, max_tokens=2))
    world.run()
    assert pacer.contexts
    assert max(pacer.contexts) <= 96
    world.check_outputs()


def test_a_short_prompt_rides_with_decodes_and_a_long_one_takes_steps_of_its_own() -> None:
    for prompt, alone in ((40, False), (1500, True)):
        world = World(limits(num_blocks=800, context_length=2_000, micro_batches=3), ThrottledPolicy())
        world.scheduler.set_pacer(Pacer(ring_of([Server(0.02, 1e-4)] * 3), most_tokens=MOST, goal_s=0.1))
        world.submit(spec(1, 5, max_tokens=60))
        world.go(6)
        world.submit(spec(2, prompt, max_tokens=2))
        before = len(world.steps)
        world.run()
        chunks = [step for step in world.steps[before:] if 2 in step.sequences and step.is_bulk]
        assert chunks
        assert any(1 not in step.sequences for step in chunks) is alone
        world.check_outputs()


def test_batch_sequences_and_goals_that_are_off_bound_nothing() -> None:
    ring = ring_of([Server(0.01, 1e-4)] * 2)
    bound = beside(ring, 0.05)
    assert beside(ring, None).step_tokens > bound.step_tokens
    assert beside(ring, 0.05, protected=False).step_tokens == beside(ring, None).step_tokens


def test_chunks_follow_a_stage_that_becomes_slower_in_mid_prompt() -> None:
    token_s = 1e-4

    def step_s(each: StepWork) -> float:
        return 0.002 + token_s * each.tokens

    ring = RingTimes([[step_s], [step_s]], [lambda tokens: 0.0], lambda: 1e-3)
    pacer = Pacer(ring, most_tokens=MOST)
    before = pacer.chunk(Waiting(prompt=1, position=0, left=20_000, others=0))
    assert before is not None
    token_s *= 4
    waiting = Waiting(prompt=1, position=before.step_tokens, left=20_000 - before.step_tokens, others=0)
    after = pacer.chunk(waiting)
    assert after == Pacer(ring, most_tokens=MOST).chunk(waiting)
    assert after is not None
    assert after.step_tokens < 0.7 * before.step_tokens, "the fixed work is a smaller part now"


def test_small_chunks_give_way_to_large_ones_once_their_kernels_prove_slow() -> None:
    """A data sheet without tiles, and a device whose packed kernels take 33 to 64 tokens at 1.7 times their time."""

    def sheet_s(each: StepWork) -> float:
        return max(0.011, 2.6e-4 * each.tokens) + (0.05 if each.tokens > 64 else 0.0)

    def device_s(each: StepWork) -> float:
        return sheet_s(each) * (1.7 if 32 < each.tokens <= 64 else 1.0)

    cost = SliceCost(
        read_s=0.011,
        token_s=2.6e-4,
        head_read_s=0.0,
        head_row_s=0.0,
        attention=(),
        step_overhead_s=0.0,
        row_overhead_s=0.0,
        tile_steps=(),
        widen_s=0.05,
        widens_above_rows=64,
    )
    times = [SliceTimes(cost), SliceTimes(cost)]
    pacer = Pacer(
        RingTimes([[each.expected_s] for each in times], [lambda tokens: 0.0], lambda: 1e-3), most_tokens=MOST
    )
    position, sizes = 0, list[int]()
    while position < 24_000:
        chunk = pacer.chunk(Waiting(prompt=1, position=position, left=24_000 - position, others=0))
        assert chunk is not None
        for each in times:
            each.note(work(position, chunk.step_tokens), device_s(work(position, chunk.step_tokens)))
        sizes.append(chunk.step_tokens)
        position += chunk.step_tokens
    assert 32 < sizes[0] <= 64, "the data sheet favours small chunks"
    assert min(sizes[5:]) > 256, "and the device does not"


def test_chunks_are_chosen_anew_once_a_link_proves_faster_than_its_small_steps_let_expect() -> None:
    per_token_s = 1e-3

    def upload_s(tokens: int) -> float:
        return per_token_s * tokens

    ring = RingTimes([[Server(0.005, 2e-5).step_s]] * 3, [upload_s] * 2, lambda: 1e-3)
    pacer = Pacer(ring, most_tokens=MOST)
    first = pacer.chunk(Waiting(prompt=1, position=0, left=30_000, others=0))
    assert first is not None
    per_token_s = 2e-5
    waiting = Waiting(prompt=1, position=first.step_tokens, left=30_000 - first.step_tokens, others=0)
    assert pacer.chunk(waiting) == Pacer(ring, most_tokens=MOST).chunk(waiting)


def test_while_a_stage_is_unknown_nothing_is_planned() -> None:
    pacer = Pacer(RingTimes([[lambda _: 0.0]], [], lambda: 0.0), most_tokens=MOST, goal_s=0.1)
    load = Waiting(prompt=1, position=0, left=500, others=0)
    assert pacer.chunk(load) is None
    assert pacer.chunk(load._replace(decodes=3, protected=True)) is None


def test_chunks_of_one_prompt_follow_each_other_and_decodes_keep_their_own_number() -> None:
    world = World(limits(num_blocks=4096, micro_batches=2, context_length=9000), ThrottledPolicy())
    world.scheduler.set_pacer(Pacer(ring_of([Server(0.004, 1e-4)] * 4, upload=1e-4), most_tokens=MOST, goal_s=0.2))
    world.submit(*[spec(index, 20, max_tokens=200) for index in range(1, 7)])
    world.go(12)
    world.submit(spec(7, 6000, max_tokens=2))
    most_chunks = most_decodes = 0
    while world.specs[spec(7, 6000).sequence].sequence not in world.ended:
        world.fill()
        chunks = [step for step in world.in_flight if len(step.token_ids) > step.num_rows]
        decodes = [
            step
            for step in world.in_flight
            if any(n == 1 and s for n, s in zip(step.num_tokens, step.samples, strict=True))
        ]
        most_chunks, most_decodes = max(most_chunks, len(chunks)), max(most_decodes, len(decodes))
        world.retire()
    assert most_chunks > 2, "more chunks than micro-batches of decodes"
    assert most_decodes <= 3, "the prompt's own first token comes on top"
    world.run()
    world.check_outputs()
    world.assert_invariants()


@pytest.mark.parametrize(("text", "goal_s"), [("", 0.1), ("100ms", 0.1), ("0.3s", 0.3), ("off", None), ("60s", 60.0)])
def test_a_goal_is_a_time_or_off(text: str, goal_s: float | None) -> None:
    assert parse_itl_goal(text) == goal_s


@pytest.mark.parametrize("text", ["100", "-5ms", "0ms", "2min", "soon", "OFF"])
def test_a_goal_without_a_unit_or_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"--itl-goal cannot be") as caught:
        parse_itl_goal(text)
    assert "100ms" in caught.value.next_step


def test_every_decode_of_a_step_attends_to_its_whole_context() -> None:
    pair_s = 1e-6
    pacer = Pacer(ring_of([Server(0.005, 0.0, pair_s)]), most_tokens=MOST)
    nothing, chats = pacer.decode_passage(8, context=0), pacer.decode_passage(8, context=10_000)
    assert nothing is not None
    assert chats is not None
    assert chats.server_s - nothing.server_s == pytest.approx(8 * 9_999 * pair_s)  # of nothing, one token is counted
