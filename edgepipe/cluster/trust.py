"""The trust store: owner-signed statements, their union, and the members of the cluster that follow from them.

A store is a value. Merging is the union of two sets of statements, so the order of merges does not matter; ``standing``
computes the effect from the whole set. A store is bounded: statements with effect always have room, other statements
(mostly of removed machines) have a little. PURE: no clock, no disk; keys and random bytes are parameters.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType

from edgepipe.cluster.standing import MAX_PER_SIGNER, Rank, Standing, stand
from edgepipe.cluster.statements import (
    MAX_KEPT,
    MAX_NAME_CHARS,
    Statement,
    certificate_of,
    decode,
    key_of,
    sign,
    verifies,
)
from edgepipe.errors import TrustInvalid
from edgepipe.ids import NodeId
from edgepipe.security.certificates import Certificate, KeyPair
from edgepipe.security.trust_view import Role, TrustedPeer
from edgepipe.wire.trust import Add, Found, Remove, TrustBody, TrustStatement

MAX_IDLE_BYTES = 384 << 10  # limit of statements without effect, which may get one when missing statements arrive
_STEM_CHARS = MAX_NAME_CHARS - 5  # room for a number
_MAX_REFUSALS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustStore:
    """A cluster's statements and the members that follow. Build it with ``found_cluster`` or ``read_store``."""

    cluster_id: str
    cluster_name: str
    # Validly signed statements under their keys; each signer's own add stands before its statements.
    statements: Mapping[bytes, Statement]
    standing: Standing
    digest: bytes = field(repr=False)  # equal in two stores exactly if their statements are

    @property
    def peers(self) -> Mapping[NodeId, TrustedPeer]:
        """The members of the cluster."""
        return self.standing.peers

    @property
    def removed(self) -> frozenset[NodeId]:
        """Removed nodes; their keys stay out."""
        return self.standing.removed

    def owners(self) -> list[TrustedPeer]:
        """Return the peers that may change trust, by name."""
        return sorted((peer for peer in self.peers.values() if peer.role is Role.OWNER), key=lambda peer: peer.name)

    def signed(self) -> tuple[TrustStatement, ...]:
        """Return all statements as they travel, in an order in which another store can take them."""
        return tuple(statement.signed for statement in self.statements.values())

    def name_for(self, node_id: NodeId, wanted: str) -> str:
        """Return ``wanted``, with a number if another peer has that name. A node with a number keeps it."""
        own = self.peers.get(node_id)
        stem = wanted[:_STEM_CHARS]
        if own is not None and (own.name == wanted or re.fullmatch(re.escape(stem) + r"-\d+", own.name)):
            return own.name
        taken = {peer.name for peer in self.peers.values() if peer.node_id != node_id}
        numbered = (f"{stem}-{number}" for number in count(2))
        return wanted if wanted not in taken else next(name for name in numbered if name not in taken)

    def added_only_by(self, node_id: NodeId, *, remover: NodeId) -> list[TrustedPeer]:
        """Return the peers other than these two that would not belong without the adds of ``node_id``."""
        rest = [
            statement
            for statement in self.statements.values()
            if statement.signer != node_id or statement.role is None or statement.about == remover
        ]
        without = stand(self.founding, rest).peers
        return [peer for key, peer in self.peers.items() if key not in without and key not in (node_id, remover)]

    def removals_for(self, node_id: NodeId, *, remover: NodeId, keep_added: bool) -> list[tuple[NodeId, list[bytes]]]:
        """Return the removals that ``remover`` must make to remove a node for ever: node, keys of what still counts.

        The node's own removals still count, and with ``keep_added`` its adds. Without ``keep_added``, the nodes that
        stop counting with it are removed, too. Nodes that only removed owners had removed are removed again.
        """
        others = [] if keep_added else [peer.node_id for peer in self.added_only_by(node_id, remover=remover)]
        said = self._removals(remover, [node_id, *others], keep_adds=keep_added)
        back = sorted(self.removed - self._after(said).removed)
        said += self._removals(remover, back, keep_adds=keep_added)
        return [(removal.about, sorted(removal.kept)) for removal in said]

    def _removals(self, remover: NodeId, gone: Iterable[NodeId], *, keep_adds: bool) -> list[Statement]:
        """Build removals by ``remover``, without signatures."""
        return [
            Statement(
                body=b"",
                signature=b"",
                key=b"removal of " + node_id.encode(),
                signer=remover,
                about=node_id,
                cluster_id=self.cluster_id,
                made_ms=0,
                number=self.next_number(remover),
                kept=frozenset(self.kept_by_removal(node_id, adds=keep_adds)),
            )
            for node_id in gone
        ]

    def _after(self, said: Iterable[Statement]) -> Standing:
        return stand(self.founding, [*self.statements.values(), *said])

    @property
    def founding(self) -> Statement:
        """The first statement of the cluster."""
        return next(statement for statement in self.statements.values() if statement.founds)

    def next_number(self, signer: NodeId) -> int:
        """Return the number of ``signer``'s next statement."""
        return 1 + max(
            (statement.number for statement in self.statements.values() if statement.signer == signer), default=0
        )

    def kept_by_removal(self, node_id: NodeId, *, adds: bool) -> list[bytes]:
        """Return the keys that a removal of ``node_id`` keeps now: of its removals, and with ``adds`` of its adds."""
        said = [
            statement
            for statement in self.standing.counting
            if statement.signer == node_id and (adds or statement.role is None)
        ]
        return [statement.key for statement in said[:MAX_KEPT]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The result of a merge."""

    store: TrustStore
    new: tuple[Statement, ...]  # added to the store, in no order
    refused: tuple[str, ...]  # reasons for the others; at most a few
    num_refused: int


def found_cluster(*, name: str, node_name: str, founder: KeyPair, nonce: bytes, now_ms: int) -> TrustStore:
    """Found a cluster of one node, owned by ``founder``. Its id is the hash of its founding statement."""
    found = Found(cluster_name=name, nonce=nonce, certificate=founder.certificate.pem, node_name=node_name)
    body = TrustBody(signer=founder.fingerprint, made_ms=now_ms, number=1, statement=found)
    return read_store([sign(body, founder)])


def add_statement(
    store: TrustStore, *, signer: KeyPair, certificate: Certificate, role: Role, name: str, now_ms: int
) -> TrustStatement:
    """Sign an ``Add``. Raises TrustInvalid unless ``signer`` is an owner and the key was never removed."""
    require_owner(store, NodeId(signer.fingerprint))
    node_id = NodeId(certificate.fingerprint)
    if node_id in store.removed:
        raise TrustInvalid(
            f"{name or node_id} was removed from this cluster, and that key stays out",
            next_step=f"on {name or 'that machine'}: edgepipe node join --new-identity CODE",
        )
    added = Add(certificate=certificate.pem, role=role, node_name=name)
    return sign(_body(store, signer, now_ms, added), signer)


def removal_statements(
    store: TrustStore, *, signer: KeyPair, node_id: NodeId, now_ms: int, keep_added: bool = False
) -> list[TrustStatement]:
    """Sign the statements by which an owner removes a node for ever: see ``TrustStore.removals_for``.

    Raises TrustInvalid unless ``signer`` is an owner other than ``node_id``.
    """
    own = NodeId(signer.fingerprint)
    require_owner(store, own)
    if own == node_id:
        raise TrustInvalid(
            "a node cannot remove itself",
            fact=f"'{store.peers[own].name}' is this node",
            next_step="remove it from another owner's machine",
        )
    gone, number = store.removals_for(node_id, remover=own, keep_added=keep_added), store.next_number(own)
    return [
        sign(_body(store, signer, now_ms, Remove(node_id=about, kept=tuple(kept)), number=number + offset), signer)
        for offset, (about, kept) in enumerate(gone)
    ]


def read_store(statements: Iterable[TrustStatement], *, cluster_id: str = "") -> TrustStore:
    """Build the store of these statements; leave foreign ones out. Raises TrustInvalid without exactly one founding
    statement of the cluster (of any cluster if ``cluster_id`` is empty)."""
    decoded, _ = _decode_all(statements)
    founders = {
        statement.cluster_id: statement
        for statement in decoded
        if statement.founds and cluster_id in ("", statement.cluster_id)
    }
    if len(founders) != 1:
        raise TrustInvalid("the trust store has no founding statement", fact=f"{len(founders)} were found")
    (founder,) = founders.values()
    if not verifies(founder, certificate_of(founder)):
        raise TrustInvalid("the founding statement of the cluster is not signed by its founder")
    return _grow(store_of(founder, []), decoded).store


def merge(store: TrustStore, statements: Iterable[TrustStatement]) -> Merged:
    """Add to the store the statements that an owner of its cluster signed."""
    decoded, refused = _decode_all(signed for signed in statements if key_of(signed.body) not in store.statements)
    grown = _grow(store, decoded)
    return Merged(
        store=grown.store,
        new=grown.new,
        refused=(*refused, *grown.refused)[:_MAX_REFUSALS],
        num_refused=len(refused) + grown.num_refused,
    )


def is_owner(store: TrustStore, node_id: NodeId) -> bool:
    """Return whether the node may change trust now."""
    peer = store.peers.get(node_id)
    return peer is not None and peer.role is Role.OWNER


def require_owner(store: TrustStore, signer: NodeId) -> None:
    """Raise TrustInvalid, naming the owners, unless ``signer`` is an owner now."""
    if not is_owner(store, signer):
        names = ", ".join(owner.name for owner in store.owners())
        raise TrustInvalid(
            "only an owner of the cluster may change its members",
            fact=f"this node is a member; owners: {names or 'none is left'}",
            next_step="run the command on an owner's machine",
        )


def _body(store: TrustStore, signer: KeyPair, now_ms: int, statement: Add | Remove, *, number: int = 0) -> TrustBody:
    return TrustBody(
        cluster_id=store.cluster_id,
        signer=signer.fingerprint,
        made_ms=now_ms,
        number=number or store.next_number(NodeId(signer.fingerprint)),
        statement=statement,
    )


def _decode_all(statements: Iterable[TrustStatement]) -> tuple[list[Statement], list[str]]:
    good: list[Statement] = []
    refused: list[str] = []
    for signed in statements:
        try:
            good.append(decode(signed))
        except TrustInvalid as error:
            refused.append(str(error))
    return good, refused


def _grow(store: TrustStore, candidates: Iterable[Statement]) -> Merged:
    """Take candidates signed by any node that was ever made an owner, until no more fit: a batch may hold its signers'
    own adds."""
    known = dict(store.statements)
    waiting = {statement.key: statement for statement in candidates if statement.key not in known}
    foreign = [
        statement for statement in waiting.values() if statement.cluster_id != store.cluster_id or statement.founds
    ]
    for statement in foreign:
        del waiting[statement.key]
    owners = {statement.about: certificate_of(statement) for statement in known.values() if statement.adds_owner}
    taken: dict[bytes, Statement] = {}
    badly_signed: list[Statement] = []
    while ready := [statement for statement in waiting.values() if statement.signer in owners]:
        for statement in ready:
            del waiting[statement.key]
            if not verifies(statement, owners[statement.signer]):
                badly_signed.append(statement)
                continue
            taken[statement.key] = statement
            if statement.adds_owner:
                owners.setdefault(statement.about, certificate_of(statement))
    grown = store_of(store.founding, [*known.values(), *taken.values()]) if taken else store
    new = tuple(statement for key, statement in taken.items() if key in grown.statements)
    refused = [f"a statement of another cluster ({statement.cluster_id})" for statement in foreign]
    refused += [
        f"a statement about {statement.about[:20]} with a bad signature of {statement.signer[:20]}"
        for statement in badly_signed
    ]
    refused += [
        f"a statement about {statement.about[:20]} by {statement.signer[:20]}, no owner"
        for statement in waiting.values()
    ]
    if len(new) < len(taken):
        refused.append(f"{len(taken) - len(new)} statements without effect, beyond the limit for them")
    return Merged(store=grown, new=new, refused=tuple(refused[:_MAX_REFUSALS]), num_refused=len(refused))


def store_of(founder: Statement, statements: Iterable[Statement]) -> TrustStore:
    """Build the store of validly signed statements of one cluster: those with effect, and a few of the others."""
    by_key = {statement.key: statement for statement in statements}
    standing = stand(founder, by_key.values())
    held = {statement.key: statement for statement in (founder, *standing.counting)}
    held |= {
        statement.key: statement
        for statement in _idle(standing, [statement for key, statement in by_key.items() if key not in held])
    }
    return TrustStore(
        cluster_id=founder.cluster_id,
        cluster_name=founder.founds,
        statements=MappingProxyType(held),
        standing=standing,
        digest=hashlib.sha256(b"".join(sorted(held))).digest(),
    )


def _idle(standing: Standing, rest: list[Statement]) -> list[Statement]:
    """Choose the statements without effect to keep: elders' first, of each signer as many as may ever count."""
    last: Rank = (1 << 30, ())
    room = MAX_IDLE_BYTES
    by_signer: dict[NodeId, int] = {}
    kept: list[Statement] = []
    for statement in sorted(
        rest,
        key=lambda statement: (
            standing.ranks.get(statement.signer, last),
            statement.signer,
            statement.number,
            statement.key,
        ),
    ):
        by_signer[statement.signer] = by_signer.get(statement.signer, 0) + 1
        if by_signer[statement.signer] <= MAX_PER_SIGNER and len(statement.body) <= room:
            room -= len(statement.body)
            kept.append(statement)
    return kept
