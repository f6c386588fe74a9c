"""KV that an epoch or an engine left in stages, and the part that the next epoch can use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from edgepipe.engine.settings import WORTH_EMPTYING
from edgepipe.ids import Epoch
from edgepipe.scheduler import KeptPools, SchedulerLimits
from edgepipe.spec.facts import Slice

if TYPE_CHECKING:
    from edgepipe.engine.sites import StageSite


class HeldNumbers(NamedTuple):
    """Blocks of the context that stages have in each tier. Other numbers empty the KV of all stages."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @staticmethod
    def of(sites: Iterable[StageSite]) -> HeldNumbers:
        """Return what stages have for an engine that has ended: those of them that live on."""
        return next((site.held_blocks for site in sites if site.held_blocks.device), NO_NUMBERS)

    def on_device(self, room: int) -> int:
        """Return the number to open with on the device, where there is ``room`` for so many.

        A little more room does not justify empty stages. Much more does: a pool that once shrank would otherwise refuse
        long prompts for ever.
        """
        return min(room, self.device) if self.device and room <= WORTH_EMPTYING * self.device else room

    def below(self, *, host_room: int, disk_room: int) -> tuple[int, int]:
        """Return the numbers to open with in host memory and on disk."""
        host = self.host if self.device and self.host <= host_room else host_room
        disk_room = disk_room if host_room else 0
        return host, self.disk if self.device and self.disk <= disk_room else disk_room


NO_NUMBERS = HeldNumbers()

KVSince = Mapping[tuple[Slice, ...], Epoch | None]
"""The epoch since which KV of these slices holds all that this engine's steps wrote; None: not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKV:
    """The prefix cache of an ended epoch, and the stages that held it."""

    pools: KeptPools
    contiguous: bool
    since: KVSince

    @property
    def numbers(self) -> HeldNumbers:
        """What the stages have; nothing if it is empty."""
        if not self.pools.cached_blocks:
            return NO_NUMBERS
        host = self.pools.context.host
        disk = host.disk if host is not None else None
        return HeldNumbers(
            self.pools.context.num_blocks,
            host.num_places if host is not None else 0,
            disk.num_places if disk is not None else 0,
        )

    def lost_by(self, since: KVSince) -> list[tuple[Slice, ...]]:
        """Return the next epoch's stages without the last epoch's KV: other processes or other layers."""
        return [slices for slices, epoch in since.items() if epoch is None or self.since.get(slices) != epoch]

    def usable(self, limits: SchedulerLimits, since: KVSince) -> KeptPools | None:
        """Return the pools for the next epoch's scheduler. Blocks and states that some stages lost become stale.

        Returns None if nothing is usable: the last slice lost its KV, or the number or layout of blocks differs.
        """
        if self.pools.sizes != limits.pool_sizes or self.contiguous != limits.contiguous_kv:
            return None
        lost = _last_index(self.lost_by(since))
        if lost == _last_index(since):
            return None
        if lost >= 0:
            self.pools.lose(lost)
        return self.pools


def _last_index(stages: Iterable[tuple[Slice, ...]]) -> int:
    return max((part.index for slices in stages for part in slices), default=-1)
