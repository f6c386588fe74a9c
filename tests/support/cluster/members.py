"""Speaking to running nodes as a member of their cluster, or as a stranger."""

from __future__ import annotations

from pathlib import Path

from edgepipe.cluster.founding import TrustFolders
from edgepipe.cluster.identity import load_identity
from edgepipe.cluster.trust_file import TrustFile
from edgepipe.ids import NodeId
from edgepipe.security.access import ProcessKind
from edgepipe.security.certificates import KeyPair, make_key_pair
from edgepipe.security.mutual_tls import MutualTls, Peer


def member_of(data_dir: Path) -> MutualTls:
    """The security of the node that ``data_dir`` belongs to; it knows whom that node trusted when it last wrote."""
    folders = TrustFolders(data_dir)
    loaded = TrustFile(folders.trust).load()
    assert loaded is not None, "the node has never been started"
    peers = [
        Peer(node_id=peer.node_id, kind=ProcessKind.NODE, certificate=peer.certificate)
        for peer in loaded.store.peers.values()
    ]
    tls = MutualTls(load_identity(folders.identity), callers=(ProcessKind.NODE,))
    tls.introduce(peers, nodes=peers)
    return tls


def stranger_to(data_dir: Path, *, pair: KeyPair | None = None) -> MutualTls:
    """The security of somebody who knows the node's certificate and was never let in."""
    node = load_identity(TrustFolders(data_dir).identity).certificate
    tls = MutualTls(pair or make_key_pair(), callers=())
    tls.introduce([], nodes=[Peer(node_id=NodeId(node.fingerprint), kind=ProcessKind.NODE, certificate=node)])
    return tls
