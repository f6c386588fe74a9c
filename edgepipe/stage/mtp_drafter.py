"""Drafts by the served model's own layer that predicts one token more, for one sequence on the stage with the head."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from edgepipe.backend.drafting import NO_DRAFTS, Drafts, DraftSource
from edgepipe.backend.types import NO_DRAFT, UNKNOWN_ID, BlockRun, DraftRow, Kept, StepOutput, TokenIds
from edgepipe.ids import SequenceId

logger = logging.getLogger(__name__)

_MOST_KEPT = 64  # tokens whose output waits while no drafts are wanted; H numbers each on the device

RunDraft = Callable[[Callable[[], DraftRow]], TokenIds]
"""Make a row on the compute thread, which alone may touch a device's arrays, and guess behind it. Waits for that."""


class MtpDrafter:
    """See ``Drafter``. A step's plan, its output and its sampled tokens come in this order.

    The layer computes the keys and values of a token once the token behind it is known. Of a prompt it does so in the
    step itself, as ``next_ids`` says. Of later tokens, the model's output waits here until drafts are wanted.
    """

    def __init__(
        self, sequence: SequenceId, tokens: Sequence[int], run: RunDraft, *, block_size: int, rest_tokens: int = 0
    ) -> None:
        """``tokens``: the sequence's known ones, of prompt and output. ``rest_tokens``: see ``kv_forms``."""
        self._sequence = sequence
        self._known = tokens
        self._run = run
        self._block_size = block_size
        self._rest_tokens = rest_tokens
        self._new: list[int] = []  # tokens behind position ``_base``, which the layer has not taken
        self._base = len(tokens)
        self._runs: tuple[BlockRun, ...] = ()
        self._outputs: dict[int, tuple[Kept, int]] = {}  # keys: the first token's position; with the number of tokens
        self._failed = False

    def next_ids(self, position: int, num_tokens: int, runs: tuple[BlockRun, ...]) -> list[int]:
        """Return the token behind each of the sequence's tokens in a planned step, as ``Step.next_ids`` has it.

        ``runs``: the sequence's block table from then on.
        """
        self._runs = runs
        known = self._known[position + 1 : position + 1 + num_tokens]
        return [*known, *[UNKNOWN_ID] * (num_tokens - len(known))]

    def keep(self, position: int, output: Kept, num_tokens: int) -> None:
        """Keep a step's output for tokens from ``position``, whose next ones were not known."""
        self._outputs[position] = output, num_tokens
        while len(self._outputs) > 1 and sum(count for _, count in self._outputs.values()) > _MOST_KEPT:
            del self._outputs[min(self._outputs)]

    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        """See ``Drafter.propose``. Without the output of the last steps there are no drafts."""
        self._new += tokens
        end = self._base + len(self._new)
        depth = min(count, self._room() - end + 2)
        if depth < 1 or self._failed:
            return NO_DRAFTS
        row = self._row(end, depth)
        if row is None:
            return NO_DRAFTS
        try:
            ids = tuple(self._run(row).tolist())
        except Exception as exc:  # an answer needs no drafts
            logger.warning("no more drafts by the model's own layer for sequence %s: %s", self._sequence, exc)
            self._failed = True
            return NO_DRAFTS
        return Drafts(ids, (DraftSource.MODEL,) * len(ids))

    def _row(self, end: int, depth: int) -> Callable[[], DraftRow] | None:
        """Take the outputs of the tokens before position ``end - 1``, whose next ones are known by now.

        None if that of the last one is missing. Outputs before a gap are dropped: drafts do without those keys.
        """
        known = end - 1
        starts = sorted(each for each in list(self._outputs) if each < known)
        taken: list[tuple[Kept, int]] = []
        for start in reversed(starts):
            output, count = self._outputs.pop(start)
            if min(start + count, known) < known:
                continue  # a gap, also for all outputs before
            taken.insert(0, (output, known - start))
            known = start
        first, ids, runs = known, [*self._new], self._runs
        self._new, base, self._base = [], self._base, end
        if not taken:
            return None
        next_ids = np.array(ids[first + 1 - base :], np.int32)

        def make() -> DraftRow:
            return DraftRow(
                sequence=self._sequence,
                position=first,
                kept=tuple(output[:count] for output, count in taken),
                next_ids=next_ids,
                depth=depth,
                runs=runs,
            )

        return make

    def _room(self) -> int:
        """Return the tokens that the sequence's blocks hold."""
        return sum(run.count for run in self._runs) * self._block_size - self._rest_tokens


class KeptPart(NamedTuple):
    """Tokens of a step whose output a drafter takes."""

    drafter: MtpDrafter
    position: int  # where the first token is
    num_tokens: int


class NextIds:
    """Collects ``Step.next_ids`` of a step's rows, and whose output is kept."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.parts: list[KeptPart] = []

    def add(self, drafter: MtpDrafter | None, position: int, num_tokens: int, runs: tuple[BlockRun, ...]) -> None:
        """Add the next row; ``drafter``: None if the layer does not draft for its sequence."""
        if drafter is None:
            self.ids += [NO_DRAFT] * num_tokens
            return
        own = drafter.next_ids(position, num_tokens, runs)
        self.ids += own
        if unknown := own.count(UNKNOWN_ID):
            self.parts.append(KeptPart(drafter, position + num_tokens - unknown, unknown))

    def finish(self) -> TokenIds | None:
        """Return the ids [T]; None if no row has a drafter."""
        return np.array(self.ids, np.int32) if any(each != NO_DRAFT for each in self.ids) else None


def share_out(parts: Sequence[KeptPart], output: StepOutput) -> None:
    """Give a step's kept output to its drafters. Called on the compute thread, before the step is sampled."""
    if output.kept is None:
        return
    start = 0
    for part in parts:
        part.drafter.keep(part.position, output.kept[start : start + part.num_tokens], part.num_tokens)
        start += part.num_tokens
