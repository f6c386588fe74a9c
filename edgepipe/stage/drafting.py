"""Drafts for the sequences of a step, beside their samplers."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edgepipe.backend.drafting import NO_DRAFTS, ChainDrafter, Drafter, Drafts, DraftSource
from edgepipe.errors import EdgepipeError
from edgepipe.ids import SequenceId, StepId
from edgepipe.sampling import SequenceSampler
from edgepipe.sampling.lookup import LookupDrafter
from edgepipe.stage.draft_process import Guesser
from edgepipe.stage.mtp_drafter import MtpDrafter

_MOST_WAIT_S = 1.0  # for a draft model's guesses; then drafts come from a lookup
_MOST_BEHIND = 64  # tokens that a draft model has missed, beyond which nothing waits until it has computed them


class Lot(NamedTuple):
    """Drafts for a window in flight."""

    step: StepId  # the newest step whose tokens the drafter had
    position: int  # absolute, of the first draft
    drafts: Drafts
    took_us: int


class SequenceDrafter:
    """The drafter of one sequence: what its grammar forces comes before what its own drafter proposes.

    Sampler threads call ``propose``. While windows follow one another in flight, the loop calls ``took`` instead, and
    another thread ``go_on``.
    """

    def __init__(
        self,
        make: Callable[[], Drafter],
        sampler: SequenceSampler,
        *,
        known: int = 0,
        follows: MtpDrafter | None = None,
    ) -> None:
        """
        make     called when the first drafts are wanted, on a sampler thread, since long prompts take time
        known    tokens of the sequence when it began
        follows  the drafter, if it takes part in the sequence's steps
        """
        self._make = make
        self._known = known
        self._lock = threading.Lock()  # guards the drafter and all fields but ``_told``
        self._told: deque[tuple[StepId, Sequence[int]]] = deque()  # tokens of steps that the drafter has not seen
        self._newest = StepId(0)  # the last of these steps that it has seen
        self._chain: list[int] = []  # drafts behind the known tokens, each of which assumes all before it
        self.follows = follows
        self._drafter: Drafter | None = None
        self._sampler = sampler
        self._new: list[int] = []  # tokens that the sequence's own drafter does not know yet

    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        """See ``Drafter.propose``."""
        if count < 1:
            self.heard(tokens)
            return NO_DRAFTS
        with self._lock:
            self._see_told()
            self._see(tokens)
            self._chain = []
            if forced := self._forced(count):
                return Drafts(tuple(forced), (DraftSource.GRAMMAR,) * len(forced))
            if self._drafter is None:
                self._drafter = self._make()
            new, self._new = self._new, []
            return self._drafter.propose(new, count)

    def heard(self, tokens: Sequence[int]) -> None:
        """Take tokens behind which no drafts are wanted. All rows of a filled ring come here."""
        with self._lock:
            if self._told:
                self._see_told()
            self._new += tokens
            self._known += len(tokens)
            self._chain.clear()

    def took(self, step: StepId, tokens: Sequence[int]) -> None:
        """Note tokens of a step. Never waits."""
        self._told.append((step, tokens))

    def go_on(self, *, lot: int, most: int) -> Lot | None:
        """Return the next ``lot`` drafts behind all that are not known to be wrong; None beyond ``most`` in all.

        None, too, if the drafter cannot go on behind its drafts, or found none.
        """
        with self._lock:
            self._see_told()
            if len(self._chain) + lot > most:
                return None
            if self._drafter is None:
                self._drafter = self._make()
            if not isinstance(self._drafter, ChainDrafter):
                return None
            new, self._new = self._new, []
            began_ns = time.monotonic_ns()
            drafts = self._drafter.go_on(new, self._chain, lot)
            if not drafts.ids:
                return None
            took_us = max(0, (time.monotonic_ns() - began_ns) // 1000 - drafts.late_us)
            found = Lot(self._newest, self._known + len(self._chain), drafts, took_us)
            self._chain += drafts.ids
            return found

    def _see_told(self) -> None:
        while self._told:
            self._newest, tokens = self._told.popleft()
            self._see(tokens)

    def _see(self, tokens: Sequence[int]) -> None:
        """Append known tokens. The chain begins anew behind a wrong draft."""
        self._new += tokens
        self._known += len(tokens)
        right = len(self._chain) >= len(tokens) and [*tokens] == self._chain[: len(tokens)]
        self._chain = self._chain[len(tokens) :] if right else []

    def _forced(self, count: int) -> Sequence[int]:
        try:
            with self._sampler.lock:
                return self._sampler.forced()[:count]
        except EdgepipeError:
            return ()  # the error recurs when the sequence is sampled


class LookupFirst:
    """See ``Drafter``. Drafts of a long match cost nothing and are mostly right; else another drafter proposes.

    Where that has no drafts, those of a short match are better than none.
    """

    def __init__(self, tokens: Sequence[int], other: Drafter) -> None:
        """``tokens``: the sequence's known ones, which ``other`` knows, too."""
        self._lookup = LookupDrafter(tokens)
        self._other = other
        self._new: list[int] = []  # tokens that ``other`` does not know yet

    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        """See ``Drafter.propose``."""
        self._new += tokens
        found = self._lookup.propose(tokens, count)
        if found.sources[:1] == (DraftSource.LOOKUP_LONG,):
            return found
        new, self._new = self._new, []
        drafts = self._other.propose(new, count)
        return drafts if drafts.ids else Drafts(found.ids, found.sources, drafts.late_us)

    def go_on(self, tokens: Sequence[int], assumed: Sequence[int], count: int) -> Drafts:
        """See ``ChainDrafter.go_on``: by the other drafter alone."""
        self._new += tokens
        self._lookup.propose(tokens, 0)
        if not isinstance(self._other, ChainDrafter):
            return NO_DRAFTS
        new, self._new = self._new, []
        return self._other.go_on(new, assumed, count)


class ModelDrafter:
    """See ``Drafter``. A draft model in another process guesses; without its answer in time there are no drafts."""

    def __init__(self, tokens: Sequence[int], model: Guesser) -> None:
        self._tokens = array("i", tokens)
        self._model = model
        self._known = 0  # tokens that the model has, or will have

    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        """See ``Drafter.propose``. A long prompt is sent, and nothing waits for it."""
        self._tokens.extend(tokens)
        return self._ask(self._tokens, count)

    def go_on(self, tokens: Sequence[int], assumed: Sequence[int], count: int) -> Drafts:
        """See ``ChainDrafter.go_on``."""
        self._tokens.extend(tokens)
        return self._ask(self._tokens + array("i", assumed), count)

    def _ask(self, tokens: array[int], count: int) -> Drafts:
        if count < 1:
            return NO_DRAFTS
        waits = len(self._tokens) - self._known <= _MOST_BEHIND
        reply = self._model.ask(tokens, count if waits else 1, within_s=_MOST_WAIT_S if waits else 0.0)
        if reply.sent:
            self._known = len(self._tokens)
        return Drafts(reply.ids, (DraftSource.MODEL,) * len(reply.ids), reply.late_us)


@dataclass(frozen=True, slots=True)
class DraftWish:
    """Drafts to make for a sequence behind the tokens that its row samples."""

    drafter: SequenceDrafter
    count: int  # at most
    sequence: SequenceId
    lot: int = 0  # above 0: drafts come beside the steps, so many at a time, and ``count`` bounds them all
