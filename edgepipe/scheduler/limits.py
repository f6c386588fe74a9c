"""What the scheduler is bound by, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the pipeline can hold."""

    num_blocks: int
    block_size: int  # tokens
    context_length: int  # tokens of one sequence, prompt and output
    micro_batches: int  # M, the most steps in flight
    max_running: int = 256  # sequences: bounds the rows of a step
    max_waiting: int = 1024  # sequences not admitted yet: some minutes of work for the fastest cluster
    contiguous_kv: bool = False  # a stage attends over runs as views: a prompt's known blocks are copied, not shared
    prefix_cache: bool = True  # what was computed for one sequence serves others that begin alike

    @property
    def max_tokens(self) -> int:
        """The longest that one sequence can become."""
        return min(self.context_length, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counts at this moment."""

    micro_batches: int  # M
    in_flight: int  # steps
    running: int  # sequences admitted
    waiting: int  # sequences to be admitted, the preempted ones among them
    num_blocks: int
    free_blocks: int  # that no sequence holds, those in the prefix cache among them
    cached_blocks: int  # in the prefix cache, held by sequences or not
    preemptions: int  # since the start
    admitted_tokens: int  # since the start: known tokens of sequences when they were admitted
    cached_tokens: int  # of those, found in the prefix cache
    computed_tokens: int  # since the start, prefill and decode
    kept_tokens: int = 0  # of sequences of an epoch before: found as it left them
    replayed_tokens: int = 0  # of the same: computed again by the stages up to the last one that had lost them
