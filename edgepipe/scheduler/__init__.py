"""PURE: which tokens of which sequences are computed in which step, and where their KV lives.

No clock, no network, no randomness: the engine drives it against real stages, the planner's simulator against
imagined ones.
"""

from edgepipe.scheduler.blocks import BlockAllocator
from edgepipe.scheduler.policy import EvenPolicy, Load, Policy, StepBudget
from edgepipe.scheduler.scheduler import Scheduler, SchedulerLimits, SchedulerStats
from edgepipe.scheduler.types import EndReason, Event, ScheduledStep, SequenceEnded, SequenceSpec, TokenSampled

__all__ = [
    "BlockAllocator",
    "EndReason",
    "EvenPolicy",
    "Event",
    "Load",
    "Policy",
    "ScheduledStep",
    "Scheduler",
    "SchedulerLimits",
    "SchedulerStats",
    "SequenceEnded",
    "SequenceSpec",
    "StepBudget",
    "TokenSampled",
]
