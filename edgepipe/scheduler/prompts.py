"""Admitted sequences with unscheduled tokens, and how they share a step's prefill tokens.

Shared steps compute several prompts side by side. Suspected sequences take turns in isolated steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import chain

from edgepipe.scheduler.sequence import Sequence

MAX_SIDE_BY_SIDE = 16
"""Prompts of one priority computed at the same time. More would only hold blocks early, as a step serves few."""

MIN_CHUNK_TOKENS = 16
"""A smaller chunk takes a stage about as long as one of this size."""

SIMILAR_TOKENS = 256
"""Prompts whose lengths differ by less than about this many tokens do not pass one another."""


class Prompts:
    """Admitted sequences in order of admission, until their last known token is scheduled or they leave.

    None waits for ever. At most ``MAX_SIDE_BY_SIDE - 1`` interactive prompts go before an interactive prompt; then it
    gets half of each step's tokens. A batch prompt counts as interactive once ``MAX_OVERTAKEN`` others passed it.
    """

    def __init__(self) -> None:
        self._shared: list[Sequence] = []  # computed side by side
        self._suspected: deque[Sequence] = deque()  # the next turn is the first's

    def __bool__(self) -> bool:
        return bool(self._shared or self._suspected)

    @property
    def any_suspected(self) -> bool:
        """Whether a sequence needs an isolated step."""
        return bool(self._suspected)

    @property
    def unscheduled_tokens(self) -> int:
        """Number of known tokens that no step holds yet. Their blocks are allocated."""
        shared = sum([sequence.unscheduled for sequence in self._shared])
        return shared + sum([sequence.unscheduled for sequence in self._suspected]) if self._suspected else shared

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._shared, self._suspected)

    @property
    def furthest_position(self) -> int:
        """Scheduled tokens of the prompt that is furthest on. Its next chunk attends to all of them."""
        return max([sequence.scheduled for sequence in (*self._shared, *self._suspected)], default=0)

    @property
    def oldest(self) -> Sequence | None:
        """The prompt that gets half of each shared step, or a suspected sequence; None without prompts."""
        if self._shared:
            return min(self._shared, key=lambda prompt: (prompt.priority, prompt.arrival))
        return self._suspected[0] if self._suspected else None

    def accepts(self, sequence: Sequence) -> bool:
        """Return whether the sequence would be computed soon. A batch prompt behind interactive ones would not."""
        if sequence.alone:
            return True
        if any(prompt.priority < sequence.priority for prompt in self._shared):
            return False
        return sum([prompt.priority <= sequence.priority for prompt in self._shared]) < MAX_SIDE_BY_SIDE

    def add(self, sequence: Sequence) -> None:
        """Add an admitted sequence and age the batch prompts that it passes."""
        for prompt in self._shared:
            if sequence.priority < prompt.priority:
                prompt.note_overtaken()
        (self._suspected if sequence.alone else self._shared).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence whose known tokens are all scheduled, or that leaves."""
        (self._suspected if sequence.alone else self._shared).remove(sequence)

    def next_suspected(self) -> Sequence | None:
        """Return the suspected sequence whose turn it is and move it to the back. Those without blocks keep their turn.

        None if no suspected sequence has blocks for a next token.
        """
        sequence = next((each for each in self._suspected if each.next_tokens > 0), None)
        if sequence is not None:
            self._suspected.remove(sequence)
            self._suspected.append(sequence)
        return sequence

    def share(self, budget: int, *, replays: bool, first_only: bool = False) -> list[tuple[Sequence, int]]:
        """Return the chunks of the next shared step: sequences with token counts, at most ``budget`` in total.

        ``replays``: choose the sequences whose next tokens are replayed, or the others. Sequences without blocks for
        a next token wait. ``first_only``: only those of the first priority, so that nothing makes their step longer.
        """
        prompts = [each for each in self._shared if each.replays == replays and each.next_tokens > 0]
        if budget < 1 or not prompts:
            return []
        if first_only and len(prompts) > 1:
            first = min([each.priority for each in prompts])
            prompts = [each for each in prompts if each.priority == first]
        if len(prompts) == 1:
            return [(prompts[0], min(prompts[0].next_tokens, budget))]
        return _share(prompts, budget)


def _share(prompts: Seq[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Give half to the oldest prompt, so that every prompt ends, and the rest to those with the fewest tokens left.

    Interactive prompts come before batch prompts in both halves. Prompts of about the same length go one after another.
    A chunk has at least ``MIN_CHUNK_TOKENS``, or half of a smaller budget, unless it ends its prompt.
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
