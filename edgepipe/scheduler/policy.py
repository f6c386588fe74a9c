"""Scheduling policies: how many decodes and prefill tokens go into a step."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from edgepipe.errors import ConfigInvalid


class Load(NamedTuple):
    """State of the scheduler that a policy decides on."""

    micro_batches: int  # M: maximum number of steps in flight
    # One count per step in flight, oldest first: sequences that will decode again.
    sampling_rows_in_flight: tuple[int, ...]
    running_decodes: int  # RD: sequences whose known tokens are all scheduled, in flight or ready
    ready_decodes: int  # the part of RD that waits for a step
    waiting_prefill_tokens: int  # WP: known tokens that no step holds yet, of admitted and waiting sequences
    num_blocks: int
    free_blocks: int
    block_size: int  # tokens
    reserved_tokens: int = 0  # the part of WP in admitted sequences, whose blocks are allocated
    step_tokens: int | None = None  # planned tokens of a step with prompt tokens, decodes included; None: not known
    most_prefill_tokens: int | None = None  # prefill tokens that the slowest stage computes in the time allowed


class StepBudget(NamedTuple):
    """Upper bounds for the next step."""

    decode_rows: int
    prefill_tokens: int


class Policy(Protocol):
    """Decides step budgets; the scheduler decides which sequences fill them."""

    @property
    def most_prefill_tokens(self) -> int:
        """Bound on the prompt tokens of a step."""
        ...

    @property
    def paced(self) -> bool:
        """Whether steps with prompt tokens have the planned size (``Load.step_tokens``)."""
        ...

    def budget(self, load: Load) -> StepBudget:
        """Return the next step's budget. It must not be zero while sequences wait and no step is in flight."""
        ...


def even_share(load: Load) -> int:
    """Return the next step's share of the decodes: ``ceil(RD / M)`` or ``floor(RD / M)``.

    Of M micro-batches, ``RD mod M`` hold one decode more than the others. The function counts those already in flight,
    so micro-batches that became uneven when sequences ended are even again within a turn or two.
    """
    smaller, num_larger = divmod(load.running_decodes, load.micro_batches)
    larger_in_flight = sum(1 for rows in load.sampling_rows_in_flight if rows > smaller)
    return smaller + (larger_in_flight < num_larger)


class ThrottledPolicy:
    """Token throttling (gLLM, section 3): spreads decodes over the micro-batches and prefill over the next steps.

    The clamps follow the order of gLLM's code, not of its formula: the floor applies to the spreading only. So prefill
    fades to zero as the KV cache fills, or to the floor for prompts whose blocks are allocated. Without decodes a
    prompt is spread over the micro-batches only, as it delays no other sequence. Two caps apply: the tokens that the
    slowest stage computes in the time allowed and, beside decodes, those that the slowest link uploads in a step.
    Neither goes below the floor: a slow ring would otherwise prefill token by token.
    """

    def __init__(
        self,
        *,
        max_prefill_tokens: int = 2048,
        min_prefill_tokens: int = 32,
        spread_steps: int = 8,
        kv_threshold: float = 0.05,
    ) -> None:
        if max_prefill_tokens < 1 or min_prefill_tokens < 1 or spread_steps < 1 or not 0 <= kv_threshold < 1:
            raise ValueError("a chunk holds at least one token, and some of the KV cache is of use")
        self._max = max_prefill_tokens  # MaxP
        self._min = min(min_prefill_tokens, max_prefill_tokens)  # MinP: a smaller chunk costs as much
        self._spread_steps = spread_steps  # T
        self._kv_threshold = kv_threshold  # share of the blocks kept for running decodes

    @property
    def most_prefill_tokens(self) -> int:
        """Bound on the prompt tokens of a step."""
        return self._max

    @property
    def paced(self) -> bool:
        """Yes."""
        return True

    def budget(self, load: Load) -> StepBudget:
        """Return an even share of the decodes and the prefill tokens that may go beside it."""
        decode_rows = even_share(load)
        if not load.waiting_prefill_tokens:
            return StepBudget(decode_rows, 0)
        prefill_tokens = self._prefill(load, beside=min(decode_rows, load.ready_decodes))
        return StepBudget(decode_rows, prefill_tokens)

    def _prefill(self, load: Load, *, beside: int) -> int:
        free_tokens = load.free_blocks * load.block_size + load.reserved_tokens
        if load.step_tokens is not None and (load.reserved_tokens or not load.running_decodes):
            return min(max(load.step_tokens - beside, 1), self._max, free_tokens)
        free = free_tokens / (load.num_blocks * load.block_size)
        ramp = (free - self._kv_threshold) / (1 - self._kv_threshold)
        fading = int(self._max * max(ramp, 0.0))
        if not load.running_decodes or load.reserved_tokens:
            fading = max(fading, self._min)  # admitted prompts hold blocks: letting them go on frees these sooner
        if load.step_tokens is not None:
            return min(max(load.step_tokens - beside, 1), self._max, fading, free_tokens)
        steps = self._spread_steps if load.running_decodes else min(self._spread_steps, load.micro_batches)
        return min(max(-(-load.waiting_prefill_tokens // steps), self._min), fading, free_tokens)


class SarathiPolicy:
    """Fixed number of tokens per step (Sarathi-Serve): all ready decodes first, then prefill."""

    def __init__(self, *, max_tokens: int = 2048, min_prefill_tokens: int = 32) -> None:
        if max_tokens < 1 or min_prefill_tokens < 1:
            raise ValueError("a step holds at least one token")
        self._max_tokens = max_tokens
        self._min = min_prefill_tokens  # prefill floor, however slow the stages are

    @property
    def most_prefill_tokens(self) -> int:
        """Bound on the prompt tokens of a step."""
        return self._max_tokens

    @property
    def paced(self) -> bool:
        """No: its steps have a fixed number of tokens, as far as ``Load.most_prefill_tokens`` allows."""
        return False

    def budget(self, load: Load) -> StepBudget:
        """Return all ready decodes that fit; prefill fills the rest, as far as the slowest stage allows."""
        decode_rows = min(load.ready_decodes, self._max_tokens)
        prefill_tokens = self._max_tokens - decode_rows
        if load.most_prefill_tokens is not None:
            prefill_tokens = min(prefill_tokens, max(self._min, load.most_prefill_tokens - decode_rows))
        return StepBudget(decode_rows=decode_rows, prefill_tokens=prefill_tokens)


POLICIES = ("throttled", "sarathi", "temporal", "auto")
"""Names that ``make_policy`` knows, the default first. The last two differ in batches only: see ``batch_ways``."""


def make_policy(name: str, *, max_tokens: int = 2048) -> Policy:
    """Return the policy of that name. Raises ConfigInvalid for an unknown name.

    ``max_tokens`` bounds a step's prefill (``throttled``) or the whole step (``sarathi``); ``sarathi-128`` has its own.
    """
    base, _, tokens = name.partition("-")
    if base == "sarathi" and tokens.isdecimal() and 0 < int(tokens) <= max_tokens:
        return SarathiPolicy(max_tokens=int(tokens))
    if name in ("throttled", "temporal", "auto"):
        return ThrottledPolicy(max_prefill_tokens=max_tokens)
    if name == "sarathi":
        return SarathiPolicy(max_tokens=max_tokens)
    raise ConfigInvalid(f"no scheduling policy is called '{name}'", fact=f"there are {', '.join(POLICIES)}")
