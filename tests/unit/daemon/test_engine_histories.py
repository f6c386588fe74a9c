"""Random histories against the cores of engines' lives: whatever fails, one node runs the engine once faults end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.worlds.engine import World


def live(seeds: range, folder: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed, folder)
        world.run()
        counts.update(world.counts)
    for what in ("served", "losses", "crashes", "StartEngine", "AskMembers"):
        assert counts[what] > len(seeds) / 2, f"histories have hardly any: {what} {counts}"
    for what in ("EndSuperseded", "StopEngine", "HandOn", "handed on", "replicas", "more", "fewer"):
        assert counts[what] > len(seeds) / 100, f"histories have hardly any: {what} {counts}"
    assert counts["Yield"], "and two sides of a partition"


def test_after_any_history_one_node_runs_each_served_engine(tmp_path: Path) -> None:
    live(range(100), tmp_path)


@pytest.mark.long
def test_after_any_history_one_node_runs_each_served_engine_with_many_more_seeds(tmp_path: Path) -> None:
    live(range(10_000), tmp_path)
