"""The checker must catch what it is there for: every kind of damage, seeded into a right history."""

from __future__ import annotations

import random

import pytest

from tests.support.faults.history import (
    Answer,
    Asked,
    Counted,
    Ended,
    Event,
    Given,
    History,
    Struck,
    assert_holds,
    check,
)

IDS = tuple(random.Random(1).sample(range(10_000), 40))
EXPECTED = {"s1": Answer(ids=(IDS,), texts=("".join(map(str, IDS)),), reasons=("length",), prompt_tokens=3)}


def given(at_s: float, *ids: int, text: str | None = None, reason: str | None = None) -> Given:
    shown = "".join(map(str, ids)) if text is None else text
    return Given(at_s=at_s, stream="s1", choice=0, ids=ids, text=shown, finish_reason=reason)


def right(seed: int = 7) -> History:
    """A stream that pauses for 2 s at position 20 because a stage was killed, and goes on."""
    history = History(seed=seed)
    history.add(Asked(at_s=0.0, stream="s1", body={"max_tokens": 40}))
    for place, token in enumerate(IDS):
        if place == 20:
            history.add(Struck(at_s=0.2, what="kill stage on b"))
        history.add(given(place / 100 + (2.0 if place >= 20 else 0.0), token))
    history.add(given(2.5, reason="length"))
    history.add(Counted(at_s=2.5, stream="s1", prompt_tokens=3, completion_tokens=40))
    history.add(Ended(at_s=2.5, stream="s1", how="done"))
    return history


def rules(history: History, **more: object) -> list[str]:
    settings: dict[str, object] = {"expected": EXPECTED, "most_pause_s": 5.0, **more}
    return [violation.rule for violation in check(history, **settings)]  # pyright: ignore[reportArgumentType]


def changed(place: int, *events: Event) -> History:
    """The right history with the event of that token replaced."""
    history = right()
    index = [i for i, event in enumerate(history.events) if isinstance(event, Given)][place]
    history.events[index : index + 1] = events
    return history


def test_a_pause_breaks_no_rule() -> None:
    assert rules(right()) == []
    stall_s = right().stall_s("s1", since_s=0.2)
    assert stall_s is not None
    assert 2.0 < stall_s < 2.1
    assert right().stall_s("s1", since_s=9.0) is None


@pytest.mark.parametrize("place", random.Random(3).sample(range(1, 39), 6))
def test_every_kind_of_damage_is_named(place: int) -> None:
    at_s = 3.0
    assert rules(changed(place, given(at_s, IDS[place]), given(at_s, IDS[place])))[:2] == ["I7", "I1"]
    assert rules(changed(place))[:2] == ["I7", "I3" if place == 38 else "I2"]
    assert rules(changed(place, given(at_s, 10_001))) == ["I3"]
    assert rules(changed(place, given(at_s, IDS[place], text="?"))) == ["I7"]


def test_endings_are_counted() -> None:
    assert rules(changed(39, given(2.4, IDS[39]), given(2.4, reason="stop"))) == ["I8", "I7"]
    twice = right()
    twice.add(Ended(at_s=2.6, stream="s1", how="error", what="stage_lost"))
    assert rules(twice) == ["I8"]
    late = right()
    late.add(given(2.6, 1))
    assert "I8" in rules(late)
    hung = right()
    del hung.events[-3:]
    assert rules(hung) == ["I10"]
    assert rules(hung, under_way=["s1"]) == []
    hung.add(Ended(at_s=2.6, stream="s1", how="error", what="stage_lost"))
    assert "I8" in rules(hung, under_way=["s1"])
    assert rules(right(), most_pause_s=1.0) == ["I10"]


def test_an_error_is_an_ending_where_it_is_allowed_and_what_was_sent_must_still_be_right() -> None:
    def failed(*, token: int) -> History:
        history = History()
        history.add(Asked(at_s=0.0, stream="s1", body={}))
        history.add(given(0.1, IDS[0], token))
        history.add(Ended(at_s=0.2, stream="s1", how="error", what="no_feasible_placement"))
        return history

    assert rules(failed(token=IDS[1])) == ["I8"]
    assert rules(failed(token=IDS[1]), allowed_errors=["no_feasible_placement"]) == []
    assert rules(failed(token=5), allowed_errors=["no_feasible_placement"]) == ["I3"]


def test_usage_is_held_against_the_tokens() -> None:
    history = right()
    history.events[-2] = Counted(at_s=2.5, stream="s1", prompt_tokens=4, completion_tokens=41)
    assert rules(history) == ["I7", "I7"]


def test_a_story_has_the_seed_the_fault_and_little_else() -> None:
    history = changed(25, given(2.25, 10_001))
    (violation,) = check(history, expected=EXPECTED, most_pause_s=5.0)
    story = violation.story(history)
    assert "seed 7" in story
    assert "FAULT kill stage on b" in story
    assert "[10001]" in story
    assert len(story.splitlines()) < 10
    with pytest.raises(AssertionError, match="I3 broken by s1"):
        assert_holds(history, [violation])
