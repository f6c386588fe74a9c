"""Drives the scheduler against the stages: the in-flight window, retirement, and the requests of all gateways."""

from edgepipe.engine.engine import Engine
from edgepipe.engine.planning import Nodes, Plan, Planner, Reachable
from edgepipe.engine.settings import EngineLimits, EngineTimeouts

__all__ = ["Engine", "EngineLimits", "EngineTimeouts", "Nodes", "Plan", "Planner", "Reachable"]
