"""Random histories against the recovery core: whatever fails, and however often, all is well again once faults end."""

from __future__ import annotations

import pytest

from tests.support.worlds.recovery import World


def live(seeds: range) -> None:
    epochs = refusals = crashes = strikes = stalled = 0
    for seed in seeds:
        world = World(seed)
        world.run()
        epochs, refusals, crashes = epochs + world.epochs, refusals + world.refusals, crashes + world.crashes
        strikes, stalled = strikes + world.strikes, stalled + world.stalled
    assert epochs > 2 * len(seeds), "histories have many epochs"
    assert min(refusals, crashes, strikes) > len(seeds) / 4, "and faults of every kind"
    assert stalled > len(seeds) / 40, "and requests that end stages"


def test_after_any_history_of_faults_tokens_flow_and_memory_is_given_back() -> None:
    live(range(600))


@pytest.mark.long
def test_after_any_history_of_faults_tokens_flow_with_many_more_seeds() -> None:
    live(range(40_000))
