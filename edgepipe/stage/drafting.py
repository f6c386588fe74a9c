"""Drafts for the sequences of a step, beside their samplers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgepipe.backend.drafting import NO_DRAFTS, Drafter, Drafts, DraftSource
from edgepipe.errors import EdgepipeError
from edgepipe.sampling import SequenceSampler
from edgepipe.sampling.lookup import LookupDrafter
from edgepipe.stage.draft_process import Guesser
from edgepipe.stage.mtp_drafter import MtpDrafter

_MOST_WAIT_S = 1.0  # for a draft model's guesses; then drafts come from a lookup
_MOST_BEHIND = 64  # tokens that a draft model has missed, beyond which nothing waits until it has computed them


class SequenceDrafter:
    """The drafter of one sequence: what its grammar forces comes before what its own drafter proposes."""

    def __init__(
        self, make: Callable[[], Drafter], sampler: SequenceSampler, *, follows: MtpDrafter | None = None
    ) -> None:
        """
        make     called when the first drafts are wanted, on a sampler thread, since long prompts take time
        follows  the drafter, if it takes part in the sequence's steps
        """
        self._make = make
        self.follows = follows
        self._drafter: Drafter | None = None
        self._sampler = sampler
        self._new: list[int] = []  # tokens that the sequence's own drafter does not know yet

    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        """See ``Drafter.propose``."""
        self._new += tokens
        if count < 1:
            return NO_DRAFTS
        if forced := self._forced(count):
            return Drafts(tuple(forced), (DraftSource.GRAMMAR,) * len(forced))
        if self._drafter is None:
            self._drafter = self._make()
        new, self._new = self._new, []
        return self._drafter.propose(new, count)

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


class ModelDrafter:
    """See ``Drafter``. A draft model in another process guesses; without its answer in time there are no drafts."""

    def __init__(self, tokens: Sequence[int], model: Guesser) -> None:
        self._tokens = array("i", tokens)
        self._model = model
        self._known = 0  # tokens that the model has, or will have

    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        """See ``Drafter.propose``. A long prompt is sent, and nothing waits for it."""
        self._tokens.extend(tokens)
        if count < 1:
            return NO_DRAFTS
        waits = len(self._tokens) - self._known <= _MOST_BEHIND
        reply = self._model.ask(self._tokens, count if waits else 1, within_s=_MOST_WAIT_S if waits else 0.0)
        if reply.sent:
            self._known = len(self._tokens)
        return Drafts(reply.ids, (DraftSource.MODEL,) * len(reply.ids), reply.late_us)


@dataclass(frozen=True, slots=True)
class DraftWish:
    """Drafts to make for a sequence behind the tokens that its row samples."""

    drafter: Drafter
    count: int  # at most
