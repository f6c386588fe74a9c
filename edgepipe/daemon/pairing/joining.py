"""Joining a cluster, from a running node or without one."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgepipe.cluster.codes import joiner_pake, read_code
from edgepipe.cluster.founding import TrustFolders, adopt_cluster, home_of
from edgepipe.cluster.identity import load_identity
from edgepipe.cluster.pairing import NONCE_BYTES, JoinerPairing, Party
from edgepipe.cluster.pairing_exchange import join
from edgepipe.cluster.private_files import make_private_folder, write_private
from edgepipe.cluster.trust import TrustStore
from edgepipe.cluster.trust_file import TrustFile
from edgepipe.config import NODE_PORT, PAIRING_OFFSET
from edgepipe.errors import ConfigInvalid, PairingRejected
from edgepipe.ids import NodeId
from edgepipe.security.certificates import KeyPair, make_key_pair
from edgepipe.telemetry.audit import AuditKind, AuditLog
from edgepipe.wire.common import Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMember:
    """This machine after it joined."""

    store: TrustStore
    node_name: str
    wanted_name: str = ""  # its own name if another machine already has that name, else empty


async def join_cluster(
    data_dir: Path,
    *,
    node_name: str,
    code: str,
    host: str,
    port: int,
    new_identity: bool,
    audit: AuditLog,
    on_waiting: Callable[[str], None],
) -> NewMember:
    """Pair with ``host`` and keep its cluster in ``data_dir``; no other process may use that folder meanwhile.

    ``host`` may be empty if ``code`` is a long string. ``on_waiting`` gets the host's name when its person is asked.
    Raises ConfigInvalid for a bad code or files, PairingRejected, and the network's errors.
    """
    understood = read_code(code)
    host, port = host or understood.host, port or understood.port or NODE_PORT + PAIRING_OFFSET
    if not host:
        raise ConfigInvalid("an address is needed", next_step="edgepipe node join --host HOST CODE")
    folders = TrustFolders(data_dir)
    make_private_folder(data_dir)
    key_pair = load_identity(folders.identity)
    if new_identity or _must_change(data_dir, key_pair.fingerprint):
        key_pair = make_key_pair()  # written with the new cluster, once pairing succeeds
    party = Party(
        code=understood.secret,
        key_pair=key_pair,
        hello=Hello(role="node", node_id=key_pair.fingerprint, node_name=node_name),
        nonce=secrets.token_bytes(NONCE_BYTES),
    )
    pairing = JoinerPairing(party, joiner_pake, host=understood.node_id)
    await join(
        pairing,
        host=host,
        port=port,
        keep=lambda done: _keep(data_dir, done, key_pair),
        on_waiting=lambda: on_waiting(pairing.other.name if pairing.other else ""),
    )
    assert pairing.store is not None, "the exchange ends with a store or an error"
    name = pairing.store.peers[NodeId(key_pair.fingerprint)].name
    audit.record(AuditKind.JOINED, who=f"{name} {key_pair.fingerprint}", detail=f"cluster {pairing.store.cluster_name}")
    return NewMember(store=pairing.store, node_name=name, wanted_name=node_name if node_name != name else "")


def _must_change(data_dir: Path, node_id: str) -> bool:
    """Return whether a new key is needed: this one was removed. Raises PairingRejected inside a living cluster."""
    if (home := home_of(data_dir)) is not None:
        raise PairingRejected(
            f"this machine is in cluster '{home.cluster_name}' already",
            fact=f"with {', '.join(home.others)}",
            next_step="to leave it: edgepipe node join --new-identity CODE",
        )
    loaded = TrustFile(TrustFolders(data_dir).trust).load()
    return loaded is not None and node_id in loaded.store.removed


def _keep(data_dir: Path, pairing: JoinerPairing, key_pair: KeyPair) -> None:
    assert pairing.store is not None, "called once the store has come"
    adopt_cluster(data_dir, pairing.store, key_pair)
    write_private(data_dir / "addresses.json", json.dumps(pairing.addresses).encode())
