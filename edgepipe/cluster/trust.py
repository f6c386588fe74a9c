"""The trust store: owner-signed statements, their union, and who belongs to the cluster because of them.

A store is a value. Merging is the union of two sets of statements, so it does not matter who tells whom first; what
counts is worked out anew from the whole set by ``standing``. What a store may hold is bounded: what counts always has
room, and what does not (said by machines that were removed, above all) has a little. PURE: no clock, no disk; keys and
random bytes are handed in.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType

from edgepipe.cluster.standing import MAX_BYTES_PER_SIGNER, MAX_OWNERS, MAX_PER_SIGNER, Rank, Standing, stand
from edgepipe.cluster.statements import (
    MAX_KEPT,
    MAX_NAME_CHARS,
    Statement,
    certificate_of,
    decode,
    key_of,
    sign,
    to_wire,
    verifies,
)
from edgepipe.errors import TrustInvalid
from edgepipe.ids import NodeId
from edgepipe.security.certificates import Certificate, KeyPair
from edgepipe.security.trust_view import Role, TrustedPeer
from edgepipe.wire.v1 import trust_pb2 as pb

MAX_IDLE_BYTES = 384 << 10  # of statements that do not count; they may yet, when the rest of their story is heard
MAX_STORE_BYTES = MAX_OWNERS * MAX_BYTES_PER_SIGNER + MAX_IDLE_BYTES + (256 << 10)  # with signatures: less than 4 MB
_STEM_CHARS = MAX_NAME_CHARS - 5  # room for a number
_MAX_REFUSALS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustStore:
    """A cluster's statements and who counts because of them. Build with ``found_cluster`` or ``read_store``."""

    cluster_id: str
    cluster_name: str
    statements: Mapping[bytes, Statement]  # by key, whoever vouches before whom it vouches for; all are well signed
    standing: Standing
    digest: bytes = field(repr=False)  # equal in two stores exactly if their statements are

    @property
    def peers(self) -> Mapping[NodeId, TrustedPeer]:
        """Who belongs to the cluster."""
        return self.standing.peers

    @property
    def removed(self) -> frozenset[NodeId]:
        """Whose keys stay out."""
        return self.standing.removed

    def owners(self) -> list[TrustedPeer]:
        """Peers who may change trust, by name."""
        return sorted((one for one in self.peers.values() if one.role is Role.OWNER), key=lambda one: one.name)

    def to_wire(self) -> pb.TrustSet:
        """All statements, in an order in which they can be taken in."""
        return pb.TrustSet(statements=to_wire(self.statements.values()))

    def name_for(self, node_id: NodeId, wanted: str) -> str:
        """``wanted``, or with a number where another peer is called so. Who was numbered stays so."""
        own = self.peers.get(node_id)
        stem = wanted[:_STEM_CHARS]
        if own is not None and (own.name == wanted or re.fullmatch(re.escape(stem) + r"-\d+", own.name)):
            return own.name
        taken = {peer.name for peer in self.peers.values() if peer.node_id != node_id}
        numbered = (f"{stem}-{number}" for number in count(2))
        return wanted if wanted not in taken else next(name for name in numbered if name not in taken)

    def added_only_by(self, node_id: NodeId, *, remover: NodeId) -> list[TrustedPeer]:
        """Peers other than these two who would not belong without the adds of ``node_id``."""
        rest = [
            one for one in self.statements.values() if one.signer != node_id or one.role is None or one.about == remover
        ]
        without = stand(self.founding, rest).peers
        return [peer for key, peer in self.peers.items() if key not in without and key not in (node_id, remover)]

    def removals_for(self, node_id: NodeId, *, remover: NodeId, keep_added: bool) -> list[tuple[NodeId, list[bytes]]]:
        """What ``remover`` has to say to remove a node for ever: whom it removes, and the keys of what still counts.

        Of what the node said, its removals still count, and with ``keep_added`` its adds; without, who stops counting
        with it is removed, too. Whom only those who go had removed is removed anew.
        """
        others = [] if keep_added else [one.node_id for one in self.added_only_by(node_id, remover=remover)]
        said = self._removals(remover, [node_id, *others], keep_adds=keep_added)
        back = sorted(self.removed - self._after(said).removed)
        said += self._removals(remover, back, keep_adds=keep_added)
        return [(one.about, sorted(one.kept)) for one in said]

    def _removals(self, remover: NodeId, gone: Iterable[NodeId], *, keep_adds: bool) -> list[Statement]:
        """As ``remover`` would say them; nobody has signed them."""
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

    def is_elder(self, one: NodeId, other: NodeId) -> bool:
        """Whether ``one`` is, or was, an owner whose word comes before the other's."""
        ranks = self.standing.ranks
        return one in ranks and (other not in ranks or ranks[one] < ranks[other])

    @property
    def founding(self) -> Statement:
        """The first statement of the cluster."""
        return next(one for one in self.statements.values() if one.founds)

    def next_number(self, signer: NodeId) -> int:
        """Of the next statement that ``signer`` makes."""
        return 1 + max((one.number for one in self.statements.values() if one.signer == signer), default=0)

    def kept_by_removal(self, node_id: NodeId, *, adds: bool) -> list[bytes]:
        """Keys of what still counts of ``node_id`` when it is removed now: its removals, and its adds if wanted."""
        said = [one for one in self.standing.counting if one.signer == node_id and (adds or one.role is None)]
        return [one.key for one in said[:MAX_KEPT]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What came of a merge."""

    store: TrustStore
    new: tuple[Statement, ...]  # taken in, in no order
    refused: tuple[str, ...]  # why others were not; at most a few
    num_refused: int


def found_cluster(*, name: str, node_name: str, founder: KeyPair, nonce: bytes, now_ms: int) -> TrustStore:
    """A cluster of one, owned by ``founder``. Its id is the hash of its founding statement."""
    found = pb.Found(cluster_name=name, nonce=nonce, certificate=founder.certificate.pem, node_name=node_name)
    body = pb.TrustBody(signer=founder.fingerprint, made_ms=now_ms, number=1, found=found)
    return read_store([sign(body, founder)])


def add_statement(
    store: TrustStore, *, signer: KeyPair, certificate: Certificate, role: Role, name: str, now_ms: int
) -> pb.TrustStatement:
    """``Add``, signed. Raises TrustInvalid unless ``signer`` is an owner and the key was never removed."""
    require_owner(store, NodeId(signer.fingerprint))
    node_id = NodeId(certificate.fingerprint)
    if node_id in store.removed:
        raise TrustInvalid(
            f"{name or node_id} was removed from this cluster, and that key stays out",
            next_step=f"on {name or 'that machine'}: edgepipe node join --new-identity CODE",
        )
    added = pb.Add(certificate=certificate.pem, role=role, node_name=name)
    return sign(_body(store, signer, now_ms, add=added), signer)


def removal_statements(
    store: TrustStore, *, signer: KeyPair, node_id: NodeId, now_ms: int, keep_added: bool = False
) -> list[pb.TrustStatement]:
    """All that an owner says to remove a node for ever, as ``TrustStore.removals_for`` has it.

    Raises TrustInvalid unless ``signer`` is an owner and another than ``node_id``.
    """
    own = NodeId(signer.fingerprint)
    require_owner(store, own)
    if own == node_id:
        raise TrustInvalid(
            "a node cannot remove itself",
            fact=f"'{store.peers[own].name}' is this node",
            next_step="remove it from another owner's machine",
        )
    return _signed_removals(store, signer, store.removals_for(node_id, remover=own, keep_added=keep_added), now_ms)


def _signed_removals(
    store: TrustStore, signer: KeyPair, gone: Iterable[tuple[NodeId, list[bytes]]], now_ms: int
) -> list[pb.TrustStatement]:
    number = store.next_number(NodeId(signer.fingerprint))
    statements: list[pb.TrustStatement] = []
    for offset, (node_id, kept) in enumerate(gone):
        removed = pb.Remove(node_id=node_id, kept=kept)
        statements.append(sign(_body(store, signer, now_ms, number=number + offset, remove=removed), signer))
    return statements


def renewed_removals(store: TrustStore, *, signer: KeyPair, now_ms: int) -> list[pb.TrustStatement]:
    """Removals of owners in the earlier form, which bound nothing, said again by an owner in the present one.

    Empty if nothing needs it, and if ``signer`` is no owner. The adds that those removals left are kept.
    """
    if not is_owner(store, NodeId(signer.fingerprint)):
        return []
    removals = [one for one in store.standing.counting if one.role is None]
    bounded = {one.about for one in removals if one.number}
    open_ones = sorted({one.about for one in removals if one.about in store.standing.ranks} - bounded)
    gone = [(node_id, sorted(store.kept_by_removal(node_id, adds=True))) for node_id in open_ones]
    return _signed_removals(store, signer, gone, now_ms)


def read_store(statements: Iterable[pb.TrustStatement], *, cluster_id: str = "") -> TrustStore:
    """The store that these statements make. Raises TrustInvalid without exactly one founding statement of the cluster
    (any cluster, if none is named); other statements that do not belong are left out."""
    decoded, _ = _decode_all(statements)
    founders = {one.cluster_id: one for one in decoded if one.founds and cluster_id in ("", one.cluster_id)}
    if len(founders) != 1:
        raise TrustInvalid("the trust store has no founding statement", fact=f"{len(founders)} were found")
    (founder,) = founders.values()
    if not verifies(founder, certificate_of(founder)):
        raise TrustInvalid("the founding statement of the cluster is not signed by its founder")
    return _grow(store_of(founder, []), decoded).store


def merge(store: TrustStore, statements: Iterable[pb.TrustStatement]) -> Merged:
    """The union of the store and what of ``statements`` an owner of its cluster signed."""
    decoded, refused = _decode_all(one for one in statements if key_of(one.body) not in store.statements)
    grown = _grow(store, decoded)
    return Merged(
        store=grown.store,
        new=grown.new,
        refused=(*refused, *grown.refused)[:_MAX_REFUSALS],
        num_refused=len(refused) + grown.num_refused,
    )


def is_owner(store: TrustStore, node_id: NodeId) -> bool:
    """Whether it may change trust now."""
    peer = store.peers.get(node_id)
    return peer is not None and peer.role is Role.OWNER


def require_owner(store: TrustStore, signer: NodeId) -> None:
    """Raise TrustInvalid, naming who may, unless ``signer`` is an owner now."""
    if not is_owner(store, signer):
        names = ", ".join(one.name for one in store.owners())
        raise TrustInvalid(
            "only an owner of the cluster may change who belongs to it",
            fact=f"this node is a member; owners: {names or 'none is left'}",
            next_step="run the command on an owner's machine",
        )


def _body(store: TrustStore, signer: KeyPair, now_ms: int, *, number: int = 0, **statement: object) -> pb.TrustBody:
    return pb.TrustBody(
        cluster_id=store.cluster_id,
        signer=signer.fingerprint,
        made_ms=now_ms,
        number=number or store.next_number(NodeId(signer.fingerprint)),
        **statement,  # pyright: ignore[reportArgumentType] - one of ``add`` and ``remove``
    )


def _decode_all(statements: Iterable[pb.TrustStatement]) -> tuple[list[Statement], list[str]]:
    good: list[Statement] = []
    refused: list[str] = []
    for wire in statements:
        try:
            good.append(decode(wire))
        except TrustInvalid as error:
            refused.append(str(error))
    return good, refused


def _grow(store: TrustStore, candidates: Iterable[Statement]) -> Merged:
    """Take in whatever somebody signed who was ever made an owner, until nothing more fits: a batch may hold its
    signers' own adds."""
    known = dict(store.statements)
    waiting = {one.key: one for one in candidates if one.key not in known}
    foreign = [one for one in waiting.values() if one.cluster_id != store.cluster_id or one.founds]
    for one in foreign:
        del waiting[one.key]
    owners = {one.about: certificate_of(one) for one in known.values() if one.adds_owner}
    taken: dict[bytes, Statement] = {}
    badly_signed: list[Statement] = []
    while ready := [one for one in waiting.values() if one.signer in owners]:
        for one in ready:
            del waiting[one.key]
            if not verifies(one, owners[one.signer]):
                badly_signed.append(one)
                continue
            taken[one.key] = one
            if one.adds_owner:
                owners.setdefault(one.about, certificate_of(one))
    grown = store_of(store.founding, [*known.values(), *taken.values()]) if taken else store
    new = tuple(one for key, one in taken.items() if key in grown.statements)
    refused = [f"a statement of another cluster ({one.cluster_id})" for one in foreign]
    refused += [f"a statement about {one.about[:20]} with a bad signature of {one.signer[:20]}" for one in badly_signed]
    refused += [f"a statement about {one.about[:20]} by {one.signer[:20]}, no owner" for one in waiting.values()]
    if len(new) < len(taken):
        refused.append(f"{len(taken) - len(new)} statements that do not count, beyond what is kept of such")
    return Merged(store=grown, new=new, refused=tuple(refused[:_MAX_REFUSALS]), num_refused=len(refused))


def store_of(founder: Statement, statements: Iterable[Statement]) -> TrustStore:
    """The store that these make, all well signed and of one cluster: what counts of them, and a little of the rest."""
    by_key = {one.key: one for one in statements}
    standing = stand(founder, by_key.values())
    held = {one.key: one for one in (founder, *standing.counting)}
    held |= {one.key: one for one in _idle(standing, [one for key, one in by_key.items() if key not in held])}
    return TrustStore(
        cluster_id=founder.cluster_id,
        cluster_name=founder.founds,
        statements=MappingProxyType(held),
        standing=standing,
        digest=hashlib.sha256(b"".join(sorted(held))).digest(),
    )


def _idle(standing: Standing, rest: list[Statement]) -> list[Statement]:
    """What is kept of statements without effect: of the elders first, of each signer as many as may ever count."""
    last: Rank = (1 << 30, ())
    room = MAX_IDLE_BYTES
    by_signer: dict[NodeId, int] = {}
    kept: list[Statement] = []
    for one in sorted(rest, key=lambda one: (standing.ranks.get(one.signer, last), one.signer, one.number, one.key)):
        by_signer[one.signer] = by_signer.get(one.signer, 0) + 1
        if by_signer[one.signer] <= MAX_PER_SIGNER and len(one.body) <= room:
            room -= len(one.body)
            kept.append(one)
    return kept
