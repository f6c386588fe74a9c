"""A node's signed word that it is up and runs a pipeline's engine, passed on by members that hear it.

The asking node chooses the challenge, so an old proof is worth nothing, and only the node itself can make a new one.
"""

from __future__ import annotations

import secrets

from edgepipe.daemon.serving.serve_book import ServeTrust

_CONTEXT = b"edgepipe-alive-1"  # a signature made for this is valid for nothing else
_CHALLENGE_BYTES = 32
_MOST_PROOF_BYTES = 80  # ECDSA P-256 in DER has at most 72


class AliveProofs:
    """Makes and checks proofs with a node's key and its view of the cluster's members."""

    def __init__(self, trust: ServeTrust) -> None:
        self._trust = trust

    def challenge(self) -> bytes:
        """Return a new challenge."""
        return secrets.token_bytes(_CHALLENGE_BYTES)

    def prove(self, pipeline_id: str, challenge: bytes) -> bytes:
        """Sign that this node is up and runs the pipeline's engine; empty for a challenge of another length."""
        if len(challenge) != _CHALLENGE_BYTES:
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
