"""What an epoch left in its stages' KV, and what of it the next epoch can use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgepipe.ids import Epoch
from edgepipe.model.facts import Slice
from edgepipe.scheduler import KVPool, SchedulerLimits

_WORTH = 1.25  # times the kept number of blocks: more room than that is worth computing everything again

KVSince = Mapping[tuple[Slice, ...], Epoch | None]
"""By a stage's slices: the epoch since which its KV holds all that this engine's steps wrote; None: not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKV:
    """The blocks that an epoch knew by their tokens, and the stages that held them."""

    pool: KVPool
    contiguous: bool
    since: KVSince

    def is_worth(self, num_blocks: int) -> bool:
        """Whether to stay at the number of blocks that is kept where stages have room for ``num_blocks`` now.

        Another number empties the KV of all stages. A little more room is not worth that; much more is, since a pool
        that once shrank would refuse long prompts for ever.
        """
        return bool(self.pool.cached_blocks) and num_blocks <= _WORTH * self.pool.num_blocks

    def lost_by(self, since: KVSince) -> list[tuple[Slice, ...]]:
        """The stages of the next epoch that do not have what the last one wrote: other processes, other layers."""
        return [slices for slices, epoch in since.items() if epoch is None or self.since.get(slices) != epoch]

    def usable(self, limits: SchedulerLimits, since: KVSince) -> KVPool | None:
        """What the next epoch's scheduler can begin with; blocks that some stages have lost are stale from now on.

        None if nothing is left: the last slice lacks everything, or blocks are numbered or used in another way.
        """
        if self.pool.num_blocks != limits.num_blocks or self.contiguous != limits.contiguous_kv:
            return None
        lost = _last_index(self.lost_by(since))
        if lost == _last_index(since):
            return None
        if lost >= 0:
            self.pool.lose(lost)
        return self.pool


def _last_index(stages: Iterable[tuple[Slice, ...]]) -> int:
    return max((part.index for slices in stages for part in slices), default=-1)
