"""The facts of trust for channels and servers: this process's identity, and the members it may talk to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from edgepipe.ids import NodeId
from edgepipe.security.certificates import Certificate, KeyPair


class Role(StrEnum):
    """The rights of a member."""

    OWNER = "owner"  # may change the members, and do all that a member may
    MEMBER = "member"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedPeer:
    """A node that belongs to the cluster now."""

    node_id: NodeId  # the fingerprint of its certificate's public key
    name: str  # the peer's name when it joined
    role: Role
    certificate: Certificate


class TrustView(Protocol):
    """The present trust. Any thread may call every method (gRPC calls from its own threads); results never change
    afterwards."""

    @property
    def key_pair(self) -> KeyPair:
        """This process's own key and certificate."""
        ...

    def member(self, fingerprint: str) -> TrustedPeer | None:
        """Return the member whose public key hashes to ``fingerprint``, which is its node id; None for unknown and for
        removed nodes, and for all nodes while the trust store is damaged."""
        ...

    def inbound(self) -> tuple[TrustedPeer, ...]:
        """Return the members that may connect to this process; empty while the trust store is damaged."""
        ...

    def outbound(self) -> tuple[TrustedPeer, ...]:
        """Return the members that this process may connect to."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yield at once and then after every change of the members; on the event loop only."""
        ...
