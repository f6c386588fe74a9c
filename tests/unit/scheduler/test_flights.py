"""Windows of drafts in flight: the same tokens as without, in fewer turns, and only where the formula promises it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgepipe.backend.drafting import Drafts, DraftSource
from edgepipe.ids import StepId
from edgepipe.scheduler import EndReason, Policy, SchedulerLimits, ThrottledPolicy
from edgepipe.scheduler.drafting import Drafting, RowsBeside, SequenceDrafts
from edgepipe.scheduler.flights import DraftChain, Flight, best_flight
from tests.support.worlds.scheduler import World, limits, reference, spec, windowed
from tests.unit.scheduler.test_scheduler_properties import Action, actions, pipelines, play, policies
from tests.unit.scheduler.test_window_properties import pipelines as windowed_pipelines

MODEL = DraftSource.MODEL
ALONE = RowsBeside(rows=1, alone=True)
acceptances = st.sampled_from([0.0, 0.5, 0.9, 1.0])
either = st.one_of(pipelines, windowed_pipelines)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=either, policy=policies, actions=actions, acceptance=acceptances)
def test_windows_in_flight_change_no_token_whatever_happens(
    pipeline: SchedulerLimits, policy: Policy, actions: list[Action], acceptance: float
) -> None:
    play(replace(pipeline, micro_batches=1), policy, [("a", 1, 1, 0), *actions], acceptance=acceptance, flies=True)


@pytest.mark.long
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=either, policy=policies, actions=actions, acceptance=acceptances)
def test_windows_in_flight_change_no_token_in_many_more_worlds(
    pipeline: SchedulerLimits, policy: Policy, actions: list[Action], acceptance: float
) -> None:
    play(replace(pipeline, micro_batches=1), policy, [("a", 1, 1, 0), *actions], acceptance=acceptance, flies=True)


def lone_world(pipeline: SchedulerLimits, acceptance: float) -> World:
    world = World(pipeline, ThrottledPolicy(), acceptance, flies=True)
    world.plan_ahead()
    return world


@pytest.mark.parametrize(
    "pipeline",
    [limits(num_blocks=256, micro_batches=1), windowed((12, 40), num_blocks=256, micro_batches=1)],
    ids=["all", "window"],
)
@pytest.mark.parametrize("acceptance", [0.6, 1.0])
def test_a_window_begins_before_the_last_one_is_judged(pipeline: SchedulerLimits, acceptance: float) -> None:
    world = lone_world(pipeline, acceptance)
    world.submit(spec(1, 21, max_tokens=120))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert world.most_flying > 1
    assert (world.void > 0) == (acceptance < 1)
    again = [*world.specs[spec(1).sequence].prompt, *world.output[spec(1).sequence], 3, 4]
    world.submit(spec(2, again, max_tokens=20))
    world.run()
    world.check_outputs()
    assert world.ended[spec(2).sequence].cached_prompt_tokens == (len(again) - 3) // 4 * 4
    world.assert_invariants()


def test_a_stop_id_ends_the_sequence_though_windows_behind_it_are_in_flight() -> None:
    tokens = reference(spec(1, 10, max_tokens=90), context=200)
    stop = next(token for place, token in enumerate(tokens) if place > 40 and token not in tokens[:place])
    world = lone_world(limits(num_blocks=256, micro_batches=1), 1.0)
    world.submit(spec(1, 10, max_tokens=90, stop_ids=frozenset({stop})))
    world.run()
    world.check_outputs()
    assert world.most_flying > 1
    assert world.ended[spec(1).sequence].reason is EndReason.STOP
    world.assert_invariants()


def test_a_second_chat_ends_the_flight() -> None:
    world = lone_world(limits(num_blocks=256, micro_batches=1), 1.0)
    world.submit(spec(1, 10, max_tokens=100))
    world.go(25)
    assert world.most_flying > 1
    flown = len([step for step in world.steps if step.lot])
    world.submit(spec(2, 10, max_tokens=30))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    both = [step for step in world.steps if len(step.sequences) == 2]
    assert both
    assert not any(step.lot for step in both)
    assert len([step for step in world.steps if step.lot]) >= flown


# The choice


def turn_s(rows: int) -> float:
    """Four machines, a mixture of experts: the issue's gpt-oss-120b on four 4090."""
    return 0.0072 * {1: 1.0, 2: 1.28, 3: 1.55, 4: 1.82}.get(rows, 1 + 0.26 * (rows - 1)) + 0.0028


def slowest_s(rows: int) -> float:
    return (turn_s(rows) - 0.0028) / 4


def test_experts_on_four_stages_fly_faster_than_single_windows() -> None:
    found = best_flight([0.7], period_s=turn_s, slowest_s=slowest_s, draft_s=0.0005)
    assert found is not None
    assert 1.75 < found.rate * turn_s(1) < 2.21, "a first window of its own and half a gap are less than the bound"
    assert found.windows > 3


