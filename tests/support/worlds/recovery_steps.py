"""The recovery core step by step: short names for what engines tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgepipe.engine.blame import Crash
from edgepipe.engine.placing import EpochPlacement, Nodes, ReachableNodes
from edgepipe.engine.recovery import Recovery
from edgepipe.engine.recovery_types import (
    ClusterChanged,
    Command,
    EpochEnded,
    Event,
    Opened,
    Planned,
    Prepare,
    StagesLoaded,
    Tick,
)
from edgepipe.engine.settings import EngineLimits, EngineTimeouts
from edgepipe.engine.sites import StageSite
from edgepipe.errors import EdgepipeError, StepFailed
from edgepipe.ids import EngineId, Epoch, NodeId, RequestId, RequestKey, SequenceId
from edgepipe.spec.facts import LayerRange, make_slices
from edgepipe.testing.clock import START_S
from edgepipe.wire.engines import ServeSpec, StagePlacement

NODES = Nodes(addresses={NodeId(name): f"{name}:1" for name in "abcd"}, names={})
_SLICES = make_slices([LayerRange(0, 2), LayerRange(2, 4)], 4)


def placed(order: str) -> EpochPlacement:
    """A stage on each of two nodes."""
    stages = [
        StagePlacement(node_id=NodeId(node_id), slices=(part,)) for node_id, part in zip(order, _SLICES, strict=True)
    ]
    return EpochPlacement(spec=ServeSpec(model="m", stages=tuple(stages)), nodes=NODES)


def reachable(names: str, *, leaving: str = "") -> ReachableNodes:
    """What the daemon hears."""
    there = {NodeId(name): f"{name}:1" for name in names}
    return ReachableNodes(addresses=there, leaving=frozenset(NodeId(name) for name in leaving))


def site(node: str, index: int) -> StageSite:
    """Where a node's stage is reached."""
    return StageSite(
        index=index,
        node_id=NodeId(node),
        node_name=node,
        address=f"{node}:2",
        slices=(_SLICES[index],),
        backend="",
        device="",
        weight_bytes=0,
        kv_block_bytes=1,
        max_blocks=1,
    )


def crash(node: str, *requests: str, device_failed: bool = False, guilty: bool = False) -> Crash:
    """A step with these requests that a node's stage could not compute."""
    return Crash(
        node_id=NodeId(node),
        sequences=tuple(SequenceId(number) for number, _ in enumerate(requests, start=1)),
        requests=frozenset(RequestKey(NodeId("g"), RequestId(request_id)) for request_id in requests),
        error=StepFailed("a step could not be computed", node=node),
        device_failed=device_failed,
        guilty=guilty,
    )


class Steps:
    """A core, its time, and the commands that it gave last."""

    def __init__(self, wished: EpochPlacement) -> None:
        self.now_s = START_S
        self.commands: Sequence[Command] = []
        self.core = Recovery(
            wished, epoch=Epoch(1, EngineId("e")), engine_node="a", limits=EngineLimits(), timeouts=EngineTimeouts()
        )

    def serve(self) -> Steps:
        """Until the first epoch serves, with all nodes but ``d`` there."""
        [prepare] = self.core.begin(self.now_s)
        self.handle(ClusterChanged(reachable=reachable("abc")))
        [opening] = self.prepared(prepare)
        self.opened(opening)
        return self

    def handle(self, event: Event) -> list[Command]:
        """Let it happen now."""
        self.commands = commands = self.core.handle(event, self.now_s)
        return commands

    def planned(self, ask: Any, plan: EpochPlacement) -> list[Command]:
        """The daemon answers."""
        return self.handle(Planned(attempt=ask.attempt, plan=plan))

    def planned_after_pause(self, ask: Any, plan: EpochPlacement) -> list[Command]:
        """The daemon answers the same until the core uses it."""
        commands = self.planned(ask, plan)
        while not (commands and isinstance(commands[-1], Prepare)):
            assert self.core.wake_at_s is not None
            self.now_s = max(self.now_s, self.core.wake_at_s)
            [ask] = self.handle(Tick())
            commands = self.planned(ask, plan)
        return commands

    def prepared(self, prepare: Any) -> list[Command]:
        """All nodes have loaded."""
        return self.handle(StagesLoaded(attempt=prepare.attempt, sites=()))

    def opened(self, opening: Any) -> list[Command]:
        """All stages are ready."""
        return self.handle(Opened(attempt=opening.attempt))

    def ended(self, error: EdgepipeError, **more: Any) -> list[Command]:
        """The epoch that serves ends."""
        assert self.core.running is not None
        return self.handle(EpochEnded(epoch=self.core.running.epoch, error=error, **more))
