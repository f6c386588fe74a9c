"""Trust in any history: interleavings, partitions, turned machines. The rules are in ``trust_world``."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edgepipe.cluster import standing
from edgepipe.cluster.statements import Statement
from edgepipe.ids import NodeId
from edgepipe.security.trust_view import Role
from tests.support.cluster.trust_world import EVERYBODY, HONEST, TURNED, TrustWorld, play

ROLES = st.sampled_from(tuple(Role))


class TrustMachine(RuleBasedStateMachine):
    """Every rule is open to whoever could do it; the invariants hold after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.world = TrustWorld()

    @rule(by=st.sampled_from(HONEST), about=st.sampled_from(EVERYBODY), role=ROLES)
    def add(self, by: standing.NodeId, about: standing.NodeId, role: Role) -> None:
        self.world.add(by, about, role)

    @rule(by=st.sampled_from(HONEST), about=st.sampled_from(EVERYBODY), keep_added=st.booleans())
    def remove(self, by: standing.NodeId, about: standing.NodeId, *, keep_added: bool) -> None:
        self.world.remove(by, about, keep_added=keep_added)

    @rule(teller=st.sampled_from(HONEST), other=st.sampled_from(HONEST))
    def tell(self, teller: standing.NodeId, other: standing.NodeId) -> None:
        self.world.tell(teller, other)

    @rule(
        by=st.sampled_from(TURNED),
        about=st.sampled_from(EVERYBODY),
        role=st.none() | ROLES,
        number=st.sampled_from((0, 1, 2, 99)),
        kept=st.lists(st.integers(0, 50), max_size=6),
        to=st.sets(st.sampled_from(HONEST)),
    )
    def lie(
        self,
        by: standing.NodeId,
        about: standing.NodeId,
        role: Role | None,
        number: int,
        kept: list[int],
        to: set[standing.NodeId],
    ) -> None:
        self.world.lie(by, about, role, number=number, kept=kept, to=sorted(to))

    @invariant()
    def holds(self) -> None:
        self.world.check(random.Random(0))


TestTrustMachine = TrustMachine.TestCase
TestTrustMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def _play_all(count: int, *, seed: int) -> None:
    for number in range(count):
        rng = random.Random(f"{seed}-{number}")
        play(rng, steps=rng.randint(4, 20)).check(rng)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_no_history_gives_a_removed_machine_a_say(seed: int) -> None:
    _play_all(2500, seed=seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 18))
def test_no_history_of_very_many_does(seed: int) -> None:
    _play_all(10_000, seed=seed)


def test_these_histories_find_what_the_bounds_prevent(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1: removals that bound nothing let a removed owner say what it likes."""
    hearing = standing._Hearing  # pyright: ignore[reportPrivateUsage]
    hear = hearing.hear

    def hear_unbounded(self: Any, owner: NodeId, said: Iterable[Statement]) -> None:  # the fault to find
        removals = self._removals.pop(owner, [])
        hear(self, owner, said)
        self._removals[owner] = removals

    monkeypatch.setattr(hearing, "hear", hear_unbounded)
    with pytest.raises(AssertionError):
        _play_all(2500, seed=0)
