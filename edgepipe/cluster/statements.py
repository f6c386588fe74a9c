"""Owners' statements on the cluster's members: decoding, checks of their form, signing.

Signatures cover the very bytes that travel, and only one encoding of a statement is valid: no data travels in fields
that no reader checks. PURE: no clock, no disk; keys are parameters.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from edgepipe.errors import CertificateInvalid, RemoteProtocolError, TrustInvalid
from edgepipe.ids import NodeId
from edgepipe.security.certificates import Certificate, KeyPair, read_certificate
from edgepipe.security.trust_view import Role
from edgepipe.wire.signed import trust_body_from_bytes, trust_body_to_bytes
from edgepipe.wire.trust import Add, Found, Remove, TrustBody, TrustStatement

MAX_KEPT = 96  # keys in one removal: as many statements as a store holds of one signer, ``standing.MAX_PER_SIGNER``
MAX_STATEMENT_BYTES = 4096  # a removal with so many keys has 3.2 KB, an add 1.2 KB
NONCE_BYTES = 16
KEY_BYTES = 32
MAX_NAME_CHARS = 63
_CONTEXT = b"edgepipe-trust-1"  # a signature made for trust is valid for nothing else
_NODE_ID = re.compile(r"[a-z2-7]{52}")
_CLUSTER_ID = re.compile(r"[a-z2-7]{26}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One statement, decoded and well-formed; the store that takes it checks its signature."""

    body: bytes
    signature: bytes
    key: bytes  # its identity: SHA-256 of the body alone, since ECDSA signatures can be rewritten without the key
    signer: NodeId
    about: NodeId
    role: Role | None = None  # None: a removal
    certificate: Certificate | None = None  # certificate of ``about``; None in removals
    name: str = ""
    founds: str = ""  # the cluster's name, in the founding statement only
    cluster_id: str
    made_ms: int
    number: int  # counts its signer's statements, from 1
    kept: frozenset[bytes] = frozenset()  # a removal's keys of statements by ``about`` that still count

    @property
    def adds_owner(self) -> bool:
        """Whether it makes a node an owner."""
        return self.role is Role.OWNER

    @property
    def signed(self) -> TrustStatement:
        """The statement as it travels."""
        return TrustStatement(body=self.body, signature=self.signature)


def key_of(body: bytes) -> bytes:
    """Return ``Statement.key`` of a body."""
    return hashlib.sha256(body).digest()


def certificate_of(statement: Statement) -> Certificate:
    """Return the certificate of an add, which always has one."""
    assert statement.certificate is not None, "only removals have none"
    return statement.certificate


def sign(body: TrustBody, signer: KeyPair) -> TrustStatement:
    """Sign a body; return the statement as it travels."""
    data = trust_body_to_bytes(body)
    return TrustStatement(body=data, signature=signer.sign(_CONTEXT + data))


def verifies(statement: Statement, certificate: Certificate) -> bool:
    """Return whether the certificate's key signed the statement."""
    return certificate.verifies(statement.signature, _CONTEXT + statement.body)


def decode(signed: TrustStatement) -> Statement:
    """Check a statement's form, not its signature. Raises TrustInvalid."""
    if len(signed.body) + len(signed.signature) > MAX_STATEMENT_BYTES:
        raise TrustInvalid("a trust statement is too long", fact=f"{len(signed.body)} bytes")
    try:
        body = trust_body_from_bytes(signed.body)
    except RemoteProtocolError as exc:
        raise TrustInvalid("a trust statement cannot be read") from exc
    if body.statement is None:
        raise TrustInvalid("a trust statement has a kind unknown here", fact="it may come from a newer version")
    if trust_body_to_bytes(body) != signed.body:
        raise TrustInvalid("a trust statement has fields unknown here", fact="it may come from a newer version")
    if not _NODE_ID.fullmatch(body.signer):
        raise TrustInvalid("a trust statement has no signer")
    make = partial(
        Statement,
        body=signed.body,
        signature=signed.signature,
        key=key_of(signed.body),
        signer=NodeId(body.signer),
        cluster_id=body.cluster_id or _cluster_id(signed.body),  # the founding statement's own hash
        made_ms=body.made_ms,
        number=body.number,
    )
    if isinstance(body.statement, Found):
        return _decode_found(make, body, body.statement)
    if not _CLUSTER_ID.fullmatch(body.cluster_id):
        raise TrustInvalid("a trust statement names no cluster")
    if isinstance(body.statement, Add):
        return _decode_add(make, body.statement)
    return _decode_removal(make, body, body.statement)


def _decode_found(make: Callable[..., Statement], body: TrustBody, found: Found) -> Statement:
    certificate = _checked(found.certificate)
    about = NodeId(certificate.fingerprint)
    if about != body.signer or body.cluster_id or len(found.nonce) != NONCE_BYTES:
        raise TrustInvalid("a founding statement is not its founder's")
    return make(
        about=about,
        role=Role.OWNER,
        certificate=certificate,
        name=_short(found.node_name),
        founds=_short(found.cluster_name) or "cluster",
    )


def _decode_add(make: Callable[..., Statement], add: Add) -> Statement:
    if add.role not in list(Role):
        raise TrustInvalid("a trust statement gives a role unknown here")
    certificate = _checked(add.certificate)
    return make(
        about=NodeId(certificate.fingerprint),
        role=Role(add.role),
        certificate=certificate,
        name=_short(add.node_name),
    )


def _decode_removal(make: Callable[..., Statement], body: TrustBody, removal: Remove) -> Statement:
    about, kept = removal.node_id, removal.kept
    if not _NODE_ID.fullmatch(about):
        raise TrustInvalid("a trust statement removes a node with a malformed id")
    if about == body.signer:
        raise TrustInvalid("a trust statement removes its own signer")
    if len(kept) > MAX_KEPT or any(len(key) != KEY_BYTES for key in kept):
        raise TrustInvalid("a removal has a malformed list of kept statements", fact=f"{len(kept)} statements")
    return make(about=about, kept=frozenset(kept))


def _checked(pem: bytes) -> Certificate:
    try:
        certificate = read_certificate(pem)
    except CertificateInvalid as exc:
        raise TrustInvalid("a trust statement holds a certificate that is not accepted", fact=exc.fact) from exc
    if certificate.pem != pem:
        raise TrustInvalid("a trust statement holds more than a certificate")
    return certificate


def _short(text: str) -> str:
    if len(text) > MAX_NAME_CHARS or not text.isprintable():
        raise TrustInvalid("a trust statement holds a name that cannot be shown")
    return text


def _cluster_id(founding_body: bytes) -> str:
    """Return 26 characters of base32: 130 bits of the hash."""
    return base64.b32encode(hashlib.sha256(_CONTEXT + founding_body).digest()).decode().lower()[:26]
