"""How much of what goes into a step: the part of scheduling that people disagree about."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple, Protocol

from edgepipe.errors import ConfigInvalid


class Load(NamedTuple):
    """What a policy may look at when a step is to be made."""

    micro_batches: int  # M, the most steps in flight
    sampling_rows_in_flight: tuple[int, ...]  # per step in flight, oldest first: sequences that come back to decode
    running_decodes: int  # RD: sequences whose known tokens are all scheduled, in flight or ready
    ready_decodes: int  # those of them that wait for a step
    waiting_prefill_tokens: int  # WP: known tokens that no step holds yet, of admitted and waiting sequences
    num_blocks: int
    free_blocks: int
    block_size: int  # tokens
    reserved_tokens: int = 0  # of WP, those of admitted sequences: their blocks are taken already
    link_cap_tokens: int | None = None  # what the slowest link uploads in a step; None: not known
    tile_edges: tuple[int, ...] = ()  # tokens of a step above which it takes clearly longer, ascending
    prefill_cap_tokens: int | None = None  # of a step with prompt tokens, for the time that the slowest stage takes


class StepBudget(NamedTuple):
    """The most that the next step may hold."""

    decode_rows: int
    prefill_tokens: int


class Policy(Protocol):
    """Decides budgets; the scheduler decides which sequences fill them."""

    def budget(self, load: Load) -> StepBudget:
        """The next step's budget. While something waits, it must not be zero once all steps have retired."""
        ...


def even_share(load: Load) -> int:
    """``ceil(RD / M)`` or ``floor(RD / M)`` decodes.

    Of RD decodes in M micro-batches, ``RD mod M`` hold one more than the others; those in flight with that size are
    counted, so that batches that drifted apart (because sequences ended) are even again within a turn or two.
    """
    smaller, num_larger = divmod(load.running_decodes, load.micro_batches)
    larger_in_flight = sum(1 for rows in load.sampling_rows_in_flight if rows > smaller)
    return smaller + (larger_in_flight < num_larger)


class ThrottledPolicy:
    """Token throttling (gLLM, section 3): decodes even over the micro-batches, prefill spread over the next steps.

    The clamps are taken in the order of its code, not of its formula: the floor holds for the spreading only, so that
    prefill fades to nothing as the KV cache fills, or to the floor for prompts that have their blocks. Where nobody
    decodes, nobody is held up: then a prompt is spread over the micro-batches only. Two caps hold: what the slowest
    stage computes in the time allowed and, beside decodes, what the slowest link uploads in a step. Both leave the
    floor: a slow ring would else prefill by single tokens.
    """

    def __init__(
        self,
        *,
        max_prefill_tokens: int = 2048,
        min_prefill_tokens: int = 32,
        spread_steps: int = 8,
        kv_threshold: float = 0.05,
        trim_to_tiles: bool = False,
    ) -> None:
        if max_prefill_tokens < 1 or min_prefill_tokens < 1 or spread_steps < 1 or not 0 <= kv_threshold < 1:
            raise ValueError("a chunk holds at least one token, and some of the KV cache is of use")
        self._max = max_prefill_tokens  # MaxP
        self._min = min(min_prefill_tokens, max_prefill_tokens)  # MinP: smaller chunks cost as much as these
        self._spread_steps = spread_steps  # T
        self._kv_threshold = kv_threshold  # of the blocks: kept for running decodes
        self._trim_to_tiles = trim_to_tiles

    def budget(self, load: Load) -> StepBudget:
        """An even share of the decodes, and what may be computed of prompts beside it."""
        decode_rows = even_share(load)
        prefill_tokens = self._prefill(load, beside=min(decode_rows, load.ready_decodes))
        return StepBudget(decode_rows=decode_rows, prefill_tokens=prefill_tokens)

    def _prefill(self, load: Load, *, beside: int) -> int:
        free_tokens = load.free_blocks * load.block_size + load.reserved_tokens
        free = free_tokens / (load.num_blocks * load.block_size)
        ramp = (free - self._kv_threshold) / (1 - self._kv_threshold)
        fading = int(self._max * max(ramp, 0.0))
        if not load.running_decodes or load.reserved_tokens:
            fading = max(fading, self._min)  # blocks come free sooner if admitted prompts, which have theirs, go on
        steps = self._spread_steps if load.running_decodes else min(self._spread_steps, load.micro_batches)
        tokens = min(max(-(-load.waiting_prefill_tokens // steps), self._min), fading, free_tokens)
        if load.link_cap_tokens is not None and load.running_decodes:
            tokens = min(tokens, max(self._min, load.link_cap_tokens - beside))
        if load.prefill_cap_tokens is not None:
            tokens = min(tokens, max(self._min, load.prefill_cap_tokens - beside))
        return self._trimmed(tokens, beside, load.tile_edges) if self._trim_to_tiles else tokens

    def _trimmed(self, tokens: int, beside: int, edges: tuple[int, ...]) -> int:
        """Fewer tokens, up to the last edge that the step reaches, if that leaves a chunk worth its step."""
        reached = bisect_right(edges, beside + tokens)
        trimmed = edges[reached - 1] - beside if reached else 0
        return trimmed if trimmed >= min(self._min, tokens) else tokens


class SarathiPolicy:
    """One fixed number of tokens per step, decodes first (Sarathi-Serve): all that are ready, however many they are."""

    def __init__(self, *, max_tokens: int = 2048, min_prefill_tokens: int = 32) -> None:
        if max_tokens < 1 or min_prefill_tokens < 1:
            raise ValueError("a step holds at least one token")
        self._max_tokens = max_tokens
        self._min = min_prefill_tokens  # however slow the stages are

    def budget(self, load: Load) -> StepBudget:
        """All ready decodes as far as they fit; prefill fills the rest, as far as the slowest stage allows."""
        decode_rows = min(load.ready_decodes, self._max_tokens)
        prefill_tokens = self._max_tokens - decode_rows
        if load.prefill_cap_tokens is not None:
            prefill_tokens = min(prefill_tokens, max(self._min, load.prefill_cap_tokens - decode_rows))
        return StepBudget(decode_rows=decode_rows, prefill_tokens=prefill_tokens)


TRIMMING = "throttled-tiles"
"""An experiment: as ``throttled``, and prefill ends at a tile edge of the measured step times."""

POLICIES = ("throttled", "sarathi", TRIMMING)
"""Names that ``make_policy`` knows, the default first."""


def make_policy(name: str, *, max_tokens: int = 2048) -> Policy:
    """The policy of that name. Raises ConfigInvalid if there is none.

    ``max_tokens`` bounds a step's prefill (``throttled``) or the whole step (``sarathi``).
    """
    if name in ("throttled", TRIMMING):
        return ThrottledPolicy(max_prefill_tokens=max_tokens, trim_to_tiles=name == TRIMMING)
    if name == "sarathi":
        return SarathiPolicy(max_tokens=max_tokens)
    raise ConfigInvalid(f"no scheduling policy is called '{name}'", fact=f"there are {', '.join(POLICIES)}")
