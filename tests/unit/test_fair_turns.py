"""Turns: one item of each user in a round, whatever arrives when, and whoever gives up."""

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

    def __init__(self, max_running: int, max_of_owner: int) -> None:
        self.turns = FairTurns[int](max_running=max_running, max_of_owner=max_of_owner, max_waiting=MAX_WAITING)
        self.max_running = max_running
        self.max_of_owner = max_of_owner
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.owner_of: dict[int, str] = {}
        self.passed: dict[int, Counter[str]] = {}  # items started while one was the first of its owner, by owner
        self.newcomers: dict[int, set[str]] = {}  # first items of an owner, with the owners that ran at their arrival

    def arrive(self, owner: str) -> None:
        item = len(self.owner_of)
        line = sum(self.owner_of[each] == owner for each in self.waiting)
        if line == MAX_WAITING:
            with pytest.raises(QueueFull, match="too much work"):
                self.turns.enter(owner, item)
            return
        is_new = owner not in self.owner_of.values()
        self.owner_of[item] = owner
        if self.turns.enter(owner, item):
            assert not self._startable()
            self.running.append(item)
            return
        self.waiting.append(item)
        if is_new:
            self.newcomers[item] = {self.owner_of[each] for each in self.running}

    def depart(self, number: int) -> None:
        present = self.running + self.waiting
        if not present:
            return
        item = present[number % len(present)]
        (self.running if item in self.running else self.waiting).remove(item)
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
                assert passed[owner] <= 2, f"{owner} was served again and again while {other} waited"
                assert head not in self.newcomers or passed[owner] == 1, f"{owner} was served twice before {other}"
                if self.max_running == 1:
                    assert owner not in self.newcomers.get(head, ()), f"{owner} ran, and again before {other}"

    def _startable(self) -> list[int]:
        """Waiting items whose owner may have one more running."""
        running = Counter(self.owner_of[each] for each in self.running)
        return [each for each in self.waiting if running[self.owner_of[each]] < self.max_of_owner]

    def check(self) -> None:
        assert len(self.running) <= self.max_running
        assert max(Counter(self.owner_of[each] for each in self.running).values(), default=0) <= self.max_of_owner
        assert not self._startable() or len(self.running) == self.max_running  # no place stays empty
        assert self.turns.num_waiting == len(self.waiting)


@given(events=EVENTS, max_running=st.integers(1, 3), max_of_owner=st.integers(1, 3))
def test_no_user_is_served_twice_before_a_newcomer_and_nothing_is_lost(
    events: list[str | int], max_running: int, max_of_owner: int
) -> None:
    history = _History(max_running, min(max_of_owner, max_running))
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


def test_one_user_s_flood_costs_others_the_item_that_runs() -> None:
    turns = FairTurns[str](max_waiting=100)
    assert turns.enter("flood", "flood-0")
    for number in range(1, 16):
        turns.enter("flood", f"flood-{number}")
    turns.enter("b", "b-0")
    turns.enter("c", "c-0")
    turns.enter("b", "b-1")
    assert turns.leave("flood-0") == ["b-0"]
    assert turns.leave("b-0") == ["c-0"]
    assert turns.leave("c-0") == ["flood-1"]
    assert turns.leave("flood-1") == ["b-1"]
    assert turns.leave("b-1") == ["flood-2"]


def test_beside_one_user_s_flood_another_s_item_waits_for_none() -> None:
    turns = FairTurns[str](max_running=2, max_of_owner=1, max_waiting=100)
    assert [turns.enter("flood", f"flood-{number}") for number in range(3)] == [True, False, False]
    assert turns.enter("b", "b-0")
    assert not turns.enter("c", "c-0")
    assert turns.leave("flood-0") == ["c-0"]
    assert turns.leave("b-0") == ["flood-1"]


def test_users_that_come_again_and_again_do_not_keep_a_flood_from_its_turns() -> None:
    turns = FairTurns[str](max_waiting=100)
    running = "flood-0"
    turns.enter("flood", running)
    for number in range(1, 20):
        turns.enter("flood", f"flood-{number}")
    order: list[str] = []
    for number in range(30):
        turns.enter("bc"[number % 2], f"{'bc'[number % 2]}-{number}")
        (running,) = turns.leave(running)
        order.append(running.partition("-")[0])
    assert order.count("flood") >= 10


def test_a_refusal_tells_the_bound() -> None:
    turns = FairTurns[int](max_waiting=2)
    for item in range(3):
        turns.enter("a", item)
    with pytest.raises(QueueFull) as caught:
        turns.enter("a", 3)
    assert caught.value.fact == "2 items wait, at most 2 of one user may"
    assert not turns.enter("b", 4)
