"""Drives the scheduler against the stages: steps in flight, their retirement, and the requests of all gateways."""

from edgepipe.engine.engine import Engine
from edgepipe.engine.placing import EpochPlacement, Nodes, Planner, ReachableNodes
from edgepipe.engine.settings import EngineLimits, EngineTimeouts

__all__ = ["Engine", "EngineLimits", "EngineTimeouts", "EpochPlacement", "Nodes", "Planner", "ReachableNodes"]
