"""Windows of drafts: the same tokens as without, and only where they pay."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgepipe.backend.drafting import MOST_DRAFTS, Drafts, DraftSource
from edgepipe.scheduler import EndReason, Policy, Scheduler, SchedulerLimits, ThrottledPolicy
from edgepipe.scheduler.drafting import Drafting, RowsBeside, SequenceDrafts
from edgepipe.spec.drafting import draft_way
from tests.support.worlds.scheduler import World, limits, reference, spec, stateful, windowed
from tests.unit.scheduler.test_scheduler_properties import Action, actions, pipelines, play, policies
from tests.unit.scheduler.test_state_properties import pipelines as stateful_pipelines
from tests.unit.scheduler.test_window_properties import pipelines as windowed_pipelines

MODEL = DraftSource.MODEL
ALONE = RowsBeside(rows=1, alone=True)
acceptances = st.sampled_from([0.0, 0.5, 0.9, 1.0])
either = st.one_of(pipelines, windowed_pipelines, stateful_pipelines)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=either, policy=policies, actions=actions, acceptance=acceptances)
def test_windows_change_no_token_whatever_happens(
    pipeline: SchedulerLimits, policy: Policy, actions: list[Action], acceptance: float
) -> None:
    play(pipeline, policy, actions, acceptance=acceptance)


@pytest.mark.long
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipeline=either, policy=policies, actions=actions, acceptance=acceptances)
def test_windows_change_no_token_in_many_more_worlds(
    pipeline: SchedulerLimits, policy: Policy, actions: list[Action], acceptance: float
) -> None:
    play(pipeline, policy, actions, acceptance=acceptance)


def test_right_drafts_take_fewer_steps() -> None:
    steps = dict[float | None, int]()
    for acceptance in (None, 1.0):
        world = World(limits(block_size=16), ThrottledPolicy(), acceptance)
        world.submit(spec(1, 10, max_tokens=80))
        world.run()
        world.check_outputs()
        world.assert_invariants()
        steps[acceptance] = len(world.steps)
    assert steps[1.0] < steps[None] / 2
    assert max(count for count, _ in world.windows_seen) == MOST_DRAFTS


def test_a_stop_id_within_a_window_ends_the_sequence_there() -> None:
    tokens = reference(spec(1, 10, max_tokens=60), context=200)
    stop = next(token for place, token in enumerate(tokens) if place > 20 and token not in tokens[:place])
    world = World(limits(), ThrottledPolicy(), 1.0)
    world.submit(spec(1, 10, max_tokens=60, stop_ids=frozenset({stop})))
    world.run()
    world.check_outputs()
    assert world.ended[spec(1).sequence].reason is EndReason.STOP
    world.assert_invariants()


@pytest.mark.parametrize("pipeline", [limits(num_blocks=256), windowed((12, 8), num_blocks=256)], ids=["all", "window"])
def test_a_second_turn_finds_the_accepted_blocks_and_no_rejected_token(pipeline: SchedulerLimits) -> None:
    world = World(pipeline, ThrottledPolicy(), 0.6)
    world.submit(spec(1, 21, max_tokens=50))
    world.run()
    assert len({right for _, right in world.windows_seen}) > 2, "some drafts are wrong"
    again = [*world.specs[spec(1).sequence].prompt, *world.output[spec(1).sequence], 3, 4]
    world.submit(spec(2, again, max_tokens=20))
    world.run()
    world.check_outputs()
    assert world.ended[spec(2).sequence].cached_prompt_tokens == (len(again) - 3) // 4 * 4
    world.assert_invariants()


def test_a_second_turn_of_recurrent_layers_begins_behind_an_accepted_snapshot() -> None:
    world = World(stateful(num_slots=20, num_blocks=128), ThrottledPolicy(), 0.7)
    world.submit(spec(1, 21, max_tokens=60))
    world.run()
    assert len({right for _, right in world.windows_seen}) > 2
    again = [*world.specs[spec(1).sequence].prompt, *world.output[spec(1).sequence], 3, 4]
    world.submit(spec(2, again, max_tokens=20))
    world.run()
    world.check_outputs()
    assert world.ended[spec(2).sequence].cached_prompt_tokens == 80
    world.assert_invariants()


def test_windows_take_free_slots_only() -> None:
    world = World(stateful(num_slots=3, num_blocks=128), ThrottledPolicy(), 1.0)
    world.submit(spec(1, 10, max_tokens=60))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    assert 0 < max(count for count, _ in world.windows_seen) < 3


def test_windows_are_not_bulk() -> None:
    world = World(limits(num_blocks=128), ThrottledPolicy(), 1.0)
    world.submit(spec(1, 10, max_tokens=80))
    world.run()
    windows = [step for step in world.steps if step.has_windows]
    assert windows
    assert not any(step.is_bulk for step in windows)
    assert [step.is_bulk for step in world.steps[:1]] == [True]


def test_a_row_without_tokens_ends_when_its_sequence_is_cancelled() -> None:
    scheduler = Scheduler(limits(), ThrottledPolicy())
    scheduler.submit([spec(1, 4, max_tokens=9)])
    step = scheduler.next_step()
    assert step is not None
    assert scheduler.retire(step.step, [()]) == []
    assert scheduler.next_step() is None
    (ended,) = scheduler.cancel(spec(1).sequence)
    assert (ended.sequence, scheduler.stats().free_blocks) == (1, limits().num_blocks)


# The choice of windows


def run_turns(
    drafting: Drafting, turns: int, acceptance: Callable[[int], float], period_s: Callable[[int], float], draft_s: float
) -> float:
    """The speed of a lone sequence, over that without drafts. ``acceptance``: by the number of tokens."""
    own, chance, tokens, seconds, asked = SequenceDrafts(), random.Random(3), 0, 0.0, 0
    for _ in range(turns):
        own.next = Drafts((1,) * asked, (MODEL,) * asked)
        drafts = drafting.window(own, ALONE, most=MOST_DRAFTS)
        seconds += period_s(1 + len(drafts.ids)) + asked * draft_s
        asked = drafting.wanted(own, ALONE)
        right = 0
        while right < len(drafts.ids) and chance.random() < acceptance(tokens):
            right += 1
        if drafts.ids:
            drafting.note(own, drafts.sources, accepted=right, beside=ALONE)
        tokens += 1 + right
    return tokens * period_s(1) / seconds


def best_fixed(acceptance: float, period_s: Callable[[int], float], draft_s: float) -> float:
    """The formula's speed with the best fixed number of drafts, over that without."""
    found = []
    for count in range(MOST_DRAFTS + 1):
        tokens = sum(acceptance**place for place in range(count + 1))
        found.append(tokens * period_s(1) / (period_s(1 + count) + count * draft_s))
    return max(found)


