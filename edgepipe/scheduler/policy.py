"""How much of what goes into a step: the part of scheduling that people disagree about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a policy may look at when a step is to be made."""

    micro_batches: int  # M, the most steps in flight
    sampling_rows_in_flight: tuple[int, ...]  # per step in flight, oldest first: sequences that come back to decode
    running_decodes: int  # RD: sequences whose known tokens are all scheduled, in flight or ready
    ready_decodes: int  # those of them that wait for a step
    waiting_prefill_tokens: int  # WP: known tokens that no step holds yet, of admitted and waiting sequences
    num_blocks: int
    free_blocks: int
    block_size: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """The most that the next step may hold."""

    decode_rows: int
    prefill_tokens: int


class Policy(Protocol):
    """Decides budgets; which sequences fill them is FIFO always."""

    def budget(self, load: Load) -> StepBudget:
        """The next step's budget. While something waits, it must not be zero once all steps have retired."""
        ...


class EvenPolicy:
    """Decodes spread evenly over the micro-batches, prefill in chunks of a fixed size beside them.

    Of RD decodes in M micro-batches, ``RD mod M`` hold one more than the others; those in flight with that size are
    counted, so that batches that drifted apart (because sequences ended) are even again within a turn or two.
    """

    def __init__(self, *, max_prefill_tokens: int = 512) -> None:
        if max_prefill_tokens < 1:
            raise ValueError("a chunk holds at least one token")
        self._max_prefill_tokens = max_prefill_tokens  # per step: longer chunks make every decode behind them wait

    def budget(self, load: Load) -> StepBudget:
        """``ceil(RD / M)`` or ``floor(RD / M)`` decodes, and one chunk's worth of prefill."""
        smaller, num_larger = divmod(load.running_decodes, load.micro_batches)
        larger_in_flight = sum(1 for rows in load.sampling_rows_in_flight if rows > smaller)
        decode_rows = smaller + (larger_in_flight < num_larger)
        return StepBudget(decode_rows=decode_rows, prefill_tokens=self._max_prefill_tokens)
