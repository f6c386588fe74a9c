"""What one epoch's caches hand to the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgepipe.backend.types import TierMove
from edgepipe.scheduler.disk_works import DiskWorks
from edgepipe.scheduler.host_tier import HostTier
from edgepipe.scheduler.kv import KVPool
from edgepipe.scheduler.place_keys import PlaceKey
from edgepipe.scheduler.states import StateClass


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPools:
    """What an epoch's pools keep for the next one: the prefix cache of every memory class."""

    context: KVPool
    windows: tuple[KVPool, ...] = ()
    states: StateClass | None = None

    disk: DiskWorks | None = None
    moves: list[TierMove] = field(default_factory=list[TierMove])  # the next step's; the tiers of the pools add to it
    new_keys: list[PlaceKey] = field(default_factory=list[PlaceKey])  # the pools add to it, too

    @property
    def sizes(self) -> tuple[int, ...]:
        """See ``SchedulerLimits.pool_sizes``."""
        slots = () if self.states is None else (self.states.num_slots,)
        places = [host.num_places for host in self.hosts]
        on_disk = [host.disk.num_places for host in self.hosts if host.disk is not None]
        return (self.context.num_blocks, *(pool.num_blocks for pool in self.windows), *slots, *places, *on_disk)

    @property
    def hosts(self) -> list[HostTier]:
        """What is below the pools, in the order of ``TierMove.number``; empty: nothing is."""
        pools = (self.context, *self.windows, *(() if self.states is None else (self.states,)))
        return [pool.host for pool in pools if pool.host is not None]

    @property
    def cached_blocks(self) -> int:
        """Number of cached blocks of the context."""
        return self.context.cached_blocks

    def lose(self, last_slice: int) -> None:
        """Mark all cached blocks and snapshots stale: the stages up to this slice lost their KV and states."""
        pools, states = (self.context, *self.windows), self.states
        any_stale = any(pool.any_stale for pool in pools) or (states is not None and states.any_stale)
        if any_stale and self.context.stale_to is not None:
            last_slice = max(last_slice, self.context.stale_to)
        for pool in pools:
            pool.lose(last_slice)
        if states is not None:
            states.lose()
