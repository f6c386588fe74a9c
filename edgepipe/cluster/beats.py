"""State of one side of a heartbeat stream, and the beats that it sends."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from edgepipe.clock import Clock
from edgepipe.cluster.membership import Membership
from edgepipe.cluster.statements import KEY_BYTES, Statement, key_of
from edgepipe.cluster.trust_keeper import MAX_PIECE_STATEMENTS
from edgepipe.config import Timeouts
from edgepipe.ids import NodeId
from edgepipe.security.trust_view import TrustedPeer
from edgepipe.wire.common import Hello
from edgepipe.wire.nodes import Beat, NodeState
from edgepipe.wire.trust import TrustSet, TrustStatement

BEATS_PER_S = 50.0  # beats taken from one member, which sends four a second and one for each change of its state
BURST_BEATS = 200
_ECHO_MEMORY = 32  # beats whose sending time is remembered: eight seconds
_PIECE_BYTES = 256 << 10  # statements in one beat: a home's store fits into one
_MAX_KEYS = 8192  # keys that one beat may hold; a full store has some 3,000
_KEYS_AGAIN_S = 1.0  # pause before keys are sent again if the stores still differ; doubles every time
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

    def hear(self, source: NodeId, *, digest: bytes, statements: Sequence[TrustStatement]) -> None:
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


class BeatPace:
    """Paces the beats of each member over all its streams: a burst at once, then ``BEATS_PER_S``.

    The reader waits, so that flow control holds the sender back. This is the leaky bucket of ITU-T I.371, annex A
    (virtual scheduling).
    """

    def __init__(self) -> None:
        self._due_s: dict[NodeId, float] = {}  # time of each member's next beat at the full rate; has members only

    def wait_s(self, node_id: NodeId, *, now_s: float) -> float:
        """Count a member's beat that came now. Return how many seconds to wait before reading the next."""
        due_s = max(self._due_s.get(node_id, now_s), now_s) + 1.0 / BEATS_PER_S
        self._due_s[node_id] = due_s
        return max(0.0, due_s - now_s - BURST_BEATS / BEATS_PER_S)


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One side of one stream."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    sequence: int = 0
    sent_at_s: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])
    heard: int = 0
    heard_at_s: float = 0.0
    incarnation: int = 0  # incarnation of the other side's newest state
    sent_version: int = -1
    state_sent_at_s: float = float("-inf")
    sent_digest: bytes = b""
    heard_digest: bytes = b""
    sent_in: int = 0  # the beat with the state
    held: Mapping[bytes, Statement] | None = None  # own statements at the last search for new ones
    to_tell: deque[Statement] = field(default_factory=deque[Statement])
    theirs: set[bytes] = field(default_factory=set[bytes])  # keys that the other side sent or reported
    keys_at_s: float = 0.0  # time to send keys if the stores still differ
    keys_pause_s: float = _KEYS_AGAIN_S

    def heard_keys(self, keys: Iterable[bytes]) -> None:
        """Take the keys that the other side holds; send it the other statements."""
        theirs = set(keys)
        if self.held is not None and len(theirs) <= _MAX_KEYS and all(len(key) == KEY_BYTES for key in theirs):
            self.theirs = theirs
            self.to_tell = deque(statement for key, statement in self.held.items() if key not in theirs)
            self.wake.set()

    def heard_statements(self, statements: Iterable[TrustStatement]) -> None:
        """Take statements from the other side: they are not sent back."""
        if len(self.theirs) < _MAX_KEYS:
            self.theirs.update(key_of(signed.body) for signed in statements)


@dataclass(kw_only=True, eq=False)
class Speaker:
    """Composes this node's beats: its state when changed, its trust store where the other side's differs."""

    membership: Membership
    hello: Hello
    trust: SharedTrust
    state: Callable[[], NodeState]
    clock: Clock
    timeouts: Timeouts

    def __post_init__(self) -> None:
        self.leaving = False
        self.sleeping = False

    def beat(self, conversation: Conversation) -> Beat:
        """Compose the next beat."""
        now = self.clock.monotonic_s()
        conversation.sequence += 1
        conversation.sent_at_s[conversation.sequence] = now
        if len(conversation.sent_at_s) > _ECHO_MEMORY:
            conversation.sent_at_s.popitem(last=False)
        beat = Beat(
            hello=self.hello if conversation.sequence == 1 else None,
            sequence=conversation.sequence,
            echo=conversation.heard,
            echo_delay_us=int((now - conversation.heard_at_s) * 1e6) if conversation.heard else 0,
            leaving=self.leaving,
            sleeping=self.sleeping,
        )
        return self._with_state(self._with_trust(beat, conversation, now), conversation, now)

    def farewell(self, conversation: Conversation) -> Beat:
        """Compose the last beat to a removed node, with the statements that removed it."""
        conversation.to_tell = deque(self.trust.held().values())
        return self.beat(conversation)

    def _with_trust(self, beat: Beat, conversation: Conversation, now: float) -> Beat:
        """Add the digest when it changed, with the new statements. While the other side's digest differs, also add a
        piece of the statements that it lacks, and our keys: first at once, then ever more seldom."""
        digest, held = self.trust.digest, self.trust.held()
        if conversation.sent_digest != digest:
            conversation.sent_digest = digest
            beat = replace(beat, trust_digest=digest)
            if conversation.held is not None:
                known = {*conversation.held, *conversation.theirs}
                conversation.to_tell.extend(statement for key, statement in held.items() if key not in known)
                # The new statements may be the only difference: send them before the keys.
                conversation.keys_at_s = max(conversation.keys_at_s, now + _KEYS_AGAIN_S)
        conversation.held = held
        if conversation.heard_digest == digest:
            conversation.to_tell.clear()
            conversation.keys_at_s, conversation.keys_pause_s = 0.0, _KEYS_AGAIN_S
            return beat
        if conversation.to_tell:
            beat = replace(beat, trust_digest=digest, trust=TrustSet(statements=_piece(conversation.to_tell)))
        if conversation.heard_digest and now >= conversation.keys_at_s:
            beat = replace(beat, trust_digest=digest, trust_keys=tuple(held))
            conversation.keys_at_s = now + conversation.keys_pause_s
            conversation.keys_pause_s = min(_KEYS_MOST_S, 2 * conversation.keys_pause_s)
        return beat

    def _with_state(self, beat: Beat, conversation: Conversation, now: float) -> Beat:
        state = self.state()
        stale = now - conversation.state_sent_at_s >= self.timeouts.state_refresh_s
        if state.version == conversation.sent_version and not stale:
            return beat
        conversation.sent_version, conversation.state_sent_at_s = state.version, now
        conversation.sent_in = conversation.sequence
        wall_ms = int(self.clock.wall_s() * 1e3)
        return replace(beat, state=state, wall_ms=wall_ms, known=self.membership.introductions())


def _piece(statements: deque[Statement]) -> tuple[TrustStatement, ...]:
    """Take statements from the front, as many as one beat holds."""
    piece: list[TrustStatement] = []
    room = _PIECE_BYTES
    while statements and len(piece) < MAX_PIECE_STATEMENTS and room > 0:
        piece.append(statements.popleft().signed)
        room -= len(piece[-1].body)
    return tuple(piece)
