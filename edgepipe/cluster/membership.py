"""Membership of the cluster as a state machine: events go in, dialling commands and changes come out.

Every node talks to every other node itself. So a node judges another node only by its own contact with it, and it
repeats no other node's death. PURE: no clock, no network; the shell is ``heartbeats.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from edgepipe.cluster.gaps import GapHistory
from edgepipe.ids import NodeId
from edgepipe.wire.nodes import NodeState
from edgepipe.wire.serving import Introduction

_MAX_TARGETS = 256  # most addresses; a home has a few dozen machines, and a hostile introducer must not fill the memory
_LATE_S = 0.25  # a tick later than this shows this process's own lag, not the others' silence
_LAG_MEMORY_S = 10.0  # time after its own lag during which this process is more patient, by that lag
_SLEEPY_S = 1.0  # beats that were in flight when a node went to sleep do not wake it
_MAX_TARGETS_PER_NODE = 8  # a machine has a few addresses; false ones in its name must not displace the right one


class MemberStatus(StrEnum):
    """The status of another node, as this node believes."""

    ALIVE = "alive"
    SUSPECT = "suspect"  # silent for half the dead limit
    DEAD = "dead"
    ASLEEP = "asleep"  # the node announced that it goes to sleep
    LEFT = "left"  # the node announced that it leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipLimits:
    """Limits on a node's silence; seconds, from ``config.Timeouts``."""

    refused_s: float
    dead_min_s: float
    dead_max_s: float
    forget_s: float
    tick_s: float  # the shell ticks this often


@dataclass(slots=True, kw_only=True)
class Member:
    """Another node as this node sees it."""

    node: NodeState  # the node's newest state
    status: MemberStatus
    last_heard_s: float
    rtt_ms: float = 0.0
    refused_since_s: float | None = None  # first refused connection since its last beat
    gaps: GapHistory = field(default_factory=GapHistory)
    status_since_s: float = 0.0  # DEAD: since it was last heard

    @property
    def reachable(self) -> bool:
        """Whether the node may get work."""
        return self.status in (MemberStatus.ALIVE, MemberStatus.SUSPECT)


@dataclass(frozen=True, slots=True)
class Dial:
    """Keep trying to hold a heartbeat stream to ``address``."""

    address: str


@dataclass(frozen=True, slots=True)
class HangUp:
    """End the stream to ``address`` and stop dialling it."""

    address: str


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """A member's status or state has changed."""

    node_id: NodeId
    status: MemberStatus


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask at ``address`` over a new connection: lost packets may delay only the present one."""

    address: str


@dataclass(frozen=True, slots=True)
class IdentityTaken:
    """A running node has this node's id: one data directory is a copy of the other."""

    address: str


Command = Dial | HangUp | MemberChanged | Probe | IdentityTaken


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardBeat:
    """One received heartbeat."""

    node_id: NodeId
    state: NodeState | None = None
    known: tuple[tuple[str, str], ...] = ()  # (node id, address) of nodes that the sender knows
    leaving: bool = False
    sleeping: bool = False
    incarnation: int = 0  # incarnation of the newest state on the same stream; 0: no state came yet
    dialled: str = ""  # the address that was dialled; empty when the other side dialled


@dataclass(slots=True, kw_only=True)
class _Target:
    manual: bool  # named by a person
    node_id: NodeId | None = None  # the node that answered there, or is said to be there
    answered: bool = False  # a member answered there, now or in an earlier run
    dialling: bool = False
    unanswered_since_s: float | None = None  # dialled since then, and no member answers

    @property
    def lasts(self) -> bool:
        """Whether it is dialled until it answers: after a long outage, two nodes meet again without multicast."""
        return self.manual or self.answered


