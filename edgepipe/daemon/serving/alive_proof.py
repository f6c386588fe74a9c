"""A node's signed word that it is up and runs a pipeline's engine, passed on by members that hear it.

The asking node chooses the challenge, so an old proof is worth nothing, and only the node itself can make a new one.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from edgepipe.clock import Clock
from edgepipe.daemon.serving.serve_book import ServeTrust

_CONTEXT = b"edgepipe-alive-1"  # a signature made for this is valid for nothing else
_CHALLENGE_BYTES = 32
_MOST_PROOF_BYTES = 80  # ECDSA P-256 in DER has at most 72
_RELAYED_PER_S, _MOST_RELAYED = 2.0, 16.0  # calls of one member, which asks every 5 s for each of its lost engines
_SIGNED_PER_S, _MOST_SIGNED = 16.0, 128.0  # signatures for one member, which relays for some eight others
_MOST_CALLERS = 64  # far more members than a home has


@dataclass(slots=True)
class _Budget:
    """How many calls each member may still make now."""

    per_s: float
    most: float
    # Calls left, and when they were counted.
    left: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def takes(self, caller: str, *, now_s: float) -> bool:
        """Count a call; return whether the member may make it."""
        left, as_of_s = self.left.pop(caller, (self.most, now_s))
        left = min(self.most, left + self.per_s * (now_s - as_of_s))
        allowed = left >= 1.0
        self.left[caller] = (left - allowed, now_s)
        if len(self.left) > _MOST_CALLERS:
            del self.left[next(iter(self.left))]
        return allowed


class AliveProofs:
    """Makes and checks proofs with a node's key and its view of the cluster's members."""

    def __init__(self, trust: ServeTrust, clock: Clock) -> None:
        self._trust = trust
        self._clock = clock
        self._relayed = _Budget(_RELAYED_PER_S, _MOST_RELAYED)
        self._signed = _Budget(_SIGNED_PER_S, _MOST_SIGNED)

    def challenge(self) -> bytes:
        """Return a new challenge."""
        return secrets.token_bytes(_CHALLENGE_BYTES)

    def may_relay(self, caller: str) -> bool:
        """Return whether this node still asks other nodes for a member's questions now, and count one."""
        return self._relayed.takes(caller, now_s=self._clock.monotonic_s())

    def prove(self, pipeline_id: str, challenge: bytes, *, caller: str) -> bytes:
        """Sign that this node is up and runs the pipeline's engine.

        Return nothing for a challenge of another length, or to a member that asks too often.
        """
        if len(challenge) != _CHALLENGE_BYTES or not self._signed.takes(caller, now_s=self._clock.monotonic_s()):
            return b""
        return self._trust.key_pair.sign(_signed(pipeline_id, challenge))

    def holds(self, node_id: str, pipeline_id: str, challenge: bytes, proof: bytes) -> bool:
        """Return whether a member of the cluster has signed this challenge for the pipeline."""
        member = self._trust.known(node_id)
        if member is None or not proof or len(proof) > _MOST_PROOF_BYTES:
            return False
        return member.certificate.verifies(proof, _signed(pipeline_id, challenge))


def _signed(pipeline_id: str, challenge: bytes) -> bytes:
    return _CONTEXT + challenge + pipeline_id.encode()
