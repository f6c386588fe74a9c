"""Hundreds of schedules of the control plane in virtual time, and proof that the simulator sees what is broken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from edgepipe.engine.kv_carryover import KeptKV
from edgepipe.scheduler import ScheduledStep
from edgepipe.scheduler.kept_pools import KeptPools
from edgepipe.scheduler.states import StateClass
from tests.support.cluster.member_simulation import MemberSimulation
from tests.support.engine.simulated_stage import SimulatedStage
from tests.support.engine.simulated_wires import Message
from tests.support.engine.simulation import Simulation, simulate

SCHEDULES = 500  # well under 20 s
LONG_SCHEDULES = 40_000
LONG_PARTS = 6


async def test_no_schedule_loses_doubles_or_changes_a_token() -> None:
    totals = await simulate(range(SCHEDULES))
    assert totals.schedules == SCHEDULES
    counts = (totals.recoveries, totals.engines, totals.resumed, totals.fenced, totals.kept, totals.replayed)
    assert min(*counts, totals.replayed_states) > 30, totals


@pytest.mark.long
@pytest.mark.parametrize("part", range(LONG_PARTS))
async def test_no_schedule_of_many_either(part: int) -> None:
    size = (LONG_SCHEDULES - SCHEDULES) // LONG_PARTS
    first = SCHEDULES + part * size
    assert (await simulate(range(first, first + size))).schedules == size


class Unfenced(Simulation):
    """Stages take whatever comes, of any epoch."""

    def _take(self, message: Message) -> None:
        if message.stage < self._num_stages:
            self._stages[message.stage].inputs[message.step] = list(message.values)
        else:
            super()._take(message)


class Forgetful(SimulatedStage):
    """A stage that leaves copies out."""

    def compute(self) -> tuple[ScheduledStep, list[int]]:
        self.plans[0] = self.plans[0]._replace(copies=())
        return super().compute()


def run_many(kind: Callable[[int], Simulation], *, first: int = 0) -> None:
    """``first``: a seed shortly before one that shows the fault, as long as schedules are drawn as they are."""
    for seed in range(first, first + 1000):
        kind(seed).run()


async def test_a_stage_without_epochs_is_found_out() -> None:
    with pytest.raises(AssertionError, match="seed"):
        run_many(Unfenced)


async def test_a_stage_that_leaves_copies_out_is_found_out() -> None:
    with pytest.raises(AssertionError, match="instead of"):
        run_many(partial(Simulation, stage=Forgetful))


async def test_an_engine_that_takes_lost_kv_for_kept_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptKV, "lost_by", lambda *_: [])  # the fault to find
    with pytest.raises(AssertionError, match="instead of"):
        run_many(Simulation)


async def test_an_engine_that_forgets_an_earlier_loss_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lose = KeptPools.lose

    def lose_only(pools: KeptPools, last_slice: int) -> None:
        pools.context.stale_to = None
        lose(pools, last_slice)

    monkeypatch.setattr(KeptPools, "lose", lose_only)  # the fault to find
    with pytest.raises(AssertionError, match="instead of"):
        run_many(Simulation, first=210)


async def test_an_engine_that_takes_lost_states_for_kept_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateClass, "lose", lambda _: None)  # the fault to find
    with pytest.raises(AssertionError, match="instead of"):
        run_many(Simulation, first=420)


@pytest.mark.parametrize("part", range(2))
def test_every_death_is_seen_and_nobody_is_buried_alive(part: int) -> None:
    for seed in range(part * 30, (part + 1) * 30):
        MemberSimulation(seed).run()


@pytest.mark.long
def test_nobody_is_buried_alive_in_many_schedules() -> None:
    for seed in range(60, 2_000):
        MemberSimulation(seed).run()
