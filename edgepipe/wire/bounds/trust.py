"""Bounds of ``trust.proto``: how machines join, and the statements of owners."""

from __future__ import annotations

from edgepipe.sampling.bounds import Within
from edgepipe.wire.bounds.rules import BY_SIZE, COUNT, EQUAL, NAMES, NODES, PORT, SHOWN, Checked, Harmless, Tables

_WINDOW_S = Within(0, 86_400)

TRUST: Tables = {
    "InviteStart": {"valid_s": _WINDOW_S},
    "InviteOpened": {"valid_s": _WINDOW_S},
    "InviteFailed": {"tries_left": NODES},
    "InviteAsks": {"at_most_s": _WINDOW_S},
    "JoinRequest": {"port": PORT},
    "JoinDone": {"num_peers": NODES},
    "ListPeersReply": {"peers": NAMES},
    "PeerState": {"added_ms": COUNT},
    "RemovePeerReply": {"others": NAMES},
    "TrustBody": {"made_ms": SHOWN, "number": Harmless("it orders its signer's own statements")},
    "Remove": {"kept": Checked("edgepipe.cluster.statements:decode")},
    "TrustSet": {"statements": BY_SIZE},
    "PairHello": {"protocol_version": EQUAL},
    "PairWaiting": {"at_most_s": _WINDOW_S},
    "PairWelcome": {"addresses": BY_SIZE},
}
