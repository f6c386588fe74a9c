"""Alternate phases of prompts and phases of decodes while only batch sequences are in the ring. PURE.

After TD-Pipe (Zhang et al. 2025, section 3): a ring that computes one kind of token for long has steps of equal length,
so its stages wait less. The phase of prompts admits sequences as long as their predicted KV fits (greedy prefill, 3.3).
The phase of decodes ends when the loss by small steps exceeds the loss by the change (3.5). Work stealing between
micro-batches (3.4) is the scheduler's single pool with even shares.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from edgepipe.scheduler.lengths import AnswerLengths, Floats
from edgepipe.scheduler.pacing import Pacer, Passage
from edgepipe.scheduler.sequence import Sequence

_POINTS = np.array([16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192], dtype=np.int64)
"""Tokens from now at which the KV cache must hold (future points): denser where answers end."""


class TokenKinds(Enum):
    """Kinds of tokens that the next steps may hold."""

    MIXED = auto()  # both, as for chats
    PROMPTS = auto()
    DECODES = auto()


class Refill(NamedTuple):
    """State of the ring on which the end of a phase of decodes depends."""

    decodes: int  # sequences that decode
    context: int  # tokens that each attends to, in the mean
    micro_batches: int
    free_tokens: int  # tokens of the KV cache that no sequence holds
    free_rows: int  # sequences that may run beside those that do
    waiting: int  # sequences in the queue
    waiting_tokens: int  # prompt tokens without a step


class Phases:
    """Decides when a phase ends."""

    def __init__(self, pacer: Pacer, lengths: AnswerLengths, *, kv_tokens: int, knows_limits: bool = True) -> None:
        """
        lengths       of the batch's ended answers
        kv_tokens     capacity of the KV cache
        knows_limits  whether a sequence's limit may be used; a simulated one ends there, so it would tell its length
        """
        self._pacer = pacer
        self._kv_tokens = kv_tokens
        self._knows_limits = knows_limits
        self._lengths = lengths
        self._seen = 0  # decodes when the end of the phase was last considered
        self._admitted = 0  # sequences in the newest phase of prompts
        self._peak = 0.0  # decodes per second of the ring at the beginning of the phase of decodes
        self._usage: Floats | None = None  # predicted tokens in the KV cache at the points, during a phase of prompts

    def begin_prompts(self, running: Iterable[Sequence]) -> None:
        """Predict the KV use of the running sequences."""
        self._usage, self._admitted = None, 0
        if self._lengths.known:
            self._usage = sum((self._usage_of(each) for each in running), np.zeros(len(_POINTS)))

    def admits(self, sequence: Sequence) -> bool:
        """Return whether the KV cache will hold the sequence beside the others. ``note_admitted`` counts it.

        A sequence without others beside it is always admitted.
        """
        if self._usage is None or not self._usage.any():
            return True
        return bool((self._usage + self._usage_of(sequence)).max() <= self._kv_tokens)

    def note_admitted(self, sequence: Sequence) -> None:
        """Count an admitted sequence."""
        self._admitted += 1
        if self._usage is not None:
            self._usage = self._usage + self._usage_of(sequence)

    def begin_decodes(self, refill: Refill) -> None:
        """Note the speed with which a phase of decodes begins: the peak that later steps are compared with."""
        if self._admitted and (decodes := self._decodes(refill)) is not None:
            self._peak = self._rate(refill, decodes)
        self._seen = refill.decodes

    def should_refill(self, refill: Refill) -> bool:
        """Return whether to end the phase of decodes: spatial intensity below temporal intensity (section 3.5)."""
        if not refill.decodes:
            return bool(refill.waiting)
        if not refill.waiting or refill.decodes == self._seen:
            return False
        self._seen = refill.decodes
        tokens, decodes = self._tokens_that_fit(refill), self._decodes(refill)
        if tokens < 1 or decodes is None or not self._peak:
            return tokens >= 1
        prompts = self._pacer.prompts_alone(tokens)
        if prompts is None:
            return True
        # The slowest server waits until the first chunk has passed the others, less than behind decodes.
        bubble_s = max(0.0, prompts.turn_s - prompts.chunk_s - (decodes.turn_s - decodes.server_s))
        spatial = self._rate(refill, decodes) / self._peak
        return spatial < 1 - bubble_s / (prompts.number * prompts.chunk_s + bubble_s)

    def _tokens_that_fit(self, refill: Refill) -> int:
        """Return about the prompt tokens that the next phase of prompts would compute."""
        mean = refill.waiting_tokens / refill.waiting
        return int(min(refill.waiting_tokens, refill.free_tokens - refill.decodes, refill.free_rows * mean))

    def _decodes(self, refill: Refill) -> Passage | None:
        rows = -(-refill.decodes // refill.micro_batches)
        return self._pacer.decode_passage(rows, context=refill.context)

    @staticmethod
    def _rate(refill: Refill, decodes: Passage) -> float:
        """Return tokens per second of the whole ring."""
        return refill.decodes / max(decodes.turn_s, refill.micro_batches * decodes.server_s)

    def _usage_of(self, sequence: Sequence) -> Floats:
        """Return the sequence's expected tokens in the KV cache at the points."""
        known = len(sequence.tokens)
        shares = self._lengths.reach(
            prompt_tokens=sequence.prompt_tokens, output_tokens=sequence.num_output, more=_POINTS
        )
        usage = shares * (known + _POINTS)
        return np.where(known + _POINTS <= sequence.limit, usage, 0.0) if self._knows_limits else usage
