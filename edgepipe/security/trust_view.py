"""What channels and servers need to know of trust: who this process is, and whom it may talk to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from edgepipe.ids import NodeId
from edgepipe.security.certificates import Certificate, KeyPair


class Role(StrEnum):
    """What a member of a cluster may do."""

    OWNER = "owner"  # changes who belongs to the cluster, and all that a member does
    MEMBER = "member"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedPeer:
    """A node that belongs to the cluster now."""

    node_id: NodeId  # the fingerprint of its certificate's public key
    name: str  # as it was when it joined
    role: Role
    certificate: Certificate


class TrustView(Protocol):
    """Trust as it is at this moment. Every method may be called from any thread (gRPC asks from its own); what they
    return never changes afterwards."""

    @property
    def key_pair(self) -> KeyPair:
        """This process's own key and certificate."""
        ...

    def member(self, fingerprint: str) -> TrustedPeer | None:
        """The member whose public key hashes to ``fingerprint`` (``certificates.fingerprint``, which is its node id);
        None for strangers, for removed ones, and for everybody while the trust store is damaged."""
        ...

    def inbound(self) -> tuple[TrustedPeer, ...]:
        """Members that may connect to this process: none while the trust store is damaged."""
        ...

    def outbound(self) -> tuple[TrustedPeer, ...]:
        """Members that this process may connect to."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yields at once and then after every change of the members, on the event loop only."""
        ...
