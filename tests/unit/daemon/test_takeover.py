"""Which node takes an engine over: in random worlds of honest and lying members, broken links and dead nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.daemon.serving.takeover import (
    BELIEVED_S,
    DUTY_S,
    IDLE_S,
    LIMIT_S,
    VETO_S,
    MemberReport,
    Vacancies,
)
from edgepipe.testing.clock import START_S

P = "p"
HEARS, PROVES, SILENT, DRAINS = (
    MemberReport(hears=True),
    MemberReport(hears=True, proven=True),
    MemberReport(),
    MemberReport(draining=True),
)
NOTICE_S = 6.0  # the longest dead limit
SPREAD_S = 1.0  # until the others know a record


def first_turn(own: str, answers: dict[str, MemberReport], *, gone: bool = True, most_s: float = 300.0) -> float | None:
    """When this node takes the engine of "head" over, by a look a second; None: not in that time."""
    vacancies = Vacancies()
    for second in range(int(most_s)):
        now_s = START_S + second
        vacancies.look(P, "head", has_engine=False, gone=gone, now_s=now_s)
        if vacancies.must_ask(P, now_s=now_s) and vacancies.is_turn(P, own, answers, now_s=now_s):
            return float(second)
    return None


@pytest.mark.parametrize(
    ("answers", "after_s"),
    [
        ({}, 0.0),
        ({"c": SILENT}, 0.0),
        ({"a": SILENT}, DUTY_S),  # the smallest id does nothing
        ({"a": DRAINS}, 0.0),
        ({"a": SILENT, "aa": SILENT}, 2 * DUTY_S),
        ({"c": HEARS}, VETO_S),  # it cannot prove that the head is up
        ({"a": HEARS, "c": SILENT}, VETO_S),
        ({"a": SILENT, "c": HEARS}, VETO_S + DUTY_S),
        ({"c": PROVES}, None),  # only this node's link is broken
        ({"c": PROVES, "d": SILENT}, LIMIT_S),  # most members have lost it
        ({"c": PROVES, "d": PROVES, "e": SILENT}, None),
    ],
)
def test_when_a_node_takes_the_engine_of_a_lost_node_over(
    answers: dict[str, MemberReport], after_s: float | None
) -> None:
    assert first_turn("b", answers) == after_s


def test_a_node_that_is_heard_and_runs_no_engine_loses_it_after_a_while() -> None:
    heard = {"a": HEARS, "head": HEARS}
    assert first_turn("b", {"head": HEARS}, gone=False) == IDLE_S
    assert first_turn("b", heard, gone=False) == IDLE_S + DUTY_S
    assert first_turn("b", {"c": HEARS}, gone=False) == IDLE_S


def test_a_successor_is_believed_before_others_would_act_themselves() -> None:
    vacancies = Vacancies()
    vacancies.look(P, "head", has_engine=False, gone=False, now_s=START_S)
    assert not vacancies.has_long_lacked(P, "head", now_s=START_S + BELIEVED_S - 1)
    assert vacancies.has_long_lacked(P, "head", now_s=START_S + BELIEVED_S)
    assert not vacancies.has_long_lacked(P, "other", now_s=START_S + BELIEVED_S)
    vacancies.look(P, "head", has_engine=True, gone=False, now_s=START_S + BELIEVED_S)
    assert not vacancies.has_long_lacked(P, "head", now_s=START_S + BELIEVED_S)
    vacancies.look(P, "head", has_engine=False, gone=False, now_s=START_S + BELIEVED_S)
    vacancies.keep(frozenset())
    assert not vacancies.has_long_lacked(P, "head", now_s=START_S + 10 * BELIEVED_S)


def test_after_one_lost_proof_the_next_one_still_counts() -> None:
    """A broken link for an hour: one answer of the engine's node came too late."""
    vacancies = Vacancies()
    for second in range(3600):
        now_s = START_S + second
        vacancies.look(P, "head", has_engine=False, gone=True, now_s=now_s)
        answer = HEARS if second % 300 in (200, 201, 202) else PROVES
        assert not vacancies.is_turn(P, "b", {"c": answer}, now_s=now_s)


