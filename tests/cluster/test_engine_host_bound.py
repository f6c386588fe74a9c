"""Other programs need a machine's memory: the engine's stages keep less in host memory, and every token is right."""

from __future__ import annotations

from typing import Any

import pytest

from edgepipe.stage import host_bound, host_watch
from tests.cluster.test_engine_disk_tier import mostly, users
from tests.support.engine.lab import EngineLab


def leave(lab: EngineLab, stage: int, share: float) -> None:
    """Let other programs leave room for this share of the stage's host memory."""
    held: Any = lab.stages.stages[stage]
    use = held._host._use

    def memory() -> tuple[int, int]:
        whole = use.total_bytes  # so large is the machine's headroom, too
        return max(0, int(share * whole) - use.held_bytes + whole), 10 * whole

    held._backend.machine_memory = memory


@pytest.mark.parametrize("name", ["context", pytest.param("states", marks=pytest.mark.long)])
async def test_idle_blocks_leave_host_memory_and_come_back_with_the_room(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(host_bound, "GROW_S", 0.05)
    async with users(name) as world:
        engine = world.lab.engine
        await world.round()
        await world.round()
        whole = engine.state().host_blocks
        assert engine.state().host_bound_blocks == whole
        assert engine.state().used_host_blocks > whole // 2
        leave(world.lab, 1, 0.5)
        await world.lab.until(lambda: engine.state().host_bound_blocks <= whole // 2)
        state = engine.state()
        assert whole // 3 < state.host_bound_blocks
        assert state.used_host_blocks <= state.host_bound_blocks
        assert state.host_problem.startswith("node1 has ")
        given: Any = world.lab.stages.stages[0]
        await world.lab.until(lambda: given._host._use.held_bytes <= 0.6 * given._host._use.total_bytes)
        await world.round()
        leave(world.lab, 1, 0.0)
        leave(world.lab, 0, 0.3)
        await world.lab.until(lambda: engine.state().host_bound_blocks == 0)
        assert engine.state().used_host_blocks == 0
        await world.round()
        for stage in (0, 1):
            leave(world.lab, stage, 2.0)
        await world.lab.until(lambda: engine.state().host_bound_blocks == whole)
        assert engine.state().host_problem == ""
        await world.round()
        assert mostly(await world.round())
        messages = [each.message for each in caplog.records if each.name == "edgepipe.engine.pump"]
        assert len([each for each in messages if "keep less RAM" in each]) == 1
