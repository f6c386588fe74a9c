"""Benches begin when processes rest: at once on a fast machine, and on a slow one without waiting for a still one."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.rest import Rest, Used


def looks_until_rest(shares: Sequence[Sequence[tuple[float, float]]]) -> int | None:
    """Return after how many looks processes rest, which run and wait for such shares of each second."""
    totals = [Used(f"p{number}", 10.0 * number, 3.0) for number in range(len(shares[0]))]
    rest = Rest(dict(enumerate(totals)))
    for number, second in enumerate(shares, start=1):
        totals = [
            Used(each.name, each.processor_s + runs, each.waited_s + waits)
            for each, (runs, waits) in zip(totals, second, strict=True)
        ]
        if rest.look(dict(enumerate(totals)), passed_s=1.0):
            return number
    return None


def test_quiet_processes_rest_at_the_first_look() -> None:
    assert looks_until_rest([[(0.02, 0.0)] * 4]) == 1


def test_idle_nodes_of_a_slow_machine_rest_though_they_need_more_than_a_tenth_of_a_core() -> None:
    assert looks_until_rest([[(0.06, 0.15)] * 12] * 10) == 3


def test_a_process_that_starts_does_not_rest_however_little_of_a_crowded_machine_it_gets() -> None:
    idle = [(0.03, 0.05)] * 11
    starts = [[*idle, (0.05, 0.9)]] * 20
    assert looks_until_rest(starts) is None
    assert looks_until_rest([*starts, *[[*idle, (0.03, 0.05)]] * 5]) == 23


def test_a_process_that_works_now_and_then_is_waited_for() -> None:
    calm, busy = [(0.04, 0.1)] * 4, [(0.04, 0.1)] * 3 + [(0.6, 0.1)]
    assert looks_until_rest([calm, calm, busy, calm, calm, busy, calm, calm, calm]) == 9


def test_a_process_that_began_since_the_last_look_counts_with_all_that_it_used() -> None:
    rest = Rest({1: Used("idle", 5.0)})
    assert not rest.look({1: Used("idle", 5.0), 2: Used("starts", 0.4, 0.5)}, passed_s=1.0)
    assert rest.busiest[0] == "starts"
    assert rest.look({1: Used("idle", 5.0)}, passed_s=1.0)  # the other one has ended
