"""What a new engine takes over of the blocks and snapshots that its stages hold, on the device and below it.

A block is there only if all stages have their layers' part of it in the same place. So the tables of a new
engine begin with those keys that all stages name for the same place. All other places are free.

Stages that hold nothing are new processes, or have other layers than before. As after any loss, what the stages behind
the last of them hold is *stale*: sequences replay its tokens through the slices up to that one. If that is the last
slice, nothing can be taken over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edgepipe.scheduler.kv import Key

Held = Mapping[Key, int]
"""Places of one memory class in one tier by key, the longest unused first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTiers:
    """What a stage holds, by memory class (``TierMove.number``)."""

    device: tuple[Held, ...]
    host: tuple[Held, ...] = ()
    disk: tuple[Held, ...] = ()

    def __bool__(self) -> bool:
        return any(self.device) or any(self.host) or any(self.disk)


class StageHolds(NamedTuple):
    """One stage's report."""

    last_slice: int  # the highest index of its slices
    held: HeldTiers


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """What a new engine's tables begin with."""

    held: HeldTiers
    stale_to: int | None = None  # slices up to this one lack it; None: none does

    @property
    def num_blocks(self) -> int:
        """Blocks of the context."""
        context = [tier[0] for tier in (self.held.device, self.held.host, self.held.disk) if tier]
        return len(set[Key]().union(*context))


def takeover(stages: Sequence[StageHolds]) -> Takeover | None:
    """Return what can be taken over of what the stages of a pipeline hold; None: nothing."""
    lost = max((stage.last_slice for stage in stages if not stage.held), default=-1)
    behind = [stage.held for stage in stages if stage.last_slice > lost]
    if not behind:
        return None
    held = HeldTiers(
        device=_alike([each.device for each in behind]),
        host=_alike([each.host for each in behind]),
        disk=_alike([each.disk for each in behind]),
    )
    return Takeover(held=held, stale_to=lost if lost >= 0 else None) if held else None


def _alike(tiers: Sequence[Sequence[Held]]) -> tuple[Held, ...]:
    """Return what all stages hold in one tier, in the first one's order."""
    first, *others = tiers
    return tuple(
        {key: place for key, place in held.items() if all(other[number].get(key) == place for other in others)}
        for number, held in enumerate(first)
    )
