"""M follows what stages and links report."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from edgepipe.engine.micro_batches import MicroBatches
from edgepipe.engine.turns import TurnLedger
from edgepipe.ids import StepId
from edgepipe.scheduler.pacing import most_prompt_steps
from edgepipe.wire.reports import LinkSample, StepTiming
from tests.support.engine.ring_model import ROW_BYTES, RingModel, scheduled


def model(*reads_ms: float, fixed: int = 0, **more: float) -> RingModel:
    sizes = MicroBatches(slices=[[i] for i in range(len(reads_ms))], row_bytes=ROW_BYTES, fixed=fixed)
    return RingModel(reads_ms=list(reads_ms), sizes=sizes, **more)  # pyright: ignore[reportArgumentType]


def test_equal_stages_and_a_fast_network_need_one_per_stage() -> None:
    ring = model(20, 20, 20, 20)
    assert set(ring.run(sequences=64, steps=200)) == {4}
    assert ring.sizes.sizing.bottleneck.startswith("stage")


def test_latency_wants_more_and_m_comes_back_when_it_goes() -> None:
    ring = model(10, 10, row_ms=0.5, one_way_ms=25, return_ms=25)
    found = ring.run(sequences=64, steps=200)
    assert found[0] == 2
    assert found[-1] == 5, "more would fill the turn with steps that take as long as larger ones"
    assert all(abs(b - a) <= 1 for a, b in pairwise(found))
    assert ring.sizes.latency_s == pytest.approx(0.05, abs=0.002)
    ring.one_way_ms = ring.return_ms = 0.0
    assert ring.run(sequences=64, steps=300)[-1] == 2


def test_a_slow_link_is_found_and_named() -> None:
    ring = model(10, 10, 10, bytes_per_ms=6_250)  # 50 Mbit/s: 1.6 ms a row
    ring.run(sequences=48, steps=200)
    sizing = ring.sizes.sizing
    assert sizing.bottleneck.startswith("link")
    assert sizing.tokens_per_s == pytest.approx(6_250_000 / ROW_BYTES, rel=0.1)


def test_a_slow_link_behind_a_buffer_is_found_by_the_pieces_of_a_prompt() -> None:
    ring = model(10, 10, bytes_per_ms=6_250, buffered=True)
    ring.run(sequences=48, steps=200, prompt=400)
    assert ring.sizes.sizing.bottleneck == "link 0-1"
    assert ring.sizes.sizing.tokens_per_s == pytest.approx(6_250_000 / ROW_BYTES, rel=0.1)


def test_one_slow_device_wants_fewer() -> None:
    ring = model(2, 2, 30, 2)
    assert ring.run(sequences=32, steps=100)[-1] < 4
    assert ring.sizes.sizing.bottleneck == "stage 2"


def test_m_follows_sequences_that_leave_and_come() -> None:
    ring = model(10, 10, 10, one_way_ms=10, return_ms=10)
    many = ring.run(sequences=96, steps=200)[-1]
    assert many > 3
    assert ring.run(sequences=2, steps=60)[-1] <= 2
    assert ring.run(sequences=96, steps=200)[-1] == many


def test_a_hop_is_measured_without_a_common_clock() -> None:
    ring = model(5, 5, one_way_ms=12)
    ring.run(sequences=8, steps=60)
    assert ring.one_way_s[-1] == pytest.approx(0.012, abs=0.0005)


def test_a_fixed_m_stays() -> None:
    ring = model(10, 10, fixed=5, one_way_ms=40)
    assert set(ring.run(sequences=32, steps=60)) == {5}
    assert ring.sizes.most == 5 + most_prompt_steps(2)
    assert ring.sizes.sizing.tokens_per_s > 0


def test_a_turn_is_latency_beside_what_is_told() -> None:
    ledger = TurnLedger(num_slices=2, upload_s=lambda tokens: tokens * 1e-3)
    ledger.sent(StepId(1), num_rows=4, num_tokens=4, now_s=100.0)
    ledger.sent(StepId(2), num_rows=4, num_tokens=400, now_s=100.0)
    ledger.stayed(StepId(1), 0.010)
    ledger.retired(StepId(2), 105.0)
    ledger.retired(StepId(1), 100.050)
    assert ledger.latency_s == 0.0, "the other slice has not told"
    ledger.stayed(StepId(1), 0.020)
    assert ledger.latency_s == pytest.approx(0.016)


def test_the_turn_of_a_step_planned_ahead_begins_when_the_token_before_it_came() -> None:
    ledger = TurnLedger(num_slices=1, upload_s=lambda _: 0.0)
    ledger.sent(StepId(1), num_rows=1, num_tokens=1, now_s=100.0)
    ledger.sent(StepId(2), num_rows=1, num_tokens=1, now_s=100.001, after=StepId(1))
    for step, came_s in ((1, 100.010), (2, 100.019)):
        ledger.stayed(StepId(step), 0.008)
        ledger.retired(StepId(step), came_s)
    assert ledger.latency_s == pytest.approx((0.002 + 0.001) / 2)


def test_a_draft_s_time_forgets_the_first_one() -> None:
    sizes = model(10, 10).sizes
    assert sizes.draft_s == 0
    for step, draft_us in enumerate((900_000, 6_000, 8_000), start=1):
        sizes.sent(scheduled(step, 1, 1)._replace(drafts=(2,)), now_s=float(step))
        timing = StepTiming(step=StepId(step), slice_index=1, num_tokens=1, num_rows=1, started_us=0)
        sizes.note_timing(1, replace(timing, compute_us=9_000, draft_us=draft_us))
    assert sizes.draft_s == pytest.approx(0.004)


def test_a_ledger_forgets_steps_of_which_nothing_comes() -> None:
    ledger = TurnLedger(num_slices=2, upload_s=lambda _: 0.0)
    for step in range(1, 2001):
        ledger.sent(StepId(step), num_rows=1, num_tokens=1, now_s=0.0)
    ledger.stayed(StepId(1), 0.1)
    ledger.stayed(StepId(1), 0.1)
    ledger.retired(StepId(1), 9.0)
    assert ledger.latency_s == 0.0


def test_a_samples_round_trip_leaves_out_the_stay() -> None:
    sample = LinkSample(
        step=StepId(1),
        num_bytes=1,
        first_sent_us=1_000,
        first_received_us=900_000,
        last_received_us=901_000,
        told_us=950_000,
        acknowledged_us=55_000,
    )
    assert sample.round_trip_us == 5_000


def test_a_turn_counts_all_stages_and_links_and_what_a_device_with_two_slices_computes_in_between() -> None:
    plain = MicroBatches(slices=[[0], [1]], row_bytes=ROW_BYTES, fixed=0)
    interleaved = MicroBatches(slices=[[0, 2], [1, 3]], row_bytes=ROW_BYTES, fixed=0)
    assert plain.turn_s([StepId(1)]) == 0.0
    for sizes, num_slices in ((plain, 2), (interleaved, 4)):
        for step in (1, 2):
            sizes.sent(scheduled(step, 4, 4), now_s=0.0)
            for index in range(num_slices):
                timing = StepTiming(
                    step=StepId(step), slice_index=index, num_tokens=4, num_rows=4, started_us=0, compute_us=100_000
                )
                sizes.note_timing(index % 2, timing)
    link_s = 4 * ROW_BYTES / 10e6
    assert plain.turn_s([StepId(1), StepId(2)]) == pytest.approx(0.2 + link_s)
    assert interleaved.turn_s([StepId(1), StepId(2)]) == pytest.approx(2 * (0.4 + 3 * link_s))
