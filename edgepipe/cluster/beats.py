"""State of one side of a heartbeat stream, and the beats that it sends."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edgepipe.clock import Clock
from edgepipe.cluster.membership import Membership
from edgepipe.cluster.statements import KEY_BYTES, Statement, key_of, to_wire
from edgepipe.cluster.trust_keeper import MAX_PIECE_STATEMENTS
from edgepipe.config import Timeouts
from edgepipe.ids import NodeId
from edgepipe.security.trust_view import TrustedPeer
from edgepipe.wire.v1 import common_pb2, node_pb2, trust_pb2

_ECHO_MEMORY = 32  # beats whose sending time is remembered: eight seconds
_PIECE_BYTES = 256 << 10  # of statements in one beat: a home's store fits into one
_MAX_KEYS = 8192  # accepted in one beat; a full store has some 3,000
_KEYS_AGAIN_S = 1.0  # before keys are sent again if the stores still differ; doubles every time
_KEYS_MOST_S = 60.0


class SharedTrust(Protocol):
    """Exchange of trust stores between two members; ``TrustKeeper`` implements it."""

    @property
    def digest(self) -> bytes:
        """The hash of all statements."""
        ...

    def held(self) -> Mapping[bytes, Statement]:
        """Return all statements by key, in an order in which another store can take them."""
        ...

    def hear(self, source: NodeId, *, digest: bytes, statements: Sequence[trust_pb2.TrustStatement]) -> None:
        """Take a member's digest, and statements that the member thinks are new here."""
        ...

    def member(self, fingerprint: str) -> TrustedPeer | None:
        """Return the member with that key if it may call this node."""
        ...

    def outbound(self) -> tuple[TrustedPeer, ...]:
        """Return the members that this node may call."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yield at once and then after every change."""
        ...


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One side of one stream."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    sequence: int = 0
    sent_at_s: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])
    heard: int = 0
    heard_at_s: float = 0.0
    told_version: int = -1
    told_at_s: float = float("-inf")
    told_digest: bytes = b""
    heard_digest: bytes = b""
    told_in: int = 0  # the beat with the state
    held: Mapping[bytes, Statement] | None = None  # own statements at the last search for new ones
    to_tell: deque[Statement] = field(default_factory=deque[Statement])
    theirs: set[bytes] = field(default_factory=set[bytes])  # keys that the other side sent or reported
    keys_at_s: float = 0.0  # when to send keys if the stores still differ
    keys_pause_s: float = _KEYS_AGAIN_S

    def heard_keys(self, keys: Iterable[bytes]) -> None:
        """Take the keys that the other side holds; send it the other statements."""
        theirs = set(keys)
        if self.held is not None and len(theirs) <= _MAX_KEYS and all(len(key) == KEY_BYTES for key in theirs):
            self.theirs = theirs
            self.to_tell = deque(statement for key, statement in self.held.items() if key not in theirs)
            self.wake.set()

    def heard_statements(self, statements: Iterable[trust_pb2.TrustStatement]) -> None:
        """Take statements from the other side: they are not sent back."""
        if len(self.theirs) < _MAX_KEYS:
            self.theirs.update(key_of(wire.body) for wire in statements)


class Speaker:
    """Composes this node's beats: its state when changed, its trust store where the other side's differs."""

    def __init__(
        self,
        *,
        membership: Membership,
        hello: common_pb2.Hello,
        trust: SharedTrust,
        state: Callable[[], node_pb2.NodeState],
        clock: Clock,
        timeouts: Timeouts,
    ) -> None:
        self.leaving = False
        self.sleeping = False
        self._membership = membership
        self._hello = hello
        self._trust = trust
        self._state = state
        self._clock = clock
        self._timeouts = timeouts

    def beat(self, conversation: Conversation, *, first: bool = False) -> node_pb2.Beat:
        """Compose the next beat. ``first``: the first of its stream."""
        now = self._clock.monotonic_s()
        conversation.sequence += 1
        conversation.sent_at_s[conversation.sequence] = now
        if len(conversation.sent_at_s) > _ECHO_MEMORY:
            conversation.sent_at_s.popitem(last=False)
        beat = node_pb2.Beat(sequence=conversation.sequence, leaving=self.leaving, sleeping=self.sleeping)
        if first or conversation.sequence == 1:
            beat.hello.CopyFrom(self._hello)
        if conversation.heard:
            beat.echo = conversation.heard
            beat.echo_delay_us = int((now - conversation.heard_at_s) * 1e6)
        self._add_trust(beat, conversation, now)
        self._add_state(beat, conversation, now)
        return beat

    def farewell(self, conversation: Conversation) -> node_pb2.Beat:
        """Compose the last beat to a removed node, with the statements that removed it."""
        conversation.to_tell = deque(self._trust.held().values())
        return self.beat(conversation)

    def _add_trust(self, beat: node_pb2.Beat, conversation: Conversation, now: float) -> None:
        """Add the digest when it changed, with the new statements. While the other side's digest differs, also add a
        piece of the statements that it lacks, and our keys: first at once, then ever more seldom."""
        digest, held = self._trust.digest, self._trust.held()
        if conversation.told_digest != digest:
            beat.trust_digest = conversation.told_digest = digest
            if conversation.held is not None:
                known = {*conversation.held, *conversation.theirs}
                conversation.to_tell.extend(statement for key, statement in held.items() if key not in known)
                # The new statements may be the only difference: send them before the keys.
                conversation.keys_at_s = max(conversation.keys_at_s, now + _KEYS_AGAIN_S)
        conversation.held = held
        if conversation.heard_digest == digest:
            conversation.to_tell.clear()
            conversation.keys_at_s, conversation.keys_pause_s = 0.0, _KEYS_AGAIN_S
            return
        if conversation.to_tell:
            beat.trust_digest = digest
            beat.trust.statements.extend(to_wire(_piece(conversation.to_tell)))
        if conversation.heard_digest and now >= conversation.keys_at_s:
            beat.trust_digest = digest
            beat.trust_keys.extend(held)
            conversation.keys_at_s = now + conversation.keys_pause_s
            conversation.keys_pause_s = min(_KEYS_MOST_S, 2 * conversation.keys_pause_s)

    def _add_state(self, beat: node_pb2.Beat, conversation: Conversation, now: float) -> None:
        state = self._state()
        stale = now - conversation.told_at_s >= self._timeouts.state_refresh_s
        if state.version == conversation.told_version and not stale:
            return
        beat.state.CopyFrom(state)
        beat.wall_ms = int(self._clock.wall_s() * 1e3)
        for node_id, address in self._membership.introductions():
            beat.known.add(node_id=node_id, address=address)
        conversation.told_version, conversation.told_at_s = state.version, now
        conversation.told_in = conversation.sequence


def _piece(statements: deque[Statement]) -> list[Statement]:
    """Take statements from the front, as many as one beat holds."""
    piece: list[Statement] = []
    room = _PIECE_BYTES
    while statements and len(piece) < MAX_PIECE_STATEMENTS and room > 0:
        piece.append(statements.popleft())
        room -= len(piece[-1].body)
    return piece