def test_on_one_stage_nothing_flies() -> None:
    assert best_flight([0.9], period_s=lambda rows: 0.01, slowest_s=lambda rows: 0.01, draft_s=0.0005) is None


@pytest.mark.parametrize(("right", "flies"), [(0.0, False), (0.1, False), (0.7, True), (0.9, True)])
def test_a_flight_must_promise_a_tenth_more_than_single_windows(right: float, flies: bool) -> None:
    drafting, own = Drafting(turn_s, lambda: 0.0005, slowest_s), SequenceDrafts(last_source=MODEL)
    for turn in range(300):
        drafting.note(own, (MODEL,), accepted=int(turn % 10 < 10 * right), beside=ALONE)
    assert (drafting.flight(own, ALONE) is not None) == flies
    assert drafting.flight(own, RowsBeside(rows=1, alone=False)) is None
    assert Drafting(turn_s, lambda: 0.0005).flight(own, ALONE) is None
    own.last_source = DraftSource.LOOKUP
    assert drafting.flight(own, ALONE) is None


def fly(drafting: Drafting, own: SequenceDrafts, turns: int, *, run_s: float) -> list[bool]:
    """Choose so often; a run of three tokens takes ``run_s``. Return whether windows were in flight."""
    now_s, chosen = 0.0, list[bool]()
    for _ in range(turns):
        own.flight = drafting.flight(own, ALONE)
        chosen.append(own.flight is not None)
        if own.flight is None:
            own.run_since_s = None
            drafting.note_single(2, 0.02)
            continue
        now_s += run_s
        own.chain.begin(Drafts((1, 2, 3), (MODEL,) * 3))
        judged = own.chain.took(StepId(1), (1, 2, 4))
        drafting.note_flight(own, judged, tokens=3, now_s=now_s)
    return chosen


def test_flights_that_are_measured_to_be_slow_end_for_longer_and_longer() -> None:
    drafting, own = Drafting(turn_s, lambda: 0.0005, slowest_s), SequenceDrafts(last_source=MODEL)
    drafting.note_single(2, 0.02)
    chosen = fly(drafting, own, 2000, run_s=0.06)
    assert chosen[:8] == [True] * 8
    flown = [place for place, was in enumerate(chosen) if was]
    pauses = [after - before - 1 for before, after in pairwise(flown) if after > before + 1]
    assert pauses == [257, 513, 1025], "the window that ends the flight, and those after it"
    assert len(flown) < 60
    assert 0 < drafting.stats().factor < 1


def test_single_windows_are_measured_anew_now_and_then() -> None:
    drafting, own = Drafting(turn_s, lambda: 0.0005, slowest_s), SequenceDrafts(last_source=MODEL)
    drafting.note_single(2, 0.02)
    chosen = fly(drafting, own, 1000, run_s=0.02)
    assert 0.95 * len(chosen) < sum(chosen) < len(chosen)


def chain_of(*ids: int) -> DraftChain:
    chain = DraftChain()
    chain.begin(Drafts(ids, (MODEL,) * len(ids)))
    return chain


def lot(*ids: int) -> Drafts:
    return Drafts(ids, (MODEL,) * len(ids))


def test_drafts_follow_one_another_behind_the_known_tokens() -> None:
    chain = chain_of(5, 6)
    chain.add(lot(7, 8), position=12, step=StepId(3), known=[0] * 10)
    assert chain.ids == [5, 6, 7, 8]
    chain.sent = 2
    assert chain.took(StepId(4), (5, 6)) == ((MODEL, MODEL), 0, False)
    assert (chain.ids, chain.sent) == ([7, 8], 0)
    assert chain.took(StepId(5), (7, 9)) == ((MODEL, MODEL), 2, True)
    assert chain.ids == []


def test_drafts_of_another_way_are_dropped() -> None:
    chain = chain_of(5, 6)
    chain.took(StepId(4), (5, 9))
    known = [0] * 12
    chain.add(lot(7), position=12, step=StepId(3), known=known)
    assert chain.ids == [], "they were made before step 4 showed that 6 is wrong"
    chain.add(lot(7), position=13, step=StepId(4), known=known)
    assert chain.ids == [], "others are missing before it"
    chain.add(lot(7), position=12, step=StepId(4), known=known)
    assert chain.ids == [7]


def test_drafts_that_come_late_count_as_far_as_they_are_right() -> None:
    chain, known = chain_of(), [*range(12)]
    chain.took(StepId(4), (11,))
    chain.add(lot(10, 11, 20), position=10, step=StepId(3), known=known)
    assert chain.ids == [20]
    chain = chain_of()
    chain.took(StepId(4), (11,))
    chain.add(lot(10, 13, 20), position=10, step=StepId(3), known=known)
    chain.add(lot(21), position=12, step=StepId(3), known=known)
    assert chain.ids == [], "the drafter did not know yet that 13 is wrong"
    chain.add(lot(22), position=12, step=StepId(4), known=known)
    assert chain.ids == [22]


def test_a_flight_wants_drafts_for_all_its_windows() -> None:
    assert Flight(2, 4, 1.0).drafts == 10
