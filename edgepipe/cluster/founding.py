"""How a node gets its identity and its cluster at its start, and how several nodes share a cluster without pairing."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgepipe.clock import Clock
from edgepipe.cluster.identity import load_identity, replace_identity
from edgepipe.cluster.private_files import make_private_folder
from edgepipe.cluster.statements import NONCE_BYTES
from edgepipe.cluster.trust import TrustStore, add_statement, found_cluster, merge
from edgepipe.cluster.trust_file import LoadedTrust, TrustFile
from edgepipe.cluster.trust_keeper import WRITE_AGAIN_S, TrustKeeper
from edgepipe.errors import ConfigInvalid
from edgepipe.plain_words import plain
from edgepipe.security.certificates import KeyPair, make_key_pair
from edgepipe.security.trust_view import Role
from edgepipe.telemetry.audit import AuditKind, AuditLog

DEFAULT_CLUSTER = "home"
_MADE_MS = 0  # time stamp of a local cluster's statements; only shown


@dataclass(frozen=True, slots=True)
class TrustFolders:
    """The paths of identity and trust in a data directory."""

    data_dir: Path

    @property
    def identity(self) -> Path:
        """Key and certificate."""
        return self.data_dir / "identity"

    @property
    def trust(self) -> Path:
        """The trust store."""
        return self.data_dir / "trust"

    @property
    def audit(self) -> Path:
        """The audit log."""
        return self.data_dir / "audit.log"


def open_trust(
    data_dir: Path, *, cluster: str, node_name: str, clock: Clock, write_again_s: float = WRITE_AGAIN_S
) -> TrustKeeper:
    """Open this node's identity and cluster; make what is missing: the node is then alone, and owns the cluster.

    ``cluster``: the name of a new cluster; the name of an existing one, or empty. Raises ConfigInvalid for another
    name, and for files that are damaged beyond use or that others may touch.
    """
    folders = TrustFolders(data_dir)
    make_private_folder(data_dir)
    key_pair = load_identity(folders.identity)
    audit = AuditLog(folders.audit, clock.wall_s)
    file = TrustFile(folders.trust)
    loaded = file.load()
    if loaded is None:
        store = _found(key_pair, cluster=cluster, node_name=node_name, now_ms=int(clock.wall_s() * 1000))
        _save(file, store)
        audit.record(
            AuditKind.FOUNDED, who=f"{node_name} {key_pair.fingerprint}", detail=f"cluster {store.cluster_name}"
        )
        loaded = LoadedTrust(store=store)
    elif cluster and cluster != loaded.store.cluster_name:
        raise ConfigInvalid(
            f"this node belongs to cluster '{loaded.store.cluster_name}', not '{cluster}'",
            fact=f"its trust store is {file.path}",
            next_step="leave --cluster out; to change clusters: edgepipe node join CODE",
        )
    return TrustKeeper(
        key_pair=key_pair, loaded=loaded, file=file, audit=audit, clock=clock, write_again_s=write_again_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCluster:
    """The cluster of a machine."""

    cluster_name: str
    others: tuple[str, ...]  # names, in order; none: the machine is alone in it


def home_of(data_dir: Path) -> OwnCluster | None:
    """Return the cluster that the machine of ``data_dir`` shares with others, running or not; None if it shares none.

    Raises what ``cluster_of`` raises.
    """
    home = cluster_of(data_dir)
    return home if home is not None and home.others else None


def cluster_of(data_dir: Path) -> OwnCluster | None:
    """Return the cluster of the machine of ``data_dir``, running or not; None if it has none yet.

    Creates no files. Raises ConfigInvalid for files that are damaged or that others may touch.
    """
    folders = TrustFolders(data_dir)
    if not (folders.trust.exists() and folders.identity.exists()):
        return None
    loaded = TrustFile(folders.trust).load()
    own = load_identity(folders.identity).fingerprint
    if loaded is None or own not in loaded.store.peers:
        return None
    others = sorted(peer.name for peer in loaded.store.peers.values() if peer.node_id != own)
    return OwnCluster(cluster_name=loaded.store.cluster_name, others=tuple(others))


def begin_anew(data_dir: Path) -> None:
    """Make a new identity without a cluster: another node has the present key, or the key was removed."""
    folders = TrustFolders(data_dir)
    TrustFile(folders.trust).forget()
    replace_identity(folders.identity, make_key_pair())


def adopt_cluster(data_dir: Path, store: TrustStore, key_pair: KeyPair) -> None:
    """Replace this node's cluster by the one that admitted ``key_pair``. Raises ConfigInvalid."""
    folders = TrustFolders(data_dir)
    if load_identity(folders.identity).fingerprint != key_pair.fingerprint:
        replace_identity(folders.identity, key_pair)
    file = TrustFile(folders.trust)
    file.forget()  # the version before belongs to another cluster
    _save(file, store)


def found_local_cluster(data_dirs: Sequence[Path], *, name: str) -> None:
    """Give data directories on one machine identities in one cluster, as pairing would: for demos, benchmarks, tests.

    The first becomes owner. Nodes are named after their directories. Raises ConfigInvalid.
    """
    pairs: list[tuple[Path, KeyPair]] = []
    for data_dir in data_dirs:
        make_private_folder(data_dir)
        pairs.append((data_dir, load_identity(TrustFolders(data_dir).identity)))
    (first, founder), *others = pairs
    store = _found(founder, cluster=name, node_name=first.name, now_ms=_MADE_MS)
    statements = [
        add_statement(
            store,
            signer=founder,
            certificate=pair.certificate,
            role=Role.MEMBER,
            name=data_dir.name,
            now_ms=_MADE_MS,
        )
        for data_dir, pair in others
    ]
    whole = merge(store, statements).store
    for data_dir, _ in pairs:
        _save(TrustFile(TrustFolders(data_dir).trust), whole)


def _found(founder: KeyPair, *, cluster: str, node_name: str, now_ms: int) -> TrustStore:
    return found_cluster(
        name=cluster or DEFAULT_CLUSTER,
        node_name=node_name,
        founder=founder,
        nonce=secrets.token_bytes(NONCE_BYTES),
        now_ms=now_ms,
    )


def _save(file: TrustFile, store: TrustStore) -> None:
    try:
        file.save(store)
    except OSError as exc:
        raise ConfigInvalid(
            f"the trust store {file.path} cannot be written",
            fact=plain(exc),
            next_step="check its permissions and free space, or choose another folder: --data-dir",
        ) from exc
