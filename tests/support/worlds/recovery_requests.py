"""Requests of a virtual engine: how far they are, which ones an epoch computes, and which ones the core suspects."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from edgepipe.engine.progress import EpochProgress
from edgepipe.ids import RequestKey, SequenceId

TOKENS = 5  # tokens of a request
_AT_ONCE = 8  # requests in one step


@dataclass(slots=True, eq=False)
class Asked:
    """One request of one sequence."""

    key: RequestKey
    sequence: SequenceId
    asked_s: float
    chunks: int = 1  # steps that its prompt takes
    poison: bool = False  # breaks every step that it is in
    kills: bool = False  # ends a stage's process between steps, before its prompt is read
    computed: int = 0  # chunks that this epoch has computed
    furthest: int = 0  # chunks that any epoch has computed
    tokens: int = 0
    before: int = 0  # ``position`` when the epoch began
    begun: bool = False  # the epoch computes it
    crashes: int = 0
    suspected: bool = False
    unlucky: int = 0  # epochs in a row that a machine's own fault ended before it got further

    @property
    def position(self) -> int:
        """How far it ever was."""
        return self.chunks + self.tokens if self.tokens else self.furthest

    @property
    def ended(self) -> bool:
        """Whether it has its answer."""
        return self.tokens >= TOKENS

    @property
    def is_further(self) -> bool:
        """Whether it got further in this epoch than in any before."""
        return self.position > self.before

    def compute(self) -> None:
        """One step of it: a chunk of its prompt, or a token."""
        self.begun = True
        if self.computed < self.chunks:
            self.computed += 1
            self.furthest = max(self.furthest, self.computed)
            self.tokens += self.computed == self.chunks  # the last chunk samples
        else:
            self.tokens += 1


class Requests:
    """All requests that have not ended."""

    def __init__(self) -> None:
        self.all: list[Asked] = []
        self._sampled = False

    def begin_epoch(self) -> None:
        """All stages have lost their KV."""
        self._sampled = False
        for request in self.all:
            request.before, request.computed, request.begun = request.position, 0, False

    def batch(self) -> list[Asked]:
        """The next step: a request whose steps broke alone, or all but suspected ones behind the first of these."""
        broken = [request for request in self.all if request.crashes >= 2]
        held_back = [request for request in self.all if request.suspected and not request.is_further][1:]
        return broken[:1] or [request for request in self.all if request not in held_back][:_AT_ONCE]

    def compute(self, batch: Collection[Asked]) -> None:
        """The step comes back."""
        for request in batch:
            tokens, request.crashes = request.tokens, 0
            request.compute()
            self._sampled |= request.tokens > tokens
            if request.is_further:
                request.suspected, request.unlucky = False, 0
        self.all = [request for request in self.all if not request.ended]

    def progress(self) -> EpochProgress:
        """The epoch's, when it has ended."""
        begun = [request for request in self.all if request.begun]
        return EpochProgress(
            further=self._sampled or any(request.is_further for request in begun),
            stalled=frozenset(request.key for request in begun if not request.is_further),
            waiting=frozenset(request.key for request in self.all if not request.begun),
        )
