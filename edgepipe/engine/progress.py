"""PURE: net progress of requests over epochs, and the requests that epochs end with before they get further.

A sequence is further when more of it is computed than in any earlier epoch: a new output token, or a later position of
its prompt. Steps that compute lost positions again are no progress, however many of them retire.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from edgepipe.engine.settings import MOST_STALLS, SUSPECTED_STALLS
from edgepipe.ids import NodeId, RequestId, RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochProgress:
    """Progress of one epoch's requests."""

    further: bool = False  # a sequence got further than in any earlier epoch
    stalled: frozenset[RequestKey] = frozenset()  # computed in the epoch, but no sequence of theirs got further
    waiting: frozenset[RequestKey] = frozenset()  # requests that the epoch did not compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """Consequences of an epoch that ended by a fault."""

    suspects: frozenset[RequestKey] = frozenset()
    refused: RequestKey | None = None
    nodes: tuple[NodeId | None, ...] = ()  # ended the epochs of the refused request, oldest first


class Stalls:
    """Counts, for each request, the epochs in a row that ended before it got further."""

    def __init__(self) -> None:
        self._ended_by: dict[RequestKey, tuple[NodeId | None, ...]] = {}  # nodes that ended those epochs

    def keep_only(self, requests: Collection[RequestKey]) -> None:
        """Forget all other requests: they got further, or ended."""
        self._ended_by = {key: nodes for key, nodes in self._ended_by.items() if key in requests}

    def forget(self, requests: Iterable[RequestKey]) -> None:
        """Forget these requests, because a stage was at fault."""
        for key in requests:
            self._ended_by.pop(key, None)

    def note(self, stalled: Iterable[RequestKey], node_id: NodeId | None) -> None:
        """Count an epoch that ``node_id`` ended for these requests, without a verdict."""
        for key in stalled:
            self._ended_by[key] = (*self._ended_by.get(key, ())[-MOST_STALLS:], node_id)

    def count(self, stalled: Collection[RequestKey], node_id: NodeId | None) -> Stalled:
        """Count an epoch that ``node_id`` ended for these requests, and judge them."""
        self.note(stalled, node_id)
        worst = max(stalled, key=self._rank, default=None)
        if worst is None or len(self._ended_by[worst]) < MOST_STALLS:
            return Stalled(suspects=self._suspects())
        return Stalled(refused=worst, nodes=self._ended_by.pop(worst), suspects=self._suspects())

    def in_all_of(self, num_epochs: int, requests: Iterable[RequestKey]) -> bool:
        """Return whether one of these requests stalled in each of so many epochs before."""
        return any(len(self._ended_by.get(key, ())) >= num_epochs for key in requests)

    def _rank(self, key: RequestKey) -> tuple[int, NodeId, RequestId]:
        return len(self._ended_by[key]), key.node_id, key.request_id

    def _suspects(self) -> frozenset[RequestKey]:
        """Return all that stalled, once one of them did so often: a trial beside another of them proves nothing."""
        often = any(len(nodes) >= SUSPECTED_STALLS for nodes in self._ended_by.values())
        return frozenset(self._ended_by) if often else frozenset()
