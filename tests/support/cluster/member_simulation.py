"""Memberships of several nodes in virtual time: beats over links that delay, lose and are cut, nodes that die or lag.

One seed is one schedule. Raises AssertionError with the seed when a death is seen late, or a node that lives is buried.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from edgepipe.cluster.membership import (
    Command,
    Dial,
    HeardBeat,
    MemberChanged,
    Membership,
    MembershipLimits,
    MemberStatus,
    Probe,
)
from edgepipe.ids import NodeId
from edgepipe.testing.clock import START_S
from edgepipe.wire.nodes import NodeState

LIMITS = MembershipLimits(refused_s=0.3, dead_min_s=2.0, dead_max_s=6.0, forget_s=3600.0, tick_s=0.125)
BEAT_S = 0.25
RESEND_S = 0.3  # a lost packet is sent again after this, then after twice as long, ...
CONNECT_S = 1.0  # a lost first packet of a connection is sent again after this
WARM_UP_S = 5.0
ROUGH_WARM_UP_S = 30.0  # what a lossy link needs to be known
_ROUNDS = 90  # virtual eighths of a second behind the warm-up


@dataclass(slots=True)
class _Node:
    node_id: NodeId
    core: Membership
    alive: bool = True
    seen: list[tuple[float, NodeId, MemberStatus]] = field(default_factory=list[tuple[float, NodeId, MemberStatus]])


class MemberSimulation:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._now = START_S
        self._order = itertools.count()
        self._mail: list[tuple[float, int, int, int, HeardBeat]] = []  # when, order, from, to, what
        self._last_arrival: dict[tuple[int, int, int], float] = {}
        self._loss = self._random.choice((0.0, 0.01, 0.05))
        self._jitter_s = self._random.choice((0.0, 0.05, 0.5))
        self._cut: set[frozenset[int]] = set()
        self._nodes = [self._node(index) for index in range(self._random.randint(2, 5))]

    def run(self) -> None:
        """Warm up, let something happen, look what each believes."""
        everybody = range(len(self._nodes))
        self._pass(ROUGH_WARM_UP_S if self._loss else WARM_UP_S)
        fate = self._random.choice(("nothing", "death", "death", "broken link", "lag"))
        victim = self._random.choice(everybody)
        if fate == "death":
            self._nodes[victim].alive = False
        elif fate == "broken link" and len(self._nodes) > 2:
            other = self._random.choice([index for index in everybody if index != victim])
            self._cut.add(frozenset((victim, other)))
        elif fate == "lag":
            self._pass(1.5, stopped=victim)
        began_s = self._now
        self._pass(_ROUNDS * LIMITS.tick_s)
        self._check(fate, victim, began_s)

    def _node(self, index: int) -> _Node:
        node_id = NodeId(f"node-{index}")
        return _Node(node_id, Membership(node_id=node_id, incarnation=1, address=f"10.0.0.{index}:1", limits=LIMITS))

    def _pass(self, seconds: float, *, stopped: int | None = None) -> None:
        """Ticks and beats for so long; a stopped node neither beats nor hears, its mail waits."""
        until = self._now + seconds
        while self._now < until:
            self._now += LIMITS.tick_s
            self._deliver(stopped)
            for index, node in enumerate(self._nodes):
                if not node.alive or index == stopped:
                    continue
                self._note(index, node.core.on_tick(now=self._now))
                if round(self._now / LIMITS.tick_s) % round(BEAT_S / LIMITS.tick_s) == 0:
                    self._beat(index)

    def _beat(self, index: int) -> None:
        node = self._nodes[index]
        silent = tuple(member.node.node_id for member in node.core.absent())
        version = 1 + len(silent)
        address = f"10.0.0.{index}:1"
        state = NodeState(node_id=node.node_id, address=address, incarnation=1, version=version, silent=silent)
        for other in range(len(self._nodes)):
            if other != index:
                beat = HeardBeat(node_id=node.node_id, state=state)
                for stream in range(2):  # each has dialled the other
                    self._send(index, other, stream, beat)

    def _send(self, index: int, other: int, stream: int, beat: HeardBeat) -> None:
        """As over TCP: nothing is lost for good, what is lost holds up what follows on its stream."""
        key = (index, other, stream)
        arrival = max(self._last_arrival.get(key, 0.0), self._now + self._way_s(RESEND_S))
        self._last_arrival[key] = arrival
        heapq.heappush(self._mail, (arrival, next(self._order), index, other, beat))

    def _way_s(self, again_s: float) -> float:
        """How long a packet takes, its losses and repetitions included."""
        delay_s = self._random.random() * self._jitter_s
        while self._random.random() < self._loss:
            delay_s, again_s = delay_s + again_s, 2 * again_s
        return delay_s

    def _probe(self, index: int, other: int) -> None:
        """A connection of its own: to and fro twice. Who is dead does not answer; what a cut keeps is not delivered."""
        node = self._nodes[other]
        if not node.alive:
            return
        state = NodeState(node_id=node.node_id, address=f"10.0.0.{other}:1", incarnation=1)
        arrival = self._now + sum(self._way_s(CONNECT_S) for _ in range(2)) + sum(self._way_s(RESEND_S) for _ in "ab")
        letter = (arrival, next(self._order), other, index, HeardBeat(node_id=node.node_id, state=state))
        heapq.heappush(self._mail, letter)

    def _deliver(self, stopped: int | None) -> None:
        kept: list[tuple[float, int, int, int, HeardBeat]] = []
        while self._mail and self._mail[0][0] <= self._now:
            letter = heapq.heappop(self._mail)
            _, _, index, other, beat = letter
            if other == stopped:
                kept.append(letter)
            elif self._nodes[other].alive and frozenset((index, other)) not in self._cut:
                self._note(other, self._nodes[other].core.on_beat(beat, now=self._now))
        for letter in kept:
            heapq.heappush(self._mail, letter)

    def _note(self, index: int, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, MemberChanged):
                self._nodes[index].seen.append((self._now, command.node_id, command.status))
            elif isinstance(command, Probe):
                self._probe(index, int(command.address.split(":")[0].rpartition(".")[2]))
            elif isinstance(command, Dial):
                assert command.address != f"10.0.0.{index}:1", f"seed {self.seed}: it dials itself"

    def _check(self, fate: str, victim: int, began_s: float) -> None:
        gone = self._nodes[victim].node_id
        for index, node in enumerate(self._nodes):
            if not node.alive:
                continue
            deaths = {who: when for when, who, status in node.seen if status is MemberStatus.DEAD}
            lost = {gone} if fate == "death" else set(self._lost_to(index))
            assert set(deaths) == lost, f"seed {self.seed}: {fate} of {gone}: {node.node_id} buried {sorted(deaths)}"
            for when in deaths.values():
                late_s = when - began_s
                assert late_s <= LIMITS.dead_max_s + 1.0, f"seed {self.seed}: seen dead after {late_s:.2f} s"
            reachable = {member.node.node_id for member in node.core.reachable()}
            others = {other.node_id for other in self._nodes if other is not node} - lost
            assert reachable == others, f"seed {self.seed}: {node.node_id} reaches {sorted(reachable)}"
            if fate == "broken link" and self._cut and not self._lost_to(index):
                pair = tuple(sorted(self._nodes[end].node_id for cut in self._cut for end in cut))
                assert node.core.broken_links() == [pair], f"seed {self.seed}: {node.core.broken_links()}"

    def _lost_to(self, index: int) -> list[NodeId]:
        return [self._nodes[other].node_id for cut in self._cut if index in cut for other in cut - {index}]
