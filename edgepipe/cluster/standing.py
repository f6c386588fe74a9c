"""Computes the members of a cluster from all statements: from the founder down, the elder owner before the younger.

An owner is the elder of another if fewer adds are between it and the founder. At the same distance the adds decide: by
the numbers that their signers gave them, from the founder on. Owners are heard in that order:

- After an owner is removed by its elders, only those of its statements count that every such removal lists as ``kept``.
- A younger owner can remove an elder, which then is no member. But its removal voids none of the elder's statements.
  So of two owners that remove each other the elder stays, and every ring of removals has an end.
- Only the statements of owners count.

A list in the removal bounds a removed owner's statements, not their dates: a removed machine can sign anything with any
date. That the elder wins is a choice: two statements that deny each other do not show which was made first.
``docs/adr/trust.md`` has the argument.

PURE. The cost is one pass over the held statements, of which there are at most ``MAX_OWNERS * MAX_PER_SIGNER``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from edgepipe.cluster.statements import MAX_KEPT, Statement, certificate_of
from edgepipe.ids import NodeId
from edgepipe.security.trust_view import Role, TrustedPeer

MAX_OWNERS = 32  # owners that are heard, including removed ones; the eldest
MAX_PER_SIGNER = MAX_KEPT  # statements of one owner that count; a home has a few dozen machines
MAX_BYTES_PER_SIGNER = 96 << 10  # all statements of 32 owners take 3 MB, less than the largest message

Rank = tuple[int, tuple[tuple[int, bytes], ...]]
"""Adds between an owner and the founder; then number and key of each add. The smaller rank is the elder's."""

_FOUNDER: Rank = (0, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The result of a set of statements."""

    peers: Mapping[NodeId, TrustedPeer]  # the cluster's members
    removed: frozenset[NodeId]
    ranks: Mapping[NodeId, Rank]  # ranks of all owners that were heard, including removed ones
    counting: tuple[Statement, ...]  # statements with effect: elders' first, each owner's in the order it made them


def stand(founder: Statement, statements: Iterable[Statement]) -> Standing:
    """Compute the standing. All statements are validly signed and of the founder's cluster."""
    said: dict[NodeId, list[Statement]] = defaultdict(list)
    for statement in statements:
        if not statement.founds:
            said[statement.signer].append(statement)
    hearing = _Hearing(founder)
    while (owner := hearing.next_owner()) is not None:
        hearing.hear(owner, said[owner])
    return hearing.outcome()


class _Hearing:
    """Hears the owners' statements, the elder before the younger."""

    def __init__(self, founder: Statement) -> None:
        self._founder = founder
        self._ranks: dict[NodeId, Rank] = {}
        self._waiting: list[tuple[Rank, Statement]] = [(_FOUNDER, founder)]
        self._heard: list[Statement] = []
        self._removals: dict[NodeId, list[Statement]] = defaultdict(list)  # heard so far, by the removed node

    def next_owner(self) -> NodeId | None:
        """Return the eldest owner that was not heard yet; None if all were heard."""
        while self._waiting and len(self._ranks) < MAX_OWNERS:
            rank, add = heappop(self._waiting)
            if add.about not in self._ranks:
                self._ranks[add.about] = rank
                return add.about
        return None

    def hear(self, owner: NodeId, said: Iterable[Statement]) -> None:
        """Take the owner's statements, as far as its elders' removals allow; all its elders were heard before."""
        depth, path = self._ranks[owner]
        bounds = tuple(self._removals[owner])
        for statement in _spoken(
            statement for statement in said if all(statement.key in removal.kept for removal in bounds)
        ):
            self._heard.append(statement)
            if statement.role is None:
                self._removals[statement.about].append(statement)
            elif statement.adds_owner:
                heappush(self._waiting, ((depth + 1, (*path, (statement.number, statement.key))), statement))

    def outcome(self) -> Standing:
        """Return the standing, after all owners were heard."""
        removed = frozenset(about for about, removals in self._removals.items() if removals)
        peers: dict[NodeId, TrustedPeer] = {}
        for statement in sorted(
            (self._founder, *self._heard), key=lambda statement: (statement.about, statement.made_ms, statement.body)
        ):
            if statement.role is not None and statement.about not in removed:
                peers[statement.about] = TrustedPeer(
                    node_id=statement.about,
                    name=statement.name,
                    role=Role.OWNER if statement.about in self._ranks else Role.MEMBER,
                    certificate=certificate_of(statement),
                )
        return Standing(peers=peers, removed=removed, ranks=self._ranks, counting=tuple(self._heard))


def _spoken(said: Iterable[Statement]) -> list[Statement]:
    """Return the newest statement of each kind about each node, within a signer's limits; removals first."""
    newest: dict[tuple[NodeId, Role | None], Statement] = {}
    for statement in sorted(said, key=lambda statement: (statement.number, statement.key)):
        newest[statement.about, statement.role] = statement
    spoken: list[Statement] = []
    room = MAX_BYTES_PER_SIGNER
    for statement in sorted(
        newest.values(), key=lambda statement: (statement.role is not None, statement.number, statement.key)
    )[:MAX_PER_SIGNER]:
        room -= len(statement.body)
        if room >= 0:
            spoken.append(statement)
    return spoken
