"""Turns: one item of each user after the other, whatever arrives when, and whoever gives up."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import QueueFull
from edgepipe.fair_turns import FairTurns

OWNERS = "abcd"
MAX_WAITING = 3
EVENTS = st.lists(st.one_of(st.sampled_from(OWNERS), st.integers(0, 20)), max_size=120)


class _History:
    """Random arrivals (an owner's letter) and departures (a number picks who), checked after each."""

    def __init__(self, max_running: int) -> None:
        self.turns = FairTurns[int](max_running=max_running, max_waiting=MAX_WAITING)
        self.max_running = max_running
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.owner_of: dict[int, str] = {}
        self.passed: dict[int, Counter[str]] = {}  # items started while one was the first of its owner, by owner

    def arrive(self, owner: str) -> None:
        item = len(self.owner_of)
        line = sum(self.owner_of[each] == owner for each in self.waiting)
        if line == MAX_WAITING:
            with pytest.raises(QueueFull, match="too much work"):
                self.turns.enter(owner, item)
            return
        self.owner_of[item] = owner
        if self.turns.enter(owner, item):
            assert not self.waiting
            self.running.append(item)
        else:
            self.waiting.append(item)

    def depart(self, number: int) -> None:
        present = self.running + self.waiting
        if not present:
            return
        item = present[number % len(present)]
        (self.running if item in self.running else self.waiting).remove(item)
        self.passed.pop(item, None)
        for started in self.turns.leave(item):
            self._start(started)

    def _start(self, item: int) -> None:
        owner = self.owner_of[item]
        assert item == min(each for each in self.waiting if self.owner_of[each] == owner)  # in order of arrival
        first_of = {self.owner_of[each]: each for each in reversed(self.waiting)}
        self.waiting.remove(item)
        self.running.append(item)
        for other, head in first_of.items():
            if other != owner:
                passed = self.passed.setdefault(head, Counter())
                passed[owner] += 1
                assert passed[owner] <= 1, f"{owner} was served twice while {other} waited"

    def check(self) -> None:
        assert len(self.running) <= self.max_running
        assert not self.waiting or len(self.running) == self.max_running  # no place stays empty
        assert self.turns.num_waiting == len(self.waiting)


@given(events=EVENTS, max_running=st.integers(1, 3))
def test_each_other_user_is_served_at_most_once_while_one_waits_and_nothing_is_lost(
    events: list[str | int], max_running: int
) -> None:
    history = _History(max_running)
    for event in events:
        if isinstance(event, str):
            history.arrive(event)
        else:
            history.depart(event)
        history.check()
    while history.running:
        history.depart(0)
        history.check()
    assert not history.waiting


def test_one_user_s_flood_costs_another_one_item() -> None:
    turns = FairTurns[str](max_waiting=100)
    assert turns.enter("flood", "flood-0")
    for number in range(1, 16):
        turns.enter("flood", f"flood-{number}")
    turns.enter("other", "other-0")
    assert turns.leave("flood-0") == ["flood-1"]
    assert turns.leave("flood-1") == ["other-0"]
    assert turns.leave("other-0") == ["flood-2"]


def test_a_refusal_tells_the_bound() -> None:
    turns = FairTurns[int](max_waiting=2)
    for item in range(3):
        turns.enter("a", item)
    with pytest.raises(QueueFull) as caught:
        turns.enter("a", 3)
    assert caught.value.fact == "2 items wait, at most 2 of one user may"
    assert not turns.enter("b", 4)
