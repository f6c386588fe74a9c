"""One prediction of step times: bounds that hold on any device, and chunks that fit the time allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.backend.cost import AttentionCost, SliceCost, StepWork
from edgepipe.scheduler import ThrottledPolicy
from edgepipe.scheduler.pacing import Pacer, RingTimes
from edgepipe.scheduler.step_time import SliceTimes
from tests.support.worlds.scheduler import World, limits, spec

FACTOR = 8.0  # of every deadline


@dataclass(frozen=True)
class Device:
    """``a + b * tokens + c * pairs`` seconds."""

    a: float
    b: float
    c: float

    def step_s(self, work: StepWork) -> float:
        return self.a + self.b * work.tokens + self.c * work.attention_pairs


def data_sheet(device: Device, *, errors: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> SliceCost:
    """What is known of the device beforehand, off by a factor in each of its parts."""
    return SliceCost(
        read_s=device.a * errors[0],
        token_s=device.b * errors[1],
        head_read_s=0.0,
        head_row_s=0.0,
        attention=(AttentionCost(window=None, kv_token_s=0.0, pair_s=device.c * errors[2]),),
        step_overhead_s=0.0,
        row_overhead_s=0.0,
        tile_steps=(),
    )


def chunk(tokens: int, position: int = 0) -> StepWork:
    return StepWork.of_rows((position,), (tokens,), logit_rows=1)


devices = st.builds(
    lambda slower, a, b, c: Device(slower * a, slower * b, slower * c),
    st.floats(0, 4).map(lambda power: 10**power),
    st.floats(1e-3, 0.05),
    st.floats(1e-6, 1e-3),
    st.floats(0, 1e-7),
)
works = st.builds(chunk, st.integers(1, 2048), st.integers(0, 32_000)) | st.builds(
    lambda rows, position: StepWork.of_rows((position,) * rows, (1,) * rows, logit_rows=rows),
    st.integers(1, 256),
    st.integers(0, 32_000),
)


@given(devices, st.lists(works, min_size=1, max_size=30), works)
def test_one_measured_step_bounds_every_other_one(device: Device, measured: list[StepWork], other: StepWork) -> None:
    times = SliceTimes()
    for work in measured:
        times.note(work, device.step_s(work))
    assert times.bound_s(other) >= device.step_s(other) * (1 - 1e-9)


@given(
    devices,
    st.tuples(*[st.floats(1 / FACTOR, FACTOR)] * 3),
    st.lists(st.tuples(works, st.floats(0.7, 1.5)), max_size=30),
    works,
)
def test_a_data_sheet_that_is_wrong_by_a_factor_of_eight_is_no_reason_for_a_false_alarm(
    device: Device, errors: tuple[float, float, float], measured: list[tuple[StepWork, float]], other: StepWork
) -> None:
    times = SliceTimes(data_sheet(device, errors=errors))
    for work, jitter in measured:
        assert FACTOR * times.bound_s(work) > jitter * device.step_s(work)
        times.note(work, jitter * device.step_s(work))
    assert FACTOR * times.bound_s(other) > 1.5 * device.step_s(other)


@given(devices, works)
def test_a_size_that_was_measured_gets_no_more_than_eight_times_its_time(device: Device, work: StepWork) -> None:
    times = SliceTimes(data_sheet(device))
    assert not times.seen(work)
    for _ in range(3):
        times.note(work, device.step_s(work))
    assert times.seen(work)
    assert times.bound_s(work) == pytest.approx(device.step_s(work))


def pacer_of(*stages: Callable[[StepWork], float]) -> Pacer:
    return Pacer(RingTimes([[step_s] for step_s in stages], [], lambda: 0.0), most_tokens=2048)


def test_what_nobody_knows_is_neither_bounded_nor_capped() -> None:
    times = SliceTimes()
    assert times.bound_s(chunk(100)) == times.expected_s(chunk(100)) == 0.0
    assert pacer_of(times.expected_s).most_tokens(0, waiting=5000) == 2048


def test_a_first_step_that_compiles_kernels_hardly_shrinks_the_chunks_after_it() -> None:
    device = Device(0.02, 1e-4, 0.0)
    times = SliceTimes(data_sheet(device))
    times.note(chunk(10), 100 * device.step_s(chunk(10)))
    assert pacer_of(times.expected_s).most_tokens(0, waiting=4096) == 2048
    for _ in range(10):
        times.note(chunk(500), device.step_s(chunk(500)))
    assert times.expected_s(chunk(500)) < 1.2 * device.step_s(chunk(500))


@given(devices, st.integers(32, 2048), st.floats(0.3, 3.0))
def test_kernels_that_one_size_alone_uses_do_not_change_what_others_take(
    device: Device, tokens: int, factor: float
) -> None:
    sheet = data_sheet(device)
    times = SliceTimes(sheet)
    others = [size for size in (33, 64, 100, 500, 2048) if max(size, tokens) >= 8 * min(size, tokens)]
    for _ in range(4):
        for size in others:
            times.note(chunk(size), sheet.step_s(chunk(size)))
    for _ in range(12):
        times.note(chunk(tokens), factor * sheet.step_s(chunk(tokens)))
    assert times.expected_s(chunk(tokens)) == pytest.approx(factor * sheet.step_s(chunk(tokens)), rel=0.05)
    for size in others:
        assert times.expected_s(chunk(size)) == pytest.approx(sheet.step_s(chunk(size)), rel=0.05)


@given(devices, st.floats(0.5, 4.0))
def test_a_device_that_becomes_slower_does_so_for_all_sizes(device: Device, factor: float) -> None:
    sheet = data_sheet(device)
    times = SliceTimes(sheet)
    for size in (64, 512, 2048) * 3:
        times.note(chunk(size), sheet.step_s(chunk(size)))
    for _ in range(15):
        times.note(chunk(512), factor * sheet.step_s(chunk(512)))
    for size in (64, 512, 2048):
        assert times.expected_s(chunk(size)) == pytest.approx(factor * sheet.step_s(chunk(size)), rel=0.25)


def test_a_size_far_from_all_measured_ones_is_tried_although_they_were_slow() -> None:
    device = Device(0.02, 1e-4, 0.0)
    sheet = data_sheet(device)
    times = SliceTimes(sheet)
    for _ in range(10):
        times.note(chunk(64), 2 * sheet.step_s(chunk(64)))
    near, far = (times.expected_s(chunk(size)) / sheet.step_s(chunk(size)) for size in (100, 2048))
    assert 1.6 < near < 2
    assert 1 < far < 1.2


def test_a_single_slow_step_of_a_size_is_forgotten_while_others_are_computed() -> None:
    device = Device(0.02, 1e-4, 0.0)
    sheet = data_sheet(device)
    times = SliceTimes(sheet)
    times.note(chunk(2048), 100 * sheet.step_s(chunk(2048)))
    assert times.expected_s(chunk(2048)) == pytest.approx(2 * sheet.step_s(chunk(2048)))
    for _ in range(150):
        times.note(chunk(64), sheet.step_s(chunk(64)))
    assert times.expected_s(chunk(2048)) < 1.1 * sheet.step_s(chunk(2048))


def test_chunks_follow_a_device_that_is_much_slower_than_its_data_sheet() -> None:
    device = Device(0.02, 1e-4, 0.0)
    times = SliceTimes(data_sheet(device))
    for _ in range(12):
        times.note(chunk(500), 100 * device.step_s(chunk(500)))
    assert times.expected_s(chunk(500)) > 50 * device.step_s(chunk(500))


@given(st.lists(devices, min_size=1, max_size=5), st.integers(0, 32_000), st.integers(1, 10_000))
def test_the_most_tokens_are_the_largest_chunk_in_the_time_allowed(
    ring: list[Device], position: int, waiting: int
) -> None:
    tokens = pacer_of(*[device.step_s for device in ring]).most_tokens(position, waiting=waiting)
    decode_s = max(device.step_s(chunk(1, position)) for device in ring)
    allowed_s = max(4.0, 4 * decode_s)
    most = min(waiting, 2048)
    assert 1 <= tokens <= most
    assert max(device.step_s(chunk(tokens, position)) for device in ring) <= allowed_s
    if tokens < most:
        assert max(device.step_s(chunk(tokens + 2 + tokens // 16, position)) for device in ring) > allowed_s


def test_chunks_become_smaller_the_further_a_prompt_is_on_and_never_stop() -> None:
    device = Device(0.01, 4e-3, 2e-6)
    world = World(limits(num_blocks=4096, micro_batches=1, context_length=9000), ThrottledPolicy())
    world.scheduler.set_pacer(pacer_of(device.step_s))
    world.submit(spec(1, 8000, max_tokens=1))
    world.run()
    chunks = [sum(step.num_tokens) for step in world.steps]
    assert sum(chunks) == 8000
    assert all(later <= 1.1 * earlier for earlier, later in pairwise(chunks))
    assert 32 <= chunks[-2] < chunks[0] / 3
    starts = [step.positions[0] for step in world.steps]
    taken_s = [device.step_s(chunk(count, start)) for start, count in zip(starts, chunks, strict=True)]
    assert max(taken_s) <= 1.1 * 4.0
