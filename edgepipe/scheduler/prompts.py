"""Admitted sequences with known tokens that no step holds yet, and how they share a step's prefill tokens.

Prompts are computed side by side. Suspected ones are kept apart: each gets steps of its own, in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from edgepipe.scheduler.sequence import Sequence

MAX_SIDE_BY_SIDE = 16
"""Prompts of a priority that are computed at the same time. More would only hold blocks early: a step serves few."""

MIN_CHUNK_TOKENS = 16
"""A smaller chunk takes a stage about as long as one of this size."""

SIMILAR_TOKENS = 256
"""Prompts that differ by less than about so many tokens do not pass one another."""


class Prompts:
    """By admission. A sequence stays until its last known token is scheduled, or until it leaves.

    None waits for ever. An interactive prompt gets half of each step's tokens once those before it are done, at most
    ``MAX_SIDE_BY_SIDE - 1``. A batch prompt counts as interactive, by its age, once ``MAX_OVERTAKEN`` have passed it.
    """

    def __init__(self) -> None:
        self._shared: list[Sequence] = []  # computed side by side
        self._suspected: deque[Sequence] = deque()  # whose turn is next comes first

    def __bool__(self) -> bool:
        return bool(self._shared or self._suspected)

    @property
    def any_suspected(self) -> bool:
        """Whether a sequence wants a step of its own."""
        return bool(self._suspected)

    @property
    def unscheduled_tokens(self) -> int:
        """Known tokens that no step holds yet; their blocks are taken."""
        shared = sum([sequence.unscheduled for sequence in self._shared])
        return shared + sum([sequence.unscheduled for sequence in self._suspected]) if self._suspected else shared

    @property
    def furthest_position(self) -> int:
        """The most tokens of one prompt that are scheduled: its next chunk attends to all of them."""
        return max([sequence.scheduled for sequence in (*self._shared, *self._suspected)], default=0)

    def accepts(self, sequence: Sequence) -> bool:
        """Whether the sequence would be computed soon. Behind interactive prompts a batch prompt would not."""
        if sequence.alone:
            return True
        if any(prompt.priority < sequence.priority for prompt in self._shared):
            return False
        return sum([prompt.priority <= sequence.priority for prompt in self._shared]) < MAX_SIDE_BY_SIDE

    def add(self, sequence: Sequence) -> None:
        """Add an admitted sequence. Batch prompts that it passes get older."""
        for prompt in self._shared:
            if sequence.priority < prompt.priority:
                prompt.note_overtaken()
        (self._suspected if sequence.alone else self._shared).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is scheduled up to its last known token, or leaves."""
        (self._suspected if sequence.alone else self._shared).remove(sequence)

    def next_suspected(self) -> Sequence:
        """The suspected sequence whose turn it is; the others come before its next one. Raises IndexError if none."""
        sequence = self._suspected[0]
        self._suspected.rotate(-1)
        return sequence

    def share(self, budget: int, *, replays: bool) -> list[tuple[Sequence, int]]:
        """Chunks of the next shared step: sequences with their tokens, at most ``budget`` together.

        ``replays``: of the sequences whose next tokens are replayed, or of the others.
        """
        prompts = [sequence for sequence in self._shared if sequence.replays == replays]
        if budget < 1 or not prompts:
            return []
        if len(prompts) == 1:
            return [(prompts[0], min(prompts[0].next_tokens, budget))]
        return _share(prompts, budget)


def _share(prompts: Seq[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Give half to the oldest prompt, so that each ends some time, and the rest to those with the fewest tokens left.

    Interactive prompts come before batch prompts in both. Prompts of about the same length are computed one after
    another. A chunk has at least ``MIN_CHUNK_TOKENS``, or half of a smaller budget, unless its prompt ends with it.
    """
    oldest = min(prompts, key=lambda prompt: (prompt.priority, prompt.arrival))
    half = min(oldest.next_tokens, budget - budget // 2)
    least = min(MIN_CHUNK_TOKENS, max(1, budget // 2))
    wanted = [(prompt, prompt.next_tokens - (half if prompt is oldest else 0)) for prompt in prompts]
    wanted.sort(key=lambda want: (want[0].priority, want[1] // SIMILAR_TOKENS, want[0].arrival))
    chunks = {oldest: half}
    left = budget - half
    for prompt, tokens in wanted:
        count = min(tokens, left)
        if not left or (prompt is not oldest and count < min(tokens, least)):
            break
        chunks[prompt] = chunks.get(prompt, 0) + count
        left -= count
    return list(chunks.items())
