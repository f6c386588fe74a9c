"""PURE: decides which step computes which tokens, and which blocks hold their KV.

No clock, no network, no randomness. The engine drives it against real stages, the simulator against modelled stages.
"""

from edgepipe.scheduler.blocks import BlockAllocator
from edgepipe.scheduler.disk_works import DiskWork
from edgepipe.scheduler.held_places import HeldTiers, StageHolds, Takeover, takeover
from edgepipe.scheduler.host_tier import GivenBack, Tier
from edgepipe.scheduler.kept_pools import KeptPools
from edgepipe.scheduler.kv import KVPool
from edgepipe.scheduler.limits import HostRates, SchedulerLimits, SchedulerStats
from edgepipe.scheduler.place_keys import PlaceKey
from edgepipe.scheduler.policy import (
    POLICIES,
    Load,
    Policy,
    SarathiPolicy,
    StepBudget,
    ThrottledPolicy,
    make_policy,
)
from edgepipe.scheduler.scheduler import Scheduler
from edgepipe.scheduler.types import (
    EndReason,
    Event,
    Priority,
    ScheduledStep,
    SequenceEnded,
    SequenceSpec,
    TokenSampled,
    WindowBlocks,
)

__all__ = [
    "POLICIES",
    "BlockAllocator",
    "DiskWork",
    "EndReason",
    "Event",
    "GivenBack",
    "HeldTiers",
    "HostRates",
    "KVPool",
    "KeptPools",
    "Load",
    "PlaceKey",
    "Policy",
    "Priority",
    "SarathiPolicy",
    "ScheduledStep",
    "Scheduler",
    "SchedulerLimits",
    "SchedulerStats",
    "SequenceEnded",
    "SequenceSpec",
    "StageHolds",
    "StepBudget",
    "Takeover",
    "ThrottledPolicy",
    "Tier",
    "TokenSampled",
    "WindowBlocks",
    "make_policy",
    "takeover",
]