def flat(rows: int) -> float:
    return 0.05


def steep(rows: int) -> float:
    """An M3 Ultra with packed weights: 1.8, 3.3 and 6.1 times the time at 2, 4 and 8 rows."""
    return 0.05 * (1 + 0.75 * (rows - 1))


def experts(rows: int) -> float:
    return 0.0055 * {1: 1.0, 2: 1.15, 3: 1.3, 4: 1.45, 5: 1.6, 6: 1.72, 7: 1.85, 8: 1.98}[rows]


@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(("period_s", "draft_s"), [(flat, 0.003), (experts, 0.0005), (flat, 0.0)])
def test_windows_come_near_to_the_best_fixed_size(
    acceptance: float, period_s: Callable[[int], float], draft_s: float
) -> None:
    drafting = Drafting(period_s, lambda: draft_s)
    got = run_turns(drafting, 3000, lambda _: acceptance, period_s, draft_s)
    assert got >= 0.94 * best_fixed(acceptance, period_s, draft_s)


@pytest.mark.parametrize(
    ("acceptance", "period_s", "draft_s"), [(0.5, steep, 0.0), (0.1, flat, 0.003), (0.1, experts, 0.0005)]
)
def test_drafts_that_do_not_pay_cost_little(
    acceptance: float, period_s: Callable[[int], float], draft_s: float
) -> None:
    drafting = Drafting(period_s, lambda: draft_s)
    assert run_turns(drafting, 3000, lambda _: acceptance, period_s, draft_s) >= 0.98


