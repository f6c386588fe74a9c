"""How many micro-batches a measured ring wants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.scheduler.sizing import (
    Curve,
    Forecasts,
    LinkCurve,
    RingMeasurements,
    Sizer,
    StageCurve,
    most_micro_batches,
)

ROW_BYTES = 2 * 5120  # bf16 of a 32B model


def stage(read_s: float, row_s: float) -> StageCurve:
    """A device that reads weights for ``read_s`` and takes ``row_s`` more for each row."""
    curve = StageCurve()
    for rows in (1, 2, 4, 8, 16, 32, 64, 128):
        for _ in range(3):
            curve.note(num_rows=rows, num_tokens=rows, seconds=read_s + row_s * rows)
    return curve


def link(bytes_per_s: float) -> LinkCurve:
    curve = LinkCurve()
    for rows in (1, 16, 128):
        curve.note_upload(num_bytes=rows * ROW_BYTES, seconds=rows * ROW_BYTES / bytes_per_s)
    return curve


def ring(
    *reads_ms: float, row_ms: float = 0.085, mbit: float = 1000.0, one_way_ms: float = 0.0, return_ms: float = 0.0
) -> RingMeasurements:
    links = len(reads_ms) - 1
    return RingMeasurements(
        stages=[[stage(read_ms / 1e3, row_ms / 1e3)] for read_ms in reads_ms],
        links=[link(mbit * 125_000) for _ in range(links)],
        row_bytes=ROW_BYTES,
        latency_s=(one_way_ms * links + return_ms) / 1e3,
    )


EQUAL = (19.7, 19.7, 19.7, 19.7)


def simulated(of: RingMeasurements, *, sequences: int, micro_batches: int, cv: float, turns: int = 60) -> float:
    """Tokens per second of a ring in which M even micro-batches go round: devices and links serve in turn, latency is a
    delay. The oracle of these tests: it shares nothing with the formulas."""
    draws = np.random.default_rng(7)
    base, more = divmod(sequences, micro_batches)
    sizes = np.array([base + (i < more) for i in range(micro_batches)], dtype=np.float64)
    devices = [curves[0].at(sizes) for curves in of.stages]
    uploads = [each.at(sizes * of.row_bytes) for each in of.links]
    hop_s = of.latency_s / (len(of.links) + 1)
    device_free, link_free = [0.0] * len(devices), [0.0] * len(uploads)
    back = np.zeros(micro_batches)
    tokens, start_s = 0.0, 0.0
    for turn in range(turns):
        if turn == turns // 4:
            tokens, start_s = 0.0, float(back.min())
        for batch in range(micro_batches):
            now = back[batch]
            for i, times in enumerate(devices):
                jitter = draws.gamma(1 / cv**2, cv**2) if cv else 1.0
                now = device_free[i] = max(now, device_free[i]) + times[batch] * jitter
                if i < len(uploads):
                    now = link_free[i] = max(now, link_free[i]) + uploads[i][batch]
                now += hop_s
            back[batch] = now
            tokens += sizes[batch]
    return tokens / (float(back.max()) - start_s)


# Links and sequences of the table that the design rests on, and the share of the best fixed M that must be reached.
@pytest.mark.parametrize("sequences", [32, 128])
@pytest.mark.parametrize("cv", [0.0, 0.05, 0.3])
@pytest.mark.parametrize(("mbit", "one_way_ms"), [(1000, 1), (100, 1), (300, 5), (1000, 30)])
def test_the_best_m_of_a_forecast_is_nearly_the_best_there_is(
    mbit: float, one_way_ms: float, cv: float, sequences: int
) -> None:
    of = ring(*EQUAL, mbit=mbit, one_way_ms=one_way_ms, return_ms=one_way_ms)
    chosen = Forecasts(of, sequences=sequences).best().micro_batches
    rates = {m: simulated(of, sequences=sequences, micro_batches=m, cv=cv) for m in range(2, 17)}
    assert rates[chosen] >= (0.95 if cv < 0.1 else 0.87) * max(rates.values()), (chosen, rates)


@pytest.mark.parametrize(("mbit", "one_way_ms", "best"), [(1000, 1, 4), (100, 1, 6), (300, 5, 5), (1000, 30, 8)])
def test_the_best_m_for_many_sequences_is_neither_n_nor_3n(mbit: float, one_way_ms: float, best: int) -> None:
    of = ring(*EQUAL, mbit=mbit, one_way_ms=one_way_ms)
    assert abs(Forecasts(of, sequences=128).best().micro_batches - best) <= 1


def test_without_jitter_a_forecast_is_what_happens() -> None:
    of = ring(4, 4, 12, 6, row_ms=0.01, one_way_ms=2)
    forecasts = Forecasts(of, sequences=24)
    for m in (1, 2, 3, 4, 6):
        assert simulated(of, sequences=24, micro_batches=m, cv=0.0, turns=400) == pytest.approx(
            forecasts.of(m).tokens_per_s, rel=0.02
        )


def test_latency_is_no_server() -> None:
    near, far = ring(*EQUAL), ring(*EQUAL, one_way_ms=30)
    assert Forecasts(far, sequences=128).of(16).server_s == Forecasts(near, sequences=128).of(16).server_s
    assert Forecasts(far, sequences=128).best().micro_batches > Forecasts(near, sequences=128).best().micro_batches
    assert Forecasts(far, sequences=128).best().bottleneck.startswith("stage")


def test_a_link_slower_than_the_devices_is_the_bottleneck_and_more_micro_batches_do_not_help_it() -> None:
    forecasts = Forecasts(ring(2, 2, row_ms=0.01, mbit=10), sequences=64)
    best = forecasts.best()
    assert best.bottleneck == "link 0-1"
    assert best.tokens_per_s == pytest.approx(10 * 125_000 / ROW_BYTES, rel=0.01)
    assert best.micro_batches <= 3, "of equals the smallest"


def test_one_slow_device_wants_fewer_micro_batches_than_stages() -> None:
    best = Forecasts(ring(1, 1, 20, 1), sequences=64).best()
    assert best.micro_batches < 4
    assert best.bottleneck == "stage 2"


@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_there_are_never_more_micro_batches_than_sequences(sequences: int) -> None:
    forecasts = Forecasts(ring(*EQUAL, one_way_ms=50), sequences=sequences)
    assert forecasts.limit == sequences
    assert forecasts.best().micro_batches <= sequences
    assert forecasts.of(9).micro_batches == sequences


def test_slack_for_jitter_is_added_only_where_b_cannot_grow() -> None:
    of = ring(*EQUAL, one_way_ms=10)
    steady = Forecasts(of, sequences=1000, max_rows=8).best().micro_batches
    curve = of.stages[0][0]
    for i in range(400):
        curve.note(num_rows=8, num_tokens=8, seconds=(0.0197 + 0.085e-3 * 8) * (1.25 if i % 2 else 0.75))
    assert curve.jitter > 0.15
    assert Forecasts(of, sequences=1000, max_rows=8).best().micro_batches > steady
    free = Forecasts(of, sequences=128)
    assert free.best().tokens_per_s >= 0.99 * max(free.of(m).tokens_per_s for m in range(1, free.limit + 1))


# Curves


def values(curve: Curve, *sizes: float) -> list[float]:
    return curve.at(np.array(sizes, dtype=np.float64)).tolist()


def test_a_curve_goes_on_beyond_what_was_measured() -> None:
    curve = Curve(growing=0.5)
    assert values(curve, 4) == [0.0]
    curve.note(8, 0.02)
    assert values(curve, 4, 8, 16) == pytest.approx([0.015, 0.02, 0.03]), "half of it grows"
    curve.note(16, 0.028)
    assert values(curve, 4, 12, 32) == pytest.approx([0.016, 0.024, 0.044])


def test_a_links_curve_goes_through_zero_until_it_knows_better() -> None:
    curve = Curve(growing=1.0)
    curve.note(1000, 0.01)
    assert values(curve, 500, 3000) == pytest.approx([0.005, 0.03])


def test_a_step_that_was_held_up_once_does_not_hide_that_fewer_rows_take_less() -> None:
    curve = Curve(growing=0.5)
    curve.note(2, 0.050)
    for _ in range(40):
        curve.note(8, 0.010)
    assert values(curve, 4, 8) == pytest.approx([0.0075, 0.010])


def test_a_curve_follows_what_changes_and_forgets_what_was() -> None:
    curve = Curve(growing=0.0)
    curve.note(64, 0.5)
    for _ in range(60):
        curve.note(8, 0.02)
    for _ in range(60):
        curve.note(8, 0.04)
    assert values(curve, 8)[0] == pytest.approx(0.04, rel=0.02)
    for _ in range(5000):
        curve.note(8, 0.04)
    assert values(curve, 64)[0] == pytest.approx(0.04)


def test_steps_with_prompt_tokens_are_kept_apart() -> None:
    curve = StageCurve()
    assert not curve.known
    for _ in range(3):
        curve.note(num_rows=4, num_tokens=500, seconds=0.2)
    assert curve.known
    for _ in range(3):
        curve.note(num_rows=4, num_tokens=4, seconds=0.02)
    assert curve.at(np.array([4.0]))[0] == pytest.approx(0.02)


@given(samples=st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-4, 10.0)), min_size=1, max_size=60))
def test_more_rows_never_take_less(samples: list[tuple[int, float]]) -> None:
    curve = Curve(growing=0.5)
    for size, seconds in samples:
        curve.note(size, seconds)
    found = curve.at(np.arange(1, 5000, 7, dtype=np.float64))
    assert np.all(np.diff(found) >= -1e-9)
    assert np.all(found >= 0)
    assert found.max() < 5000 * 10.0 / min(size for size, _ in samples) + 10.0


@given(
    reads=st.lists(st.floats(0.1, 50), min_size=1, max_size=6),
    row_ms=st.floats(0, 1),
    one_way_ms=st.floats(0, 50),
    sequences=st.integers(1, 200),
)
def test_no_m_beats_the_best_and_none_beats_its_slowest_server(
    reads: list[float], row_ms: float, one_way_ms: float, sequences: int
) -> None:
    forecasts = Forecasts(ring(*reads, row_ms=row_ms, one_way_ms=one_way_ms), sequences=sequences)
    best = forecasts.best()
    assert 1 <= best.micro_batches <= min(sequences, most_micro_batches(len(reads)))
    for m in range(1, forecasts.limit + 1):
        each = forecasts.of(m)
        assert each.tokens_per_s <= best.tokens_per_s * 1.011
        assert each.tokens_per_s <= sequences / m / each.server_s * (1 + 1e-9)
        assert each.turn_s >= each.server_s


# Links


def arrive(
    curve: LinkCurve, num_bytes: int, round_trip_s: float, *, spread_bytes: int = 0, spread_s: float = 0.0
) -> None:
    curve.note_arrival(num_bytes=num_bytes, round_trip_s=round_trip_s, spread_bytes=spread_bytes, spread_s=spread_s)


def test_pieces_of_a_large_step_tell_the_rate_that_a_buffer_hides() -> None:
    curve = LinkCurve()
    curve.note_upload(num_bytes=2_000_000, seconds=0.001)
    arrive(curve, 2_000_000, 0.3, spread_bytes=1_500_000, spread_s=0.12)
    assert curve.seconds(1_000_000) == pytest.approx(0.08)


def test_the_hosts_work_for_small_steps_is_no_rate_of_large_ones_once_the_wire_is_known() -> None:
    curve = LinkCurve()
    for _ in range(5):
        curve.note_upload(num_bytes=50_000, seconds=0.004)
    assert curve.seconds(5_000_000) == pytest.approx(0.4)
    arrive(curve, 500_000, 0.01, spread_bytes=400_000, spread_s=0.0032)
    assert curve.seconds(50_000) == pytest.approx(0.004)
    assert curve.seconds(5_000_000) == pytest.approx(0.004 + 4_950_000 * 8e-9)


def test_large_and_small_steps_tell_the_rate_and_what_waited_does_not_count() -> None:
    curve = LinkCurve()
    for i in range(8):
        for num_bytes in (20_000, 420_000):
            arrive(curve, num_bytes, 0.002 + num_bytes / 1e7 + 0.05 * (i % 4))
    assert curve.seconds(100_000) == pytest.approx(0.01)


def test_steps_of_one_size_do_not_make_latency_a_server() -> None:
    curve = LinkCurve()
    for _ in range(300):
        arrive(curve, 160_000, 0.060)
    assert curve.seconds(160_000) == 0.0


def test_a_link_that_became_faster_is_not_held_to_what_it_was() -> None:
    curve = LinkCurve()
    arrive(curve, 2_000_000, 0.2, spread_bytes=1_500_000, spread_s=0.15)
    for _ in range(300):
        arrive(curve, 160_000, 0.002)
    assert curve.seconds(160_000) <= 0.002


# The sizer


def driven(sizer: Sizer, of: RingMeasurements, *, sequences: int, decisions: int) -> list[int]:
    found: list[int] = []
    for _ in range(decisions):
        steps = 1
        while not sizer.due(sequences=sequences):
            steps += 1
        assert steps >= 2 * sizer.sizing.micro_batches
        found.append(sizer.decide(of, sequences=sequences).micro_batches)
    return found


def test_m_starts_at_one_per_stage_and_moves_one_at_a_time() -> None:
    sizer = Sizer(num_stages=4)
    assert sizer.sizing.micro_batches == 4
    of = ring(*EQUAL, one_way_ms=30)
    found = driven(sizer, of, sequences=128, decisions=12)
    assert all(abs(b - a) <= 1 for a, b in zip([4, *found], found, strict=False))
    best = Forecasts(of, sequences=128).best()
    assert Forecasts(of, sequences=128).of(found[-1]).tokens_per_s * 1.03 >= best.tokens_per_s
    assert sizer.sizing.bottleneck.startswith("stage")
    assert "of it on the network" in sizer.sizing.why


def test_m_stays_where_nothing_is_to_be_gained() -> None:
    sizer = Sizer(num_stages=2)
    assert driven(sizer, ring(20, 20, row_ms=0), sequences=64, decisions=5)[-1] == 2
    unmeasured = RingMeasurements(stages=[[StageCurve()]], links=[], row_bytes=1, latency_s=0.0)
    assert Sizer(num_stages=1).decide(unmeasured, sequences=5).why == "1 per stage (still measuring)"


def test_m_goes_down_when_sequences_leave_and_up_when_they_come() -> None:
    sizer = Sizer(num_stages=4)
    of = ring(*EQUAL, one_way_ms=20)
    many = driven(sizer, of, sequences=128, decisions=10)[-1]
    assert driven(sizer, of, sequences=2, decisions=12)[-1] <= 2
    assert driven(sizer, of, sequences=128, decisions=12)[-1] == many


def test_a_fixed_m_is_told_with_what_it_gives() -> None:
    sizer = Sizer(num_stages=2, fixed=7)
    assert driven(sizer, ring(10, 20), sequences=3, decisions=3) == [7, 7, 7]
    sizing = sizer.sizing
    assert (sizing.why, sizing.bottleneck) == ("7, as asked for", "stage 1")
    assert sizing.tokens_per_s > 0


def test_where_nothing_changes_looks_are_rarer_until_sequences_come_or_go() -> None:
    sizer, of = Sizer(num_stages=4), ring(*EQUAL)

    def steps_until_due(sequences: int) -> int:
        return next(count for count in range(1, 1000) if sizer.due(sequences=sequences))

    waits: list[int] = []
    for _ in range(8):
        waits.append(steps_until_due(64))
        sizer.decide(of, sequences=64)
    count = sizer.sizing.micro_batches
    assert waits[0] == 2 * count
    assert waits[-1] == 32 * count
    assert steps_until_due(60) == 2 * count
