"""Who belongs to the cluster: owner-signed statements, their union, and what follows from them.

A store is a value. It grows only: merging is the union of two sets of statements, so it does not matter who tells whom
first. What counts is worked out anew from the whole set:

- The founder is an owner; whoever an owner adds as owner is one. This closure ignores removals ("ever an owner").
- ``Remove`` by anybody who was ever an owner counts, for ever. Two owners who remove each other are both gone.
- An add counts while its signer is still an owner. A remaining owner stands without its voucher if it removed that
  voucher itself; everybody else whom only a removed owner vouched for stops counting until another owner adds them.

Signatures cover the very bytes that travel. PURE: no clock, no disk; keys and random bytes are handed in.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType

from google.protobuf.message import DecodeError

from edgepipe.errors import CertificateInvalid, TrustInvalid
from edgepipe.ids import NodeId
from edgepipe.link.certificates import Certificate, KeyPair, read_certificate
from edgepipe.link.trust_view import Role, TrustedPeer
from edgepipe.wire.v1 import trust_pb2 as pb

MAX_STATEMENTS = 4096  # an owner who writes more has lost his mind or his key; a home has a few dozen
MAX_STATEMENT_BYTES = 4096  # a certificate is at most 2 KB
NONCE_BYTES = 16
_CONTEXT = b"edgepipe-trust-1"  # keeps a signature made for trust from meaning anything elsewhere
_MAX_NAME_CHARS = 63
_STEM_CHARS = _MAX_NAME_CHARS - 5  # room for a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One statement, decoded and well-formed; its signature is checked by whoever takes it into a store."""

    body: bytes
    signature: bytes
    signer: NodeId
    about: NodeId
    role: Role | None = None  # None: a removal
    certificate: Certificate | None = None  # of ``about``; none in removals
    name: str = ""
    founds: str = ""  # the cluster's name, in the founding statement only
    cluster_id: str
    made_ms: int

    @property
    def key(self) -> bytes:
        """Its identity. The body alone: ECDSA signatures can be rewritten without the key."""
        return hashlib.sha256(self.body).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustStore:
    """A cluster's statements and who counts because of them. Build with ``found_cluster`` or ``read_store``."""

    cluster_id: str
    cluster_name: str
    statements: Mapping[bytes, Statement]  # by ``key``; all signatures are good
    peers: Mapping[NodeId, TrustedPeer]  # who belongs to the cluster
    removed: frozenset[NodeId]
    digest: bytes = field(repr=False)  # equal in two stores exactly if their statements are

    def owners(self) -> list[TrustedPeer]:
        """Peers who may change trust, by name."""
        return sorted((one for one in self.peers.values() if one.role is Role.OWNER), key=lambda one: one.name)

    def to_wire(self) -> pb.TrustSet:
        """All statements, in the order of their keys."""
        trust = pb.TrustSet()
        for key in sorted(self.statements):
            trust.statements.add(body=self.statements[key].body, signature=self.statements[key].signature)
        return trust

    def name_for(self, node_id: NodeId, wanted: str) -> str:
        """``wanted``, or with a number where another peer is called so. Who was numbered stays so."""
        own = self.peers.get(node_id)
        stem = wanted[:_STEM_CHARS]
        if own is not None and (own.name == wanted or re.fullmatch(re.escape(stem) + r"-\d+", own.name)):
            return own.name
        taken = {peer.name for peer in self.peers.values() if peer.node_id != node_id}
        numbered = (f"{stem}-{number}" for number in count(2))
        return wanted if wanted not in taken else next(name for name in numbered if name not in taken)

    def added_only_by(self, signer: NodeId) -> list[TrustedPeer]:
        """Peers other than ``signer`` who would stop counting without it."""
        without = _evaluate(self.statements.values(), also_removed=signer)[0]
        return [peer for node_id, peer in self.peers.items() if node_id not in without and node_id != signer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What came of a merge."""

    store: TrustStore
    new: tuple[Statement, ...]  # taken in, in no order
    refused: tuple[str, ...]  # why others were not; at most a few


def found_cluster(*, name: str, node_name: str, founder: KeyPair, nonce: bytes, now_ms: int) -> TrustStore:
    """A cluster of one, owned by ``founder``. Its id is the hash of its founding statement."""
    found = pb.Found(cluster_name=name, nonce=nonce, certificate=founder.certificate.pem, node_name=node_name)
    body = pb.TrustBody(signer=founder.fingerprint, made_ms=now_ms, found=found)
    return read_store([_signed(body, founder)])


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
    body = pb.TrustBody(cluster_id=store.cluster_id, signer=signer.fingerprint, made_ms=now_ms, add=added)
    return _signed(body, signer)


def remove_statement(store: TrustStore, *, signer: KeyPair, node_id: NodeId, now_ms: int) -> pb.TrustStatement:
    """``Remove``, signed. Raises TrustInvalid unless ``signer`` is an owner."""
    require_owner(store, NodeId(signer.fingerprint))
    removed = pb.Remove(node_id=node_id)
    body = pb.TrustBody(cluster_id=store.cluster_id, signer=signer.fingerprint, made_ms=now_ms, remove=removed)
    return _signed(body, signer)


def read_store(statements: Iterable[pb.TrustStatement], *, cluster_id: str = "") -> TrustStore:
    """The store that these statements make. Raises TrustInvalid without exactly one founding statement of the cluster
    (any cluster, if none is named); other statements that do not belong are left out."""
    decoded, _ = _decode_all(statements)
    founders = {one.cluster_id: one for one in decoded if one.founds and cluster_id in ("", one.cluster_id)}
    if len(founders) != 1:
        raise TrustInvalid("the trust store has no founding statement", fact=f"{len(founders)} were found")
    (founder,) = founders.values()
    if not _verifies(founder, _certificate_of(founder)):
        raise TrustInvalid("the founding statement of the cluster is not signed by its founder")
    return _grow(_store({founder.key: founder}, founder), decoded).store


def merge(store: TrustStore, statements: Iterable[pb.TrustStatement]) -> Merged:
    """The union of the store and what of ``statements`` an owner of its cluster signed."""
    decoded, refused = _decode_all(statements)
    grown = _grow(store, decoded)
    return Merged(store=grown.store, new=grown.new, refused=(*refused, *grown.refused)[:_MAX_REFUSALS])


_MAX_REFUSALS = 8


def decode(wire: pb.TrustStatement) -> Statement:
    """Check a statement's form, not its signature. Raises TrustInvalid."""
    if len(wire.body) + len(wire.signature) > MAX_STATEMENT_BYTES:
        raise TrustInvalid("a trust statement is too long", fact=f"{len(wire.body)} bytes")
    try:
        body = pb.TrustBody.FromString(wire.body)
    except DecodeError as exc:
        raise TrustInvalid("a trust statement cannot be read", fact=str(exc)) from exc
    kind = body.WhichOneof("statement")
    if kind == "found":
        return _decode_found(wire, body)
    if kind == "add":
        return _decode_add(wire, body)
    if kind == "remove":
        return Statement(
            body=wire.body,
            signature=wire.signature,
            signer=NodeId(body.signer),
            about=NodeId(_short(body.remove.node_id)),
            cluster_id=body.cluster_id,
            made_ms=body.made_ms,
        )
    raise TrustInvalid("a trust statement says nothing that is known here", fact="it may come from a newer version")


def _decode_found(wire: pb.TrustStatement, body: pb.TrustBody) -> Statement:
    certificate = _checked(body.found.certificate)
    about = NodeId(certificate.fingerprint)
    if about != body.signer or body.cluster_id or len(body.found.nonce) != NONCE_BYTES:
        raise TrustInvalid("a founding statement is not its founder's")
    return Statement(
        body=wire.body,
        signature=wire.signature,
        signer=about,
        about=about,
        role=Role.OWNER,
        certificate=certificate,
        name=_short(body.found.node_name),
        founds=_short(body.found.cluster_name) or "cluster",
        cluster_id=_cluster_id(wire.body),
        made_ms=body.made_ms,
    )


def _decode_add(wire: pb.TrustStatement, body: pb.TrustBody) -> Statement:
    if body.add.role not in list(Role):
        raise TrustInvalid("a trust statement gives a role unknown here", fact=f"'{body.add.role[:40]}'")
    certificate = _checked(body.add.certificate)
    return Statement(
        body=wire.body,
        signature=wire.signature,
        signer=NodeId(body.signer),
        about=NodeId(certificate.fingerprint),
        role=Role(body.add.role),
        certificate=certificate,
        name=_short(body.add.node_name),
        cluster_id=body.cluster_id,
        made_ms=body.made_ms,
    )


def _checked(pem: bytes) -> Certificate:
    try:
        return read_certificate(pem)
    except CertificateInvalid as exc:
        raise TrustInvalid("a trust statement holds a certificate that is not accepted", fact=exc.fact) from exc


def _short(text: str) -> str:
    if len(text) > _MAX_NAME_CHARS or not text.isprintable():
        raise TrustInvalid("a trust statement holds a name that cannot be shown")
    return text


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
    """Take in whatever an ever-owner signed, until nothing more fits: a batch may hold its signers' own adds."""
    known = dict(store.statements)
    founder = next(one for one in known.values() if one.founds)
    waiting = {one.key: one for one in candidates if one.key not in known}
    foreign = [one for one in waiting.values() if one.cluster_id != store.cluster_id or one.founds]
    for one in foreign:
        del waiting[one.key]
    new: list[Statement] = []
    unsigned: list[Statement] = []
    progress = True
    while progress and waiting:
        owners = _ever_owners(known.values())
        ready = [one for one in waiting.values() if one.signer in owners and len(known) < MAX_STATEMENTS]
        progress = bool(ready)
        for one in ready:
            del waiting[one.key]
            if len(known) < MAX_STATEMENTS and _verifies(one, owners[one.signer]):
                known[one.key] = one
                new.append(one)
            else:
                unsigned.append(one)
    refused = [f"a statement of another cluster ({one.cluster_id[:20]})" for one in foreign]
    refused += [f"a statement about {one.about[:20]} with a bad signature of {one.signer[:20]}" for one in unsigned]
    refused += [f"a statement about {one.about[:20]} by {one.signer[:20]}, no owner" for one in waiting.values()]
    grown = _store(known, founder) if new else store
    return Merged(store=grown, new=tuple(new), refused=tuple(refused[:_MAX_REFUSALS]))


def _store(statements: dict[bytes, Statement], founder: Statement) -> TrustStore:
    peers, removed = _evaluate(statements.values())
    return TrustStore(
        cluster_id=founder.cluster_id,
        cluster_name=founder.founds,
        statements=MappingProxyType(statements),
        peers=MappingProxyType(peers),
        removed=frozenset(removed),
        digest=hashlib.sha256(b"".join(sorted(statements))).digest(),
    )


def _ever_owners(statements: Iterable[Statement]) -> dict[NodeId, Certificate]:
    """Everybody who was ever made an owner, with a certificate of its key. All statements are well signed already."""
    return {one.about: _certificate_of(one) for one in statements if one.role is Role.OWNER}


def _certificate_of(statement: Statement) -> Certificate:
    assert statement.certificate is not None, "only removals have none"
    return statement.certificate


def _evaluate(
    statements: Iterable[Statement], *, also_removed: NodeId | None = None
) -> tuple[dict[NodeId, TrustedPeer], set[NodeId]]:
    """Who counts, and who is removed. ``also_removed``: as if somebody now removed it and kept nobody."""
    held = list(statements)
    removals = {(one.signer, one.about) for one in held if one.role is None}
    removed = {about for _, about in removals} | ({also_removed} if also_removed else set[NodeId]())
    adds = [one for one in held if one.role is not None and one.about not in removed]
    live: set[NodeId] = set()
    grown = True
    while grown:
        standing = {
            one.about
            for one in adds
            if one.role is Role.OWNER and (one.founds or one.signer in live or (one.about, one.signer) in removals)
        }
        grown = not standing <= live
        live |= standing
    peers: dict[NodeId, TrustedPeer] = {}
    for one in sorted(adds, key=lambda one: (one.about, one.made_ms, one.body)):
        if one.founds or one.signer in live or one.about in live:
            peers[one.about] = _peer(one, Role.OWNER if one.about in live else Role.MEMBER)
    return peers, removed


def _peer(statement: Statement, role: Role) -> TrustedPeer:
    return TrustedPeer(
        node_id=statement.about,
        name=statement.name,
        role=role,
        certificate=_certificate_of(statement),
    )


def require_owner(store: TrustStore, signer: NodeId) -> None:
    """Raise TrustInvalid, naming who may, unless ``signer`` is an owner now."""
    peer = store.peers.get(signer)
    if peer is None or peer.role is not Role.OWNER:
        names = ", ".join(one.name for one in store.owners())
        raise TrustInvalid(
            "only an owner of the cluster may change who belongs to it",
            fact=f"this node is a member; owners: {names or 'none is left'}",
            next_step="run the command on an owner's machine",
        )


def _signed(body: pb.TrustBody, signer: KeyPair) -> pb.TrustStatement:
    data = body.SerializeToString(deterministic=True)
    return pb.TrustStatement(body=data, signature=signer.sign(_CONTEXT + data))


def _verifies(statement: Statement, certificate: Certificate) -> bool:
    return certificate.verifies(statement.signature, _CONTEXT + statement.body)


def _cluster_id(founding_body: bytes) -> str:
    """26 characters of base32: 130 bits of the hash."""
    return base64.b32encode(hashlib.sha256(_CONTEXT + founding_body).digest()).decode().lower()[:26]
