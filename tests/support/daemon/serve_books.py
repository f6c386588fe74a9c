"""Nodes' serve books in one process, each with what its node knows of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from edgepipe.cluster.statements import NONCE_BYTES
from edgepipe.cluster.trust import TrustStore, add_statement, found_cluster, merge, removal_statements
from edgepipe.daemon.serving.serve_book import ServeBook
from edgepipe.ids import NodeId
from edgepipe.security.certificates import KeyPair, make_key_pair
from edgepipe.security.trust_view import Role, TrustedPeer
from edgepipe.testing.clock import FakeClock
from edgepipe.wire.engines import ServeSpec
from edgepipe.wire.serving import ServeBody
from edgepipe.wire.signed import serve_body_from_bytes
from tests.support.daemon.published_state import FakeState


@dataclass(slots=True)
class Shared:
    """The trust that all nodes of a test share, and its clock."""

    store: TrustStore
    keys: dict[str, KeyPair]
    clock: FakeClock = field(default_factory=FakeClock)

    def node_id(self, name: str) -> str:
        return self.keys[name].fingerprint

    def remove(self, name: str, *, by: str) -> None:
        removal = removal_statements(
            self.store, signer=self.keys[by], node_id=NodeId(self.node_id(name)), now_ms=9, keep_added=True
        )
        self.store = merge(self.store, removal).store


@dataclass(slots=True)
class NodeTrust:
    """``ServeTrust`` of one node."""

    shared: Shared
    key_pair: KeyPair

    @property
    def cluster_id(self) -> str:
        return self.shared.store.cluster_id

    def known(self, node_id: str) -> TrustedPeer | None:
        return self.shared.store.peers.get(NodeId(node_id))


@dataclass(frozen=True, slots=True)
class NoSigns:
    """``EngineSigns``: no node is gone or without its engine."""

    state: str = ""

    def is_gone(self, node_id: str) -> bool:
        return False

    def lacks_engine(self, node_id: str, pipeline_id: str) -> bool:
        return False

    def engine_state(self, node_id: str, pipeline_id: str) -> str:
        return self.state


@dataclass(slots=True)
class BookNode:
    """A node with its book; ``gone`` and ``engines`` are what it knows by itself."""

    name: str
    node_id: str
    book: ServeBook
    gone: set[str]
    engines: dict[tuple[str, str], str]  # (node id, pipeline): state
    idle: set[tuple[str, str]]  # (node id, pipeline): long without the engine

    def hears(self, other: BookNode) -> list[ServeBody]:
        return self.book.merge(other.node_id, other.book.records())

    @property
    def held(self) -> dict[str, tuple[str, bool]]:
        """Models with the node of their engine and whether they are stopped."""
        bodies = [serve_body_from_bytes(record.body) for record in self.book.records()]
        return {body.spec.model: (body.engine_node, body.stopped) for body in bodies}


def shared(owners: str, members: str) -> Shared:
    """A cluster whose founder is the first owner."""
    keys = {name: make_key_pair() for name in owners + members}
    founder = keys[owners[0]]
    store = found_cluster(name="home", node_name=owners[0], founder=founder, nonce=bytes(NONCE_BYTES), now_ms=1)
    for name in owners[1:] + members:
        role = Role.OWNER if name in owners else Role.MEMBER
        added = add_statement(store, signer=founder, certificate=keys[name].certificate, role=role, name=name, now_ms=2)
        store = merge(store, [added]).store
    return Shared(store, keys)


def node(trust: Shared, name: str, folder: Path) -> BookNode:
    """One node of it; its file is kept in ``folder``."""
    gone: set[str] = set()
    engines: dict[tuple[str, str], str] = {}
    idle: set[tuple[str, str]] = set()
    (folder / name).mkdir(exist_ok=True)
    signs = SimpleNamespace(
        is_gone=gone.__contains__,
        lacks_engine=lambda node_id, pipeline_id: (node_id, pipeline_id) in idle,
        engine_state=lambda node_id, pipeline_id: engines.get((node_id, pipeline_id), ""),
    )
    book = ServeBook(
        folder / name / "served.bin",
        trust=NodeTrust(trust, trust.keys[name]),
        signs=cast("Any", signs),
        clock=trust.clock,
        local=FakeState(),
    )
    return BookNode(name, trust.node_id(name), book, gone, engines, idle)


def nodes(folder: Path, *, owners: str = "a", members: str = "bcd") -> tuple[Shared, dict[str, BookNode]]:
    """A cluster with one book per node."""
    trust = shared(owners, members)
    return trust, {name: node(trust, name, folder) for name in owners + members}


def spec(model: str = "tiny", manifest_hash: str = "h") -> ServeSpec:
    return ServeSpec(model=model, manifest_hash=manifest_hash)


def all_hear(everybody: dict[str, BookNode], *, but: str = "") -> None:
    """Everybody hears everybody, twice: what one says of what it heard is heard, too."""
    present = [member for name, member in everybody.items() if name not in but]
    for _ in range(2):
        for hearer in present:
            for other in present:
                if hearer is not other:
                    hearer.hears(other)


def lone_book(folder: Path) -> ServeBook:
    """Of a node that is alone in its cluster, at ``folder``."""
    trust = shared("a", "")
    return ServeBook(
        folder / "served.bin",
        trust=NodeTrust(trust, trust.keys["a"]),
        signs=NoSigns(),
        clock=trust.clock,
        local=FakeState(),
        write_again_s=0.01,
    )
