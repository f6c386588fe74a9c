"""The way that fills the next steps, and its phase. PURE."""

from __future__ import annotations

from edgepipe.scheduler.batch_ways import BatchWay
from edgepipe.scheduler.limits import SchedulerLimits
from edgepipe.scheduler.phases import Phases, Refill, TokenKinds
from edgepipe.scheduler.policy import Policy
from edgepipe.scheduler.sequence_pool import SequencePool
from edgepipe.scheduler.tables import BlockTables


class BatchMode:
    """Fills steps by a batch's own way while only batch sequences are in the ring, and by the policy otherwise."""

    def __init__(self, limits: SchedulerLimits, policy: Policy, pool: SequencePool, tables: BlockTables) -> None:
        self._limits = limits
        self._policy = policy
        self._pool = pool
        self._tables = tables
        self._way: BatchWay | None = None
        self.kinds = TokenKinds.MIXED

    def set_way(self, way: BatchWay) -> None:
        """Set how steps are filled while only batch sequences are in the ring. Without it, like all others."""
        self._way, self.kinds = way, TokenKinds.MIXED

    @property
    def has_way(self) -> bool:
        """Whether a way was set."""
        return self._way is not None

    @property
    def policy(self) -> Policy:
        """The policy of the next step."""
        if self._way is None:
            return self._policy
        way = self._applied
        return self._policy if way is None else way.policy

    @property
    def prompt_phases(self) -> Phases | None:
        """The phases, if the newest one is of prompts: they choose what is admitted."""
        return self._phases if self.kinds is TokenKinds.PROMPTS else None

    def choose(self, *, micro_batches: int) -> None:
        """Begin or leave the phases, and change from decodes to prompts when that pays."""
        if self._way is None:
            return
        phases = self._phases
        if phases is None:
            self.kinds = TokenKinds.MIXED
        elif self.kinds is TokenKinds.MIXED or (
            self.kinds is TokenKinds.DECODES and phases.should_refill(self._refill(micro_batches))
        ):
            self.kinds = TokenKinds.PROMPTS
            phases.begin_prompts(self._pool.running.values())

    def end_prompts(self, *, micro_batches: int, in_flight: bool) -> bool:
        """Change from prompts to decodes if no further prompt can be computed now. Return whether it did.

        ``in_flight``: whether steps are in flight. They may compute blocks that prompts in the queue share.
        """
        phases, pool = self._phases, self._pool
        if self.kinds is not TokenKinds.PROMPTS or phases is None or pool.prompts or not pool.num_decodes:
            return False
        if pool.waiting.any_parked and in_flight:
            return False
        self.kinds = TokenKinds.DECODES
        phases.begin_decodes(self._refill(micro_batches))
        return True

    @property
    def _applied(self) -> BatchWay | None:
        """The way, if only batch sequences are in the ring, none of them suspected or replayed."""
        if self._pool.expected_chats or self._pool.prompts.any_suspected or self._tables.stale_to is not None:
            return None
        return self._way

    @property
    def _phases(self) -> Phases | None:
        way = self._applied
        return None if way is None else way.phases

    def _refill(self, micro_batches: int) -> Refill:
        return Refill(
            decodes=self._pool.num_decodes,
            context=self._pool.mean_context,
            micro_batches=micro_batches,
            free_tokens=self._tables.free_blocks * self._limits.block_size,
            free_rows=self._limits.max_running - len(self._pool.running),
            waiting=len(self._pool.waiting),
            waiting_tokens=self._pool.unscheduled_prefill,
        )
