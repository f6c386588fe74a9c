"""Who stands in the cluster, given all statements: worked out from the founder down, the elder before the younger.

An owner is the elder of another if fewer vouchers stand between it and the founder; of two at the same distance, whose
vouchers come first (by the number that their signers gave the adds). Owners have their say in that order:

- Whoever is removed by an elder says nothing from then on but what every such removal lists as ``kept``.
- Somebody younger can remove an elder, who is out with all it holds; but no removal by somebody younger takes back what
  an elder says. So of two owners who remove each other the elder stays, and no ring of removals is without an end.
- Nothing counts that nobody said who has a say.

That a removed owner's word is bounded by its removal, and not by when it was said, is the whole point: a machine that
was removed can sign what it likes with any date. That the elder wins is a choice that has to be made: two statements
that deny each other tell nobody which was made first. ``docs/adr/trust.md`` has the argument.

PURE. The cost is one pass over the statements that are held, of which there are at most
``MAX_OWNERS * MAX_PER_SIGNER``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from edgepipe.cluster.statements import MAX_KEPT, Statement, certificate_of
from edgepipe.ids import NodeId
from edgepipe.security.trust_view import Role, TrustedPeer

MAX_OWNERS = 32  # who may have a say, those included who were removed since; the eldest
MAX_PER_SIGNER = MAX_KEPT  # statements of one owner that count; a home has a few dozen machines
MAX_BYTES_PER_SIGNER = 96 << 10  # 32 owners' whole word is 3 MB, less than one message may have

Rank = tuple[int, tuple[tuple[int, bytes], ...]]
"""Adds between an owner and the founder; then number and key of each of those. The smaller is the elder."""

_FOUNDER: Rank = (0, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What follows from a set of statements."""

    peers: Mapping[NodeId, TrustedPeer]  # who belongs to the cluster
    removed: frozenset[NodeId]
    ranks: Mapping[NodeId, Rank]  # of everybody who has a say, or had one that was bounded
    counting: tuple[Statement, ...]  # what has effect, the elders' first, each one's in the order it was said


def stand(founder: Statement, statements: Iterable[Statement]) -> Standing:
    """Work it out. All statements are well signed and of the founder's cluster."""
    said: dict[NodeId, list[Statement]] = defaultdict(list)
    for one in statements:
        if not one.founds:
            said[one.signer].append(one)
    hearing = _Hearing(founder)
    while (owner := hearing.next_owner()) is not None:
        hearing.hear(owner, said[owner])
    return hearing.outcome()


class _Hearing:
    """Owners have their say, the elder before the younger."""

    def __init__(self, founder: Statement) -> None:
        self._founder = founder
        self._ranks: dict[NodeId, Rank] = {}
        self._waiting: list[tuple[Rank, Statement]] = [(_FOUNDER, founder)]
        self._heard: list[Statement] = []
        self._removals: dict[NodeId, list[Statement]] = defaultdict(list)  # heard so far, by whom they remove

    def next_owner(self) -> NodeId | None:
        """The eldest who was not heard yet; None if everybody was."""
        while self._waiting and len(self._ranks) < MAX_OWNERS:
            rank, add = heappop(self._waiting)
            if add.about not in self._ranks:
                self._ranks[add.about] = rank
                return add.about
        return None

    def hear(self, owner: NodeId, said: Iterable[Statement]) -> None:
        """What the owner says, as far as elders let it: they all were heard before."""
        depth, path = self._ranks[owner]
        bounds = tuple(self._removals[owner])
        for one in _spoken(one for one in said if all(_keeps(removal, one) for removal in bounds)):
            self._heard.append(one)
            if one.role is None:
                self._removals[one.about].append(one)
            elif one.adds_owner:
                heappush(self._waiting, ((depth + 1, (*path, (one.number, one.key))), one))

    def outcome(self) -> Standing:
        """After everybody was heard."""
        removed = frozenset(about for about, removals in self._removals.items() if removals)
        peers: dict[NodeId, TrustedPeer] = {}
        for one in sorted((self._founder, *self._heard), key=lambda one: (one.about, one.made_ms, one.body)):
            if one.role is not None and one.about not in removed:
                peers[one.about] = TrustedPeer(
                    node_id=one.about,
                    name=one.name,
                    role=Role.OWNER if one.about in self._ranks else Role.MEMBER,
                    certificate=certificate_of(one),
                )
        return Standing(peers=peers, removed=removed, ranks=self._ranks, counting=tuple(self._heard))


def _keeps(removal: Statement, one: Statement) -> bool:
    """Whether a statement of whom ``removal`` removes still counts.

    Removals of the earlier form say nothing of it. They keep what that form had count for ever, as far as it is of that
    form too: the signer's removals of others than the remover, and its add of the remover.
    """
    if removal.number:
        return one.key in removal.kept
    return not one.number and (one.role is None) == (one.about != removal.signer)


def _spoken(said: Iterable[Statement]) -> list[Statement]:
    """The newest of each kind about each node, as many as one signer may say; removals first."""
    newest: dict[tuple[NodeId, Role | None], Statement] = {}
    for one in sorted(said, key=lambda one: (one.number, one.key)):
        newest[one.about, one.role] = one
    spoken: list[Statement] = []
    room = MAX_BYTES_PER_SIGNER
    for one in sorted(newest.values(), key=lambda one: (one.role is not None, one.number, one.key))[:MAX_PER_SIGNER]:
        room -= len(one.body)
        if room >= 0:
            spoken.append(one)
    return spoken
