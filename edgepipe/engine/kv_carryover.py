"""KV that an epoch left in its stages, and the part that the next epoch can use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgepipe.engine.settings import WORTH_EMPTYING
from edgepipe.ids import Epoch
from edgepipe.scheduler import KeptPools, SchedulerLimits
from edgepipe.spec.facts import Slice

KVSince = Mapping[tuple[Slice, ...], Epoch | None]
"""By a stage's slices: the epoch since which its KV holds all that this engine's steps wrote; None: not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKV:
    """The prefix cache of an ended epoch, and the stages that held it."""

    pools: KeptPools
    contiguous: bool
    since: KVSince

    @property
    def host_blocks(self) -> int:
        """Blocks of the context in the stages' host memory."""
        host = self.pools.context.host
        return host.num_places if host is not None else 0

    @property
    def disk_blocks(self) -> int:
        """Blocks of the context on the stages' disks."""
        host = self.pools.context.host
        return host.disk.num_places if host is not None and host.disk is not None else 0

    def is_worth(self, num_blocks: int) -> bool:
        """Return whether to keep the number of blocks although stages have room for ``num_blocks`` now.

        Another number empties the KV of all stages. A little more room does not justify that. Much more does: a pool
        that once shrank would otherwise refuse long prompts for ever.
        """
        return bool(self.pools.cached_blocks) and num_blocks <= WORTH_EMPTYING * self.pools.context.num_blocks

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
