"""Drafts: tokens that may follow a sequence's known ones. A step verifies some of them at once, in a window of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

from edgepipe.errors import ConfigInvalid
from edgepipe.units import parse_duration_s

MOST_DRAFTS = 7
"""Drafts of one window: with the known token before them they are 8 rows, as many as the replays of CPUs take."""


class DraftSource(IntEnum):
    """Where a draft comes from. How often drafts are right is counted for each source."""

    UNKNOWN = 0
    GRAMMAR = 1  # the grammar allows little else
    LOOKUP_SHORT = 2  # it followed the same 2 or 3 tokens before
    LOOKUP = 3  # the same 4 to 7 tokens
    LOOKUP_LONG = 4  # the same 8 tokens or more
    MODEL = 5  # a second model


class Drafts(NamedTuple):
    """Drafts in their order, each with its source."""

    ids: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    late_us: int = 0  # time that a draft model took for tokens that it had missed: drafts of later turns do not

    def then(self, more: Drafts) -> Drafts:
        """Return these drafts and those that follow them."""
        return Drafts(self.ids + more.ids, self.sources + more.sources, self.late_us + more.late_us)


NO_DRAFTS = Drafts()


class Drafter(Protocol):
    """Proposes the next tokens of one sequence. One thread uses it at a time."""

    def propose(self, tokens: Sequence[int], count: int) -> Drafts:
        """Append ``tokens`` to the sequence. Return at most ``count`` drafts of what follows."""
        ...


@runtime_checkable
class ChainDrafter(Protocol):
    """A drafter that goes on behind its drafts before it knows which of them are right."""

    def go_on(self, tokens: Sequence[int], assumed: Sequence[int], count: int) -> Drafts:
        """Append ``tokens`` to the sequence. Return at most ``count`` drafts of what follows it and ``assumed``.

        The next call of ``propose`` or ``go_on`` does not count ``assumed`` as tokens of the sequence.
        """
        ...


class DraftModel(Protocol):
    """A model that drafts for the one that a device serves."""

    def drafter(self, tokens: Sequence[int]) -> Drafter:
        """Return the drafter of a sequence that begins with ``tokens``."""
        ...


class Acceptance:
    """The probability that a draft is right, by the sequence's length: ``"0.8"``, or ``"0.8:200,0.1"``.

    The second text means 0.8 for drafts of the first 200 tokens, prompt included, and 0.1 for later ones.
    """

    def __init__(self, text: str) -> None:
        """Raises ConfigInvalid."""
        parts = [part.partition(":") for part in text.split(",")]
        try:
            self._parts = [(float(share), int(until) if colon else None) for share, colon, until in parts]
        except ValueError:
            self._parts = []
        bounds = [until for _, until in self._parts]
        if not bounds or None in bounds[:-1] or bounds[-1] is not None or any(not 0 <= a <= 1 for a, _ in self._parts):
            raise ConfigInvalid(
                f"drafts cannot be right with '{text}'", fact="it is a share such as 0.7, or 0.8:200,0.1 by tokens"
            )

    def at(self, position: int) -> float:
        """Return the probability for a draft of the token at ``position``."""
        return next(share for share, until in self._parts if until is None or position < until)


@dataclass(frozen=True, slots=True)
class RightByPlace:
    """The share of right drafts by their place in a window, if those before them are right."""

    shares: tuple[float, ...]  # for the first place, the second, ...; the last one holds for all later places

    def at(self, place: int) -> float:
        """Return the share at ``place``, counted from 0."""
        return self.shares[min(place, len(self.shares) - 1)]

    @property
    def by_place(self) -> tuple[float, ...]:
        """The shares of all drafts that a window may have."""
        return tuple(map(self.at, range(MOST_DRAFTS)))


RIGHT = RightByPlace((0.7,))
"""Assumed of a draft model. Texts differ: quotes have more, new prose may have half as many."""

MTP_RIGHT = RightByPlace((0.8, 0.7, 0.6))
"""Assumed of the model's own layer: it is trained for the first draft, and continues with its own output behind that.
Three drafts then give 2.7 tokens a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImaginedDrafts:
    """An imagined draft model, or a layer of the model that drafts."""

    acceptance: Acceptance
    token_s: float  # seconds that a draft takes
    by_place: RightByPlace = RightByPlace((1.0,))  # factor on ``acceptance``
    goes_on: bool = True  # see ``ChainDrafter``

    def right(self, position: int, place: int) -> float:
        """Return the probability that a draft is right: the token at ``position``, at ``place`` in its window."""
        return self.acceptance.at(position) * self.by_place.at(place)

    @classmethod
    def by_own_layer(cls, token_s: float) -> ImaginedDrafts:
        """Return the drafts of the model's own layer; ``token_s``: seconds of each."""
        return cls(acceptance=Acceptance("1"), token_s=token_s, by_place=MTP_RIGHT, goes_on=False)

    @classmethod
    def of(cls, text: str) -> ImaginedDrafts:
        """Read the share of right drafts and the time of each: ``"0.7,3ms"``. Raises ConfigInvalid."""
        share, comma, time = text.rpartition(",")
        if not comma:
            raise ConfigInvalid(
                f"--draft cannot be '{text}'",
                fact="it is the share of drafts that are right and the time of each",
                next_step="give it like 0.7,3ms, or off",
            )
        return cls(acceptance=Acceptance(share), token_s=parse_duration_s(time))