class Membership:
    """The state machine. Methods take the monotonic time and return the commands to perform."""

    def __init__(self, *, node_id: NodeId, incarnation: int, address: str, limits: MembershipLimits) -> None:
        self._node_id = node_id
        self._incarnation = incarnation
        self._own_addresses = {address}
        self._limits = limits
        self._members: dict[NodeId, Member] = {}
        self._targets: dict[str, _Target] = {}
        self._last_tick_s: float | None = None
        self._lag_s = 0.0  # the worst of late
        self._lagged_at_s = 0.0

    def member(self, node_id: str) -> Member | None:
        """Return a member, also an unreachable one; None if the node is unknown."""
        return self._members.get(NodeId(node_id))

    def reachable(self) -> list[Member]:
        """Return the members that may get work, by node id, without this node."""
        return [self._members[key] for key in sorted(self._members) if self._members[key].reachable]

    def absent(self) -> list[Member]:
        """Return the members that went without a goodbye, by node id."""
        gone = (MemberStatus.DEAD, MemberStatus.ASLEEP)
        return [self._members[key] for key in sorted(self._members) if self._members[key].status in gone]

    def stopped(self) -> list[Member]:
        """Return the members that said goodbye, by node id."""
        return [self._members[key] for key in sorted(self._members) if self._members[key].status is MemberStatus.LEFT]

    def broken_links(self) -> list[tuple[NodeId, NodeId]]:
        """Return pairs of reachable members of which at least one does not hear the other. Neither is dead."""
        known = {member.node.node_id for member in self.reachable()}
        pairs = {
            (min(member.node.node_id, other), max(member.node.node_id, other))
            for member in self.reachable()
            for other in member.node.silent
            if other in known
        }
        return [(NodeId(node_id), NodeId(other)) for node_id, other in sorted(pairs)]

    def node_ids(self) -> list[NodeId]:
        """Return the ids of all known nodes, reachable or not, and of nodes that an address is said to belong to."""
        hinted = {target.node_id for target in self._targets.values() if target.node_id}
        return sorted({*self._members, *hinted})

    def introductions(self) -> tuple[Introduction, ...]:
        """Return every reachable member with its address, for other nodes."""
        nodes = (member.node for member in self.reachable())
        return tuple(Introduction(node_id=node.node_id, address=node.address) for node in nodes)

    def owner(self, address: str) -> str:
        """Return the id of the node that is, or is said to be, at ``address``; empty if unknown."""
        target = self._targets.get(address)
        return target.node_id or "" if target else ""

    def expects(self, address: str) -> bool:
        """Return whether a reachable member should answer at ``address``: a broken stream is then redialled at once."""
        target = self._targets.get(address)
        member = self._members.get(target.node_id) if target and target.node_id else None
        return member is not None and member.reachable

    def on_address(
        self, address: str, *, manual: bool = False, node_id: str = "", answered: bool = False
    ) -> list[Command]:
        """Take an address that discovery, a person or another member named.

        ``answered``: the node had it in an earlier run of this node.
        """
        if not address or address in self._own_addresses:  # this node's id elsewhere is a copy, and dialling shows that
            return []
        target = self._targets.get(address)
        room: list[Command] | None = []
        if target is None:
            room = self._make_room(node_id)
            if room is None and not manual:
                return []
            target = self._targets[address] = _Target(manual=manual)
        commands = room or []
        target.manual, target.answered = target.manual or manual, target.answered or answered
        target.node_id = target.node_id or (NodeId(node_id) if node_id else None)
        owner = self._members.get(NodeId(node_id)) if node_id else None
        if target.dialling or (owner is not None and owner.reachable and self._is_dialled(owner.node.node_id)):
            return commands
        target.dialling = True
        return [*commands, Dial(address)]

    def on_beat(self, beat: HeardBeat, *, now: float) -> list[Command]:
        """Take a heartbeat from a stream of either direction."""
        if beat.node_id == self._node_id:
            return self._on_own_id(beat)
        member = self._members.get(beat.node_id)
        if self._is_stale(member, beat):
            return []
        if beat.leaving:
            return self._on_leaving(member, now)
        if beat.sleeping:
            return self._on_sleeping(member, now)
        if member is not None and member.status is MemberStatus.ASLEEP and now - member.status_since_s < _SLEEPY_S:
            return []
        if member is None:
            assert beat.state is not None
            member = Member(node=beat.state, status=MemberStatus.DEAD, last_heard_s=now)
            self._members[beat.node_id] = member
        commands = self._refresh(member, beat, now)
        if beat.dialled:
            commands += self._bind(beat.dialled, beat.node_id)
        commands += self.on_address(member.node.address, node_id=beat.node_id)
        for node_id, address in beat.known:
            commands += self.on_address(address, node_id=node_id)
        return commands

    def on_refused(self, address: str, *, now: float) -> list[Command]:
        """Take a refused connection to ``address``: the machine is there, and no process listens."""
        target = self._targets.get(address)
        member = self._members.get(target.node_id) if target and target.node_id else None
        if member is None or not member.reachable or self._is_outdated(address, member):
            return []
        if member.refused_since_s is None:
            member.refused_since_s = now
        if now - member.refused_since_s < self._limits.refused_s:
            return []
        return self._set_status(member, MemberStatus.DEAD, since_s=member.last_heard_s)

    def on_expelled(self, node_id: NodeId) -> list[Command]:
        """Drop a node that no longer belongs to the cluster, and its addresses."""
        member = self._members.pop(node_id, None)
        if member is None:
            return list(self._drop_targets(node_id))
        member.status = MemberStatus.LEFT
        return [MemberChanged(node_id, MemberStatus.LEFT), *self._drop_targets(node_id)]

    def on_rtt(self, node_id: NodeId, *, rtt_ms: float) -> None:
        """Take a measured round trip; smooth it over about eight beats."""
        if member := self._members.get(node_id):
            member.rtt_ms = rtt_ms if member.rtt_ms == 0 else member.rtt_ms + (rtt_ms - member.rtt_ms) / 8

    def on_tick(self, *, now: float) -> list[Command]:
        """Mark silent members as suspect, then as dead, then forget them."""
        self._forgive_own_lag(now)
        commands: list[Command] = []
        for member in list(self._members.values()):
            silence = now - member.last_heard_s
            limit = self.dead_limit_s(member, now=now)
            if member.reachable and silence >= limit:
                gone = MemberStatus.ASLEEP if member.node.sleeps_soon else MemberStatus.DEAD
                commands += self._set_status(member, gone, since_s=member.last_heard_s)
            elif member.status is MemberStatus.ALIVE and silence >= limit / 2:
                commands += self._set_status(member, MemberStatus.SUSPECT, since_s=now)
                commands.append(Probe(member.node.address))
            elif not member.reachable and silence >= self._limits.forget_s:
                commands += self._forget(member)
        return [*commands, *self._give_up(now)]

    def dead_limit_s(self, member: Member, *, now: float) -> float:
        """Return the silence, within the limits, after which ``member`` is dead: 3 x the 99th percentile of its gaps
        in two minutes, plus this process's recent lag."""
        lag_s = self._lag_s if now - self._lagged_at_s < _LAG_MEMORY_S else 0.0
        wanted_s = max(self._limits.dead_min_s, 3 * member.gaps.p99_s(now=now)) + lag_s
        return min(wanted_s, self._limits.dead_max_s)

    def _is_stale(self, member: Member | None, beat: HeardBeat) -> bool:
        """Return whether to ignore a beat: of an earlier life, of a member that left, of a stranger without a state."""
        if member is None:
            return beat.state is None
        incarnation = beat.state.incarnation if beat.state is not None else beat.incarnation
        if incarnation and incarnation != member.node.incarnation:
            return incarnation < member.node.incarnation
        return member.status is MemberStatus.LEFT

    def _on_own_id(self, beat: HeardBeat) -> list[Command]:
        if beat.state is None:
            return []
        if beat.state.incarnation != self._incarnation:
            # The node that started later takes a new id; the other keeps dialling and meets it under that id.
            later = self._incarnation > beat.state.incarnation
            return [IdentityTaken(beat.dialled or beat.state.address)] if later else []
        if not beat.dialled:
            return []
        self._own_addresses.add(beat.dialled)
        self._targets.pop(beat.dialled, None)
        return [HangUp(beat.dialled)]

    def _on_leaving(self, member: Member | None, now: float) -> list[Command]:
        if member is None or member.status is MemberStatus.LEFT:
            return []
        commands = self._set_status(member, MemberStatus.LEFT, since_s=now)
        return [*commands, *self._drop_targets(member.node.node_id)]

    def _on_sleeping(self, member: Member | None, now: float) -> list[Command]:
        if member is None or not member.reachable:
            return []
        member.last_heard_s = now
        return self._set_status(member, MemberStatus.ASLEEP, since_s=now)

    def _refresh(self, member: Member, beat: HeardBeat, now: float) -> list[Command]:
        if member.reachable:
            member.gaps.add(max(0.0, now - member.last_heard_s), now=now)
        else:
            member.gaps.clear()
        member.last_heard_s = now
        member.refused_since_s = None
        changed = member.status is not MemberStatus.ALIVE
        if changed:
            member.status, member.status_since_s = MemberStatus.ALIVE, now
        moved: list[Command] = []
        if beat.state is not None and _order(beat.state) > _order(member.node):
            if beat.state.address != member.node.address:
                moved = self._leave_address(member.node.address, beat.node_id)
            member.node = beat.state
            changed = True
        return [*moved, *([MemberChanged(member.node.node_id, MemberStatus.ALIVE)] if changed else [])]

    def _leave_address(self, address: str, node_id: NodeId) -> list[Command]:
        """Stop dialling a member at the address that it had: its new one would never be dialled beside that."""
        target = self._targets.get(address)
        if target is None or target.node_id != node_id:
            return []
        if not target.manual:
            del self._targets[address]
        dialling, target.dialling = target.dialling, False
        return [HangUp(address)] if dialling else []

    def _bind(self, address: str, node_id: NodeId) -> list[Command]:
        """Keep one dialled stream per member; its own address wins over others that lead to it."""
        target = self._targets.get(address)
        if target is None:
            return []
        target.node_id, target.answered = node_id, True
        own = self._targets.get(self._members[node_id].node.address)
        if own is None or not own.dialling or own.node_id != node_id:
            return []
        others = [key for key, other in self._targets.items() if other.node_id == node_id and other is not own]
        commands: list[Command] = []
        for other in others:
            if self._targets[other].dialling:
                self._targets[other].dialling = False
                commands.append(HangUp(other))
        return commands

    def _make_room(self, node_id: str) -> list[Command] | None:
        """Make room for one more address. Return the commands for that; None if there is no room.

        A node with too many addresses loses the oldest that never answered: false ones must not keep the right one out.
        """
        said = [key for key, target in self._targets.items() if node_id and target.node_id == node_id]
        if len(said) < _MAX_TARGETS_PER_NODE:
            return [] if len(self._targets) < _MAX_TARGETS else None
        oldest = next((key for key in said if not self._targets[key].lasts), None)
        if oldest is None:
            return None
        del self._targets[oldest]
        return [HangUp(oldest)]

    def _is_dialled(self, node_id: str) -> bool:
        return any(target.dialling and target.node_id == node_id for target in self._targets.values())

    def _is_outdated(self, address: str, member: Member) -> bool:
        """Return whether the member has since reported another address, which is dialled."""
        own = self._targets.get(member.node.address)
        return address != member.node.address and own is not None and own.dialling

    def _set_status(self, member: Member, status: MemberStatus, *, since_s: float) -> list[Command]:
        member.status, member.status_since_s = status, since_s
        commands: list[Command] = [MemberChanged(member.node.node_id, status)]
        if status in (MemberStatus.DEAD, MemberStatus.ASLEEP):
            commands += self._redial(member.node.node_id)
        return commands

    def _redial(self, node_id: str) -> Iterator[Command]:
        for address, target in self._targets.items():
            if target.node_id == node_id and not target.dialling:
                target.dialling = True
                yield Dial(address)

    def _drop_targets(self, node_id: str, *, lasting: bool = True) -> Iterable[Command]:
        dropped = [address for address, target in self._targets.items() if target.node_id == node_id]
        for address in dropped:
            target = self._targets[address]
            if not target.manual and (lasting or not target.lasts):  # a person's address is dialled whatever happens
                del self._targets[address]
                yield HangUp(address)

    def _forget(self, member: Member) -> list[Command]:
        """Drop a node that was away for long. Its addresses that have answered are dialled on."""
        del self._members[member.node.node_id]
        return list(self._drop_targets(member.node.node_id, lasting=False))

    def _give_up(self, now: float) -> list[Command]:
        """Stop dialling addresses from the network where no member has answered, ever and for a long time."""
        lost: list[str] = []
        for address, target in self._targets.items():
            if target.lasts or target.node_id in self._members:
                target.unanswered_since_s = None
            elif target.unanswered_since_s is None:
                target.unanswered_since_s = now
            elif now - target.unanswered_since_s >= self._limits.forget_s:
                lost.append(address)
        for address in lost:
            del self._targets[address]
        return [HangUp(address) for address in lost]

    def _forgive_own_lag(self, now: float) -> None:
        """Excuse the silence of times in which this process did not run (sleep, stop, load) and could hear no node.

        A slow process distrusts its own clock first: Lifeguard (Dadgar et al. 2017), section 3.
        """
        lag_s = 0.0 if self._last_tick_s is None else now - self._last_tick_s - self._limits.tick_s
        self._last_tick_s = now
        if lag_s < _LATE_S:
            return
        if lag_s >= self._lag_s or now - self._lagged_at_s >= _LAG_MEMORY_S:
            self._lag_s, self._lagged_at_s = lag_s, now
        for member in self._members.values():
            member.last_heard_s = min(now, member.last_heard_s + lag_s)


def _order(state: NodeState) -> tuple[int, int]:
    return state.incarnation, state.version
