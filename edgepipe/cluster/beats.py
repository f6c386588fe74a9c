"""What one side of a heartbeat stream has said and heard, and what it says next."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from edgepipe.clock import Clock
from edgepipe.cluster.membership import Membership
from edgepipe.config import Timeouts
from edgepipe.ids import NodeId
from edgepipe.link.trust_view import TrustedPeer
from edgepipe.wire.v1 import common_pb2, node_pb2, trust_pb2

_ECHO_MEMORY = 32  # beats whose sending time is kept: eight seconds


class SharedTrust(Protocol):
    """What two members tell each other of their trust stores; ``TrustKeeper`` is one."""

    @property
    def digest(self) -> bytes:
        """Of all statements."""
        ...

    def statements(self) -> trust_pb2.TrustSet:
        """All of them."""
        ...

    def hear(self, source: NodeId, *, digest: bytes, statements: Iterable[trust_pb2.TrustStatement]) -> None:
        """A member told its digest, and its statements if they differed."""
        ...

    def member(self, fingerprint: str) -> TrustedPeer | None:
        """Who may call."""
        ...

    def outbound(self) -> tuple[TrustedPeer, ...]:
        """Who may be called."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yields at once and then after every change."""
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
    told_trust: tuple[bytes, bytes] | None = None  # own and other digest when the whole set was last told
    told_in: int = 0  # the beat that told it


class Speaker:
    """Composes this node's beats: its state when that is news, its trust store where the other's differs."""

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
        """The next one. ``first``: of its stream."""
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
        self._add_trust(beat, conversation)
        self._add_state(beat, conversation, now)
        return beat

    def _add_trust(self, beat: node_pb2.Beat, conversation: Conversation) -> None:
        """The digest when it changed; all statements once per pair of digests that differ."""
        digest = self._trust.digest
        if conversation.told_digest != digest:
            beat.trust_digest = conversation.told_digest = digest
        differs = (digest, conversation.heard_digest)
        if conversation.heard_digest not in (b"", digest) and conversation.told_trust != differs:
            beat.trust.CopyFrom(self._trust.statements())
            beat.trust_digest = digest
            conversation.told_trust = differs

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