def test_a_text_whose_drafts_get_worse_and_better_again() -> None:
    drafting = Drafting(flat, lambda: 0.003)
    got = run_turns(drafting, 3000, lambda tokens: 0.8 if tokens // 500 % 2 == 0 else 0.1, flat, 0.003)
    fixed = max(
        2 / (1 / _fixed(0.8, count) + 1 / _fixed(0.1, count)) for count in range(MOST_DRAFTS + 1)
    )  # as many tokens of each
    assert got >= 0.95 * fixed


def _fixed(acceptance: float, count: int) -> float:
    tokens = sum(acceptance**place for place in range(count + 1))
    return tokens * flat(1) / (flat(1 + count) + count * 0.003)


def test_no_window_lengthens_the_tokens_of_others_by_more_than_a_little() -> None:
    drafting = Drafting(experts, lambda: 0.0)
    own = SequenceDrafts(next=Drafts((1, 2, 3), (DraftSource.GRAMMAR,) * 3))
    others = RowsBeside(rows=1, alone=False)
    assert drafting.wanted(own, others) == 0
    assert drafting.window(own, others, most=3) == Drafts()


def test_all_drafts_and_windows_of_a_step_together_lengthen_the_tokens_of_others_by_a_little() -> None:
    """A step's tokens wait for all of its drafts, and for the rows of all windows."""
    draft_s, chats = 0.0002, 16

    def period_s(rows: int) -> float:
        return 0.03 + 0.0001 * rows

    drafting, beside = Drafting(period_s, lambda: draft_s), RowsBeside(rows=chats, alone=False)
    for chat in range(chats):
        own = SequenceDrafts(next=Drafts((1, 2, 3), (DraftSource.GRAMMAR,) * 3) if chat < 4 else Drafts())
        count = len(drafting.window(own, beside, most=3).ids)
        beside = beside.with_window(count, wanted=drafting.wanted(own, beside))
    longer_s = period_s(chats + beside.more) + beside.drafts * draft_s
    assert beside.more + beside.drafts > 0
    assert longer_s <= 1.03 * period_s(chats)


def test_drafts_that_a_step_makes_anyway_are_no_reason_against_one_that_is_rarely_right() -> None:
    draft_s = 0.001
    windows = list[int]()
    for made in (0, 20):
        drafting, own = Drafting(lambda rows: 1.0, lambda: draft_s), SequenceDrafts(pause=1000)
        beside = RowsBeside(rows=10, alone=False, drafts=made)
        for _ in range(40):
            drafting.note(own, [MODEL], accepted=0, beside=beside)
        own.next = Drafts((7,), (MODEL,))
        windows.append(len(drafting.window(own, beside, most=1).ids))
    assert windows == [1, 1]


def test_drafts_that_took_too_long_are_measured_again() -> None:
    """The times of a busy device must not end drafts for ever."""
    draft_s = 0.2
    drafting, own = Drafting(flat, lambda: draft_s), SequenceDrafts()
    wanted = [drafting.wanted(own, ALONE) for _ in range(1000)]
    assert 4 <= sum(wanted) <= 12
    assert max(wanted) == 1
    draft_s = 0.003
    assert drafting.wanted(own, ALONE) > 1


def test_nothing_is_tried_before_the_times_are_known() -> None:
    drafting = Drafting(lambda rows: 0.0, lambda: 0.0)
    own = SequenceDrafts(next=Drafts((1,), (MODEL,)))
    assert drafting.window(own, ALONE, most=3) == Drafts()
    assert drafting.wanted(own, ALONE) == MOST_DRAFTS
    others = RowsBeside(rows=8, alone=False)
    assert drafting.may_pay(others)
    assert drafting.wanted(own, others) == 1, "one measures what drafts take"
    assert drafting.wanted(own, others.with_window(0, wanted=1)) == 0, "more would only delay the others"


def test_in_a_filled_ring_no_sequence_is_asked_until_it_empties() -> None:
    """A draft of 0.5 ms lengthens steps of 8 rows by more than 3 %, whatever its probability."""
    asked: list[SequenceDrafts] = []

    class Counted(Drafting):
        def wanted(self, own: SequenceDrafts, beside: RowsBeside) -> int:
            asked.append(own)
            return super().wanted(own, beside)

    world = World(limits(num_blocks=512, micro_batches=1), ThrottledPolicy(), 1.0)
    world.scheduler.set_drafting(Counted(lambda rows: 0.010 + 0.0005 * rows, lambda: 0.0005))
    for chat in range(1, 9):
        world.submit(spec(chat, 10, max_tokens=20 if chat > 1 else 60))
    world.run()
    world.check_outputs()
    world.assert_invariants()
    full = [step for step in world.steps if len(step.sequences) == 8 and not step.is_bulk]
    assert full
    assert not any(step.drafts or step.has_windows for step in full)
    assert len({id(own) for own in asked}) <= 2, "the first while it is alone, and the one that stays"
    assert any(step.has_windows for step in world.steps if len(step.sequences) == 1), "alone again, it is drafted for"


@pytest.mark.parametrize(
    ("text", "way"),
    [("", "auto"), ("auto", "auto"), ("mtp", "mtp"), ("off", "off"), ("MTP", "model"), ("llama-3.2-1b", "model")],
)
def test_what_names_no_way_names_a_model(text: str, way: str) -> None:
    assert draft_way(text) == way
