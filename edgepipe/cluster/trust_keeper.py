"""The running node's trust: one store, its effect on channels and servers, and every change of it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from edgepipe.clock import Clock
from edgepipe.cluster.changes import Changes
from edgepipe.cluster.statements import Statement, key_of
from edgepipe.cluster.trust import (
    TrustStore,
    add_statement,
    merge,
    removal_statements,
)
from edgepipe.cluster.trust_file import LoadedTrust, TrustFile
from edgepipe.errors import ConfigInvalid, TrustInvalid
from edgepipe.ids import NodeId
from edgepipe.plain_words import plain
from edgepipe.security.certificates import Certificate, KeyPair
from edgepipe.security.trust_view import Role, TrustedPeer
from edgepipe.telemetry.audit import AuditKind, AuditLog
from edgepipe.wire.trust import TrustStatement

logger = logging.getLogger(__name__)

_NAME_CHARS = 6  # characters of a node id that name a peer
WRITE_AGAIN_S = 30.0  # pause after a write that failed: a full disk may have room again
MAX_PIECE_STATEMENTS = 256  # limit of one beat; a member that sends more is ignored for a while
_MAX_PIECES = 4  # limit of one member's pieces that wait to be checked
_NEW_STATEMENTS = 1024  # limit of one member at once; then the rate below applies
_NEW_PER_S = 8.0
_BAD_COSTS = 64  # a bad statement costs as much as so many new ones


@dataclass(slots=True)
class _Source:
    """A member that sends statements: its waiting pieces, and how many more it may send."""

    pieces: deque[tuple[bytes, list[TrustStatement]]]
    allowed: float
    as_of_s: float


class TrustKeeper:
    """This node's ``TrustView``. Changes arrive on the event loop; ``run`` writes them to the disk.

    A damaged store admits no node until it was merged with a member's: the newest removals may be lost.
    """

    def __init__(
        self,
        *,
        key_pair: KeyPair,
        loaded: LoadedTrust,
        file: TrustFile,
        audit: AuditLog,
        clock: Clock,
        write_again_s: float = WRITE_AGAIN_S,
    ) -> None:
        """``write_again_s``: from a failed write to the next."""
        self._write_again_s = write_again_s
        alone = not set(loaded.store.peers) - {NodeId(key_pair.fingerprint)}
        self.damage = "" if alone else loaded.damage  # without other members, the rescued part is all there is
        self.audit = audit
        self._key_pair = key_pair
        self._store = loaded.store
        self._file = file
        self._clock = clock
        self._written = loaded.store if not loaded.damage else None
        self._dirty = asyncio.Event()
        self.unwritten = ""  # why the last write failed; empty: the disk has all statements
        self._writing = asyncio.Lock()
        self._changes = Changes()
        self._merging = asyncio.Lock()
        self._sources: dict[NodeId, _Source] = {}
        self._heard = asyncio.Event()
        if loaded.damage:
            logger.error("the trust store was damaged: %s", loaded.damage)
            if self.damage:
                logger.error("no node is admitted until this node has reached a member and asked it")
            audit.record(AuditKind.STORE_DAMAGED, who=str(file.path), detail=loaded.damage)

    @property
    def store(self) -> TrustStore:
        """The present statements."""
        return self._store

    @property
    def key_pair(self) -> KeyPair:
        """See ``TrustView.key_pair``."""
        return self._key_pair

    @property
    def node_id(self) -> NodeId:
        """This node's id."""
        return NodeId(self._key_pair.fingerprint)

    @property
    def digest(self) -> bytes:
        """The hash of all statements: equal on two nodes with the same statements."""
        return self._store.digest

    def held(self) -> Mapping[bytes, Statement]:
        """Return all statements by key, in an order in which another store can take them."""
        return self._store.statements

    @property
    def belongs(self) -> bool:
        """Whether this node is still in its own cluster: it may have been removed."""
        return self.node_id in self._store.peers

    @property
    def cluster_id(self) -> str:
        """The cluster's id."""
        return self._store.cluster_id

    def known(self, node_id: str) -> TrustedPeer | None:
        """Return a node that belongs to the cluster, also while the store is damaged."""
        return self._store.peers.get(NodeId(node_id))

    def member(self, fingerprint: str) -> TrustedPeer | None:
        """See ``TrustView.member``."""
        store = self._store
        if self.damage or self.node_id not in store.peers:
            return None
        return store.peers.get(NodeId(fingerprint))

    def inbound(self) -> tuple[TrustedPeer, ...]:
        """See ``TrustView.inbound``."""
        return () if self.damage else self.outbound()

    def outbound(self) -> tuple[TrustedPeer, ...]:
        """See ``TrustView.outbound``."""
        peers = self._store.peers
        return tuple(peers.values()) if self.node_id in peers else ()

    def changes(self) -> AsyncIterator[None]:
        """See ``TrustView.changes``."""
        return self._changes.watch()

    def find(self, text: str) -> TrustedPeer:
        """Return the peer with that name or beginning of its id. Raises ConfigInvalid unless exactly one matches."""
        peers = self._store.peers.values()
        found = [peer for peer in peers if peer.name == text or peer.node_id == text]
        if not found and len(text) >= _NAME_CHARS:
            found = [peer for peer in peers if peer.node_id.startswith(text.lower())]
        if len(found) == 1:
            return found[0]
        known = ", ".join(
            f"{peer.name} ({peer.node_id[:_NAME_CHARS]})" for peer in sorted(peers, key=lambda peer: peer.name)
        )
        raise ConfigInvalid(
            f"{len(found)} peers are called '{text}'" if found else f"no peer is called '{text}'",
            fact=f"peers: {known}",
            next_step="name it by the beginning of its id" if found else "see 'edgepipe peers'",
        )

    def hear(self, source: NodeId, *, digest: bytes, statements: Sequence[TrustStatement]) -> None:
        """Take a connected member's digest, and maybe statements. ``run`` checks them off the event loop.

        A member that sends too much at once, or badly signed statements, is ignored for a while.
        """
        sender = self._source(source)
        if len(statements) > MAX_PIECE_STATEMENTS:
            self._refuse(source, f"more than {MAX_PIECE_STATEMENTS} statements at once")
            sender.allowed = -_BAD_COSTS * _NEW_PER_S
            return
        held = self._store.statements
        new = [signed for signed in statements if key_of(signed.body) not in held]
        if not new and not self.damage:
            return
        sender.allowed -= len(new)
        if sender.allowed >= 0 and len(sender.pieces) < _MAX_PIECES:
            sender.pieces.append((digest, new))
            self._heard.set()

    async def take_in(self, source: NodeId, *, digest: bytes, statements: Sequence[TrustStatement]) -> None:
        """Merge a member's statements; only those with an owner's signature count."""
        async with self._merging:
            merged = await asyncio.to_thread(merge, self._store, statements)
            for reason in merged.refused:
                self._refuse(source, reason)
            self._source(source).allowed -= _BAD_COSTS * merged.num_refused
            mended = bool(self.damage) and digest == merged.store.digest and source in merged.store.peers
            if mended:
                self.damage = ""
                logger.warning("the trust store is whole again: member %s sent the missing statements", source)
                self.audit.record(AuditKind.STORE_MENDED, who=source)
            if merged.new or mended:
                self._take(merged.store)

    async def add(self, certificate: Certificate, *, role: Role, name: str) -> None:
        """Admit a machine, or raise its role; return when that is on disk. Raises TrustInvalid."""
        statement = add_statement(
            self._store,
            signer=self._key_pair,
            certificate=certificate,
            role=role,
            name=name,
            now_ms=self._now_ms(),
        )
        await self._say([statement])

    async def promote(self, peer: TrustedPeer) -> None:
        """Make a member an owner. Raises TrustInvalid."""
        await self.add(peer.certificate, role=Role.OWNER, name=peer.name)

    async def remove(self, peer: TrustedPeer, *, keep_added: bool | None) -> list[TrustedPeer]:
        """Remove a peer for ever, and the nodes that only it added unless ``keep_added`` lets its adds count.

        Returns those nodes. Raises TrustInvalid for this node itself, and ConfigInvalid without ``keep_added`` (None)
        if other nodes are affected.
        """
        statements = removal_statements(
            self._store,
            signer=self._key_pair,
            node_id=peer.node_id,
            now_ms=self._now_ms(),
            keep_added=bool(keep_added),
        )
        others = self._store.added_only_by(peer.node_id, remover=self.node_id)
        if others and keep_added is None:
            raise ConfigInvalid(
                f"'{peer.name}' alone added other nodes, which would go with it",
                fact=", ".join(other.name for other in others),
                next_step="choose for them: --keep-added or --drop-added",
            )
        await self._say(statements)
        return others

    async def run(self) -> None:
        """Check received statements and write every change, until cancelled; retry what a full disk refused."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._check_heard(), name="trust-heard")
            while True:
                await self._dirty.wait()
                self._dirty.clear()
                try:
                    await self._write()
                    self.unwritten = ""
                except (OSError, ConfigInvalid) as exc:
                    logger.error("the trust store cannot be written: %s", exc)
                    self.unwritten = plain(exc) if isinstance(exc, OSError) else exc.fact or exc.what
                    asyncio.get_running_loop().call_later(self._write_again_s, self._dirty.set)

    async def _check_heard(self) -> None:
        """Check one piece of each member in turn."""
        while True:
            await self._heard.wait()
            self._heard.clear()
            while waiting := [(node_id, each) for node_id, each in self._sources.items() if each.pieces]:
                for node_id, source in waiting:
                    digest, statements = source.pieces.popleft()
                    await self.take_in(node_id, digest=digest, statements=statements)

    def _source(self, node_id: NodeId) -> _Source:
        now_s = self._clock.monotonic_s()
        source = self._sources.get(node_id)
        if source is None:
            known = self._store.peers
            self._sources = {key: each for key, each in self._sources.items() if key in known or each.pieces}
            source = self._sources[node_id] = _Source(deque(), float(_NEW_STATEMENTS), now_s)
        source.allowed = min(_NEW_STATEMENTS, source.allowed + _NEW_PER_S * (now_s - source.as_of_s))
        source.as_of_s = now_s
        return source

    def _refuse(self, source: NodeId, reason: str) -> None:
        logger.warning("trust statement refused from=%s: %s", source, reason)
        self.audit.record(AuditKind.BAD_STATEMENT, who=source, detail=reason)

    async def _say(self, statements: list[TrustStatement]) -> None:
        if self.damage:
            raise TrustInvalid(
                "the trust store is damaged and not whole again yet",
                fact=self.damage,
                next_step="start another member of the cluster: this node asks it by itself",
            )
        async with self._merging:
            merged = merge(self._store, statements)
            if merged.refused:
                raise TrustInvalid("the trust store takes no more statements", fact="; ".join(merged.refused))
            self._take(merged.store)
        try:
            await self._write()
        except (OSError, ConfigInvalid) as exc:
            raise TrustInvalid("the trust store cannot be written", fact=plain(exc)) from exc

    def _take(self, store: TrustStore) -> None:
        before = self._store
        self._store = store
        self._dirty.set()
        self._note(before)
        self._changes.notify()

    async def _write(self) -> None:
        async with self._writing:
            store = self._store
            if store is not self._written and not self.damage:
                await asyncio.to_thread(self._file.save, store)
                self._written = store

    def _note(self, before: TrustStore) -> None:
        """Write audit lines and the log for statements that count now and did not before. Skip removals of nodes that
        never belonged."""
        names = {**before.peers, **self._store.peers}
        counted = {statement.key for statement in before.standing.counting}
        for statement in self._store.standing.counting:
            if statement.key in counted or (statement.role is None and statement.about not in names):
                continue
            known = names.get(statement.about)
            signer = names[statement.signer].name if statement.signer in names else statement.signer
            who = f"{statement.name or (known.name if known else '')} {statement.about}".strip()
            if statement.role is None:
                kind = AuditKind.REMOVED
            elif statement.role is Role.OWNER and statement.about in before.peers:
                kind = AuditKind.PROMOTED
            else:
                kind = AuditKind.ADDED
            self.audit.record(kind, who=who, detail=f"by {signer}")
            logger.info("trust: %s %s by=%s", kind, who, signer)
        for node_id in before.removed & set(self._store.peers):
            who = f"{self._store.peers[node_id].name} {node_id}"
            self.audit.record(AuditKind.ADDED, who=who, detail="its removal does not count any more")
            logger.warning("trust: %s is in again: its removal, by an owner removed since, does not count", who)
        if not self.belongs and self.node_id in before.peers:
            logger.warning("this node was removed from cluster '%s'", before.cluster_name)

    def _now_ms(self) -> int:
        return int(self._clock.wall_s() * 1000)