@dataclass
class World:
    """Members that look once a second. Rogues say anything and do nothing; they cannot sign for the head."""

    random: Random
    honest: list[str]
    rogues: list[str]
    head_hears: set[str]  # honest members whose link to the head works; empty: it is dead, or silent
    head_flaps: bool = False  # a rogue head without an engine that comes and goes
    notices_s: dict[str, float] = field(default_factory=dict[str, float])
    taken: dict[str, float] = field(default_factory=dict[str, float])  # seconds until it took over, by honest node

    def run(self, most_s: int) -> None:
        """Let time pass until a record has spread."""
        books = {name: Vacancies() for name in self.honest}
        for second in range(most_s):
            now_s = START_S + second
            if self.taken and second >= min(self.taken.values()) + SPREAD_S:
                return
            for name in self.honest:
                if name not in self.taken:
                    self._look(name, books[name], now_s)

    def _hears(self, name: str, now_s: float) -> bool:
        if self.head_flaps:
            return int(now_s / self.notices_s[name]) % 2 == 0
        return name in self.head_hears or now_s < START_S + self.notices_s[name]

    def _look(self, name: str, vacancies: Vacancies, now_s: float) -> None:
        gone = not self._hears(name, now_s)
        has_engine = not gone and not self.head_flaps
        vacancies.look(P, "head", has_engine=has_engine, gone=gone, now_s=now_s)
        if vacancies.must_ask(P, now_s=now_s):
            answers = {other: self._answer(other, now_s) for other in (*self.honest, *self.rogues) if other != name}
            if vacancies.is_turn(P, name, answers, now_s=now_s):
                self.taken[name] = now_s - START_S

    def _answer(self, name: str, now_s: float) -> MemberReport:
        if name in self.rogues:
            return self.random.choice((HEARS, SILENT, DRAINS))
        hears = self._hears(name, now_s)
        return MemberReport(hears=hears, proven=hears and name in self.head_hears)


NAMES = st.lists(st.sampled_from([f"{first}{second}" for first in "abcd" for second in "wxyz"]), unique=True)


def world(names: list[str], num_rogues: int, seed: int) -> World:
    random = Random(seed)
    random.shuffle(names)
    rogues, honest = names[:num_rogues], names[num_rogues:]
    made = World(random=random, honest=honest, rogues=rogues, head_hears=set())
    made.notices_s = {name: random.uniform(0.5, NOTICE_S) for name in honest}
    return made


@settings(max_examples=300, deadline=None)
@given(names=NAMES.filter(lambda names: 1 <= len(names) <= 8), rogues=st.integers(0, 7), seed=st.integers(0, 1 << 32))
def test_after_a_loss_an_honest_node_takes_over_whatever_the_others_say(
    names: list[str], rogues: int, seed: int
) -> None:
    """Rogues that tell each node something else can make two act at once: the serve book settles that."""
    made = world(names, min(rogues, len(names) - 1), seed)
    limit_s = NOTICE_S + VETO_S + DUTY_S * len(made.rogues) + DUTY_S
    made.run(int(limit_s) + 2)
    assert len(made.taken) == 1 or (made.taken and made.rogues), made
    assert min(made.taken.values()) <= limit_s


@settings(max_examples=200, deadline=None)
@given(names=NAMES.filter(lambda names: 1 <= len(names) <= 8), rogues=st.integers(0, 7), seed=st.integers(0, 1 << 32))
def test_a_node_that_takes_an_engine_and_then_comes_and_goes_loses_it(names: list[str], rogues: int, seed: int) -> None:
    made = world(names, min(rogues, len(names) - 1), seed)
    made.head_flaps = True
    limit_s = LIMIT_S + DUTY_S * len(names)
    made.run(int(limit_s) + 2)
    assert made.taken
    assert min(made.taken.values()) <= limit_s


@settings(max_examples=200, deadline=None)
@given(names=NAMES.filter(lambda names: 2 <= len(names) <= 8), seed=st.integers(0, 1 << 32), rogues=st.integers(0, 3))
def test_broken_links_to_a_node_that_half_of_the_members_hear_make_no_second_engine(
    names: list[str], seed: int, rogues: int
) -> None:
    made = world(names, min(rogues, len(names) // 2), seed)
    hearing = made.random.randint((len(names) + 1) // 2, len(made.honest))
    made.head_hears = set(made.honest[:hearing])
    made.run(400)
    assert not made.taken, made
