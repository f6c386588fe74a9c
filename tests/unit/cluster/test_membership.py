"""Membership as a state machine: no clock, no network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edgepipe.cluster.membership import (
    Command,
    Dial,
    HangUp,
    HeardBeat,
    IdentityTaken,
    MemberChanged,
    Membership,
    MembershipLimits,
    MemberStatus,
    Probe,
)
from edgepipe.ids import NodeId
from edgepipe.testing.clock import START_S
from edgepipe.wire.nodes import NodeState

LIMITS = MembershipLimits(refused_s=0.3, dead_min_s=2.0, dead_max_s=6.0, forget_s=60.0, tick_s=0.75)
ME, OTHER, THIRD = NodeId("node-0"), NodeId("node-1"), NodeId("node-2")
MY_ADDRESS = "10.0.0.1:7117"


def membership() -> Membership:
    return Membership(node_id=ME, incarnation=5, address=MY_ADDRESS, limits=LIMITS)


def state(node_id: NodeId, *, incarnation: int = 1, version: int = 1, address: str = "", **fields: Any) -> NodeState:
    return NodeState(
        node_id=node_id,
        incarnation=incarnation,
        version=version,
        address=address or address_of(node_id),
        name=node_id,
        **fields,
    )


def address_of(node_id: NodeId) -> str:
    return f"10.0.0.{int(node_id[5:]) + 1}:7117"


def beat(node_id: NodeId, *, incarnation: int = 1, version: int = 1, dialled: str = "", leaving: bool = False):
    public = state(node_id, incarnation=incarnation, version=version)
    return HeardBeat(node_id=node_id, state=public, dialled=dialled, leaving=leaving)


def statuses(commands: list[Command]) -> list[MemberStatus]:
    return [command.status for command in commands if isinstance(command, MemberChanged)]


def test_a_found_address_is_dialled_once() -> None:
    cluster = membership()
    assert cluster.on_address(address_of(OTHER)) == [Dial(address_of(OTHER))]
    assert cluster.on_address(address_of(OTHER)) == []


def test_a_beat_makes_a_member_and_its_silence_unmakes_it() -> None:
    cluster = membership()
    assert statuses(cluster.on_beat(beat(OTHER), now=START_S)) == [MemberStatus.ALIVE]
    changes = [status for tenth in range(1, 30) for status in statuses(cluster.on_tick(now=START_S + tenth / 10))]
    assert changes == [MemberStatus.SUSPECT, MemberStatus.DEAD]
    assert cluster.reachable() == []


def test_a_member_is_dialled_back_at_the_address_that_it_tells() -> None:
    assert Dial(address_of(OTHER)) in membership().on_beat(beat(OTHER), now=START_S)


def test_introduced_nodes_are_dialled() -> None:
    heard = HeardBeat(node_id=OTHER, state=state(OTHER), known=((THIRD, address_of(THIRD)), (ME, MY_ADDRESS)))
    commands = membership().on_beat(heard, now=START_S)
    assert Dial(address_of(THIRD)) in commands
    assert Dial(MY_ADDRESS) not in commands


def test_refusal_for_300_ms_means_death() -> None:
    cluster = membership()
    cluster.on_address(address_of(OTHER))
    cluster.on_beat(beat(OTHER, dialled=address_of(OTHER)), now=START_S)
    assert cluster.on_refused(address_of(OTHER), now=START_S + 0.1) == []
    assert cluster.on_refused(address_of(OTHER), now=START_S + 0.3) == []
    assert statuses(cluster.on_refused(address_of(OTHER), now=START_S + 0.45)) == [MemberStatus.DEAD]


def test_a_beat_between_two_refusals_saves_the_member() -> None:
    cluster = membership()
    cluster.on_address(address_of(OTHER))
    cluster.on_beat(beat(OTHER, dialled=address_of(OTHER)), now=START_S)
    cluster.on_refused(address_of(OTHER), now=START_S + 0.1)
    cluster.on_beat(beat(OTHER), now=START_S + 0.2)  # it reaches us, though we do not reach it
    assert cluster.on_refused(address_of(OTHER), now=START_S + 0.45) == []


def test_who_left_stays_away_until_it_is_started_again() -> None:
    cluster = membership()
    cluster.on_beat(beat(OTHER), now=START_S)
    assert MemberStatus.LEFT in statuses(cluster.on_beat(beat(OTHER, leaving=True), now=START_S + 0.1))
    assert cluster.on_beat(beat(OTHER), now=START_S + 0.2) == []
    assert statuses(cluster.on_beat(beat(OTHER, incarnation=2), now=START_S + 0.3)) == [MemberStatus.ALIVE]


def test_a_late_goodbye_of_an_earlier_life_does_not_end_the_present_one() -> None:
    """After a quick restart, lost packets of the old connection may be sent again once the new one is in use.

    A member that has left is not heard again in that life.
    """
    cluster = membership()
    cluster.on_beat(beat(OTHER, incarnation=1), now=START_S)
    cluster.on_beat(beat(OTHER, incarnation=2), now=START_S + 2.0)
    assert cluster.on_beat(HeardBeat(node_id=OTHER, incarnation=1, leaving=True), now=START_S + 3.0) == []
    assert cluster.on_beat(HeardBeat(node_id=OTHER, incarnation=1, sleeping=True), now=START_S + 3.0) == []
    assert [member.status for member in cluster.reachable()] == [MemberStatus.ALIVE]
    assert statuses(cluster.on_beat(HeardBeat(node_id=OTHER, incarnation=2, leaving=True), now=START_S + 4.0)) == [
        MemberStatus.LEFT
    ]


def test_an_earlier_incarnation_is_not_believed() -> None:
    cluster = membership()
    cluster.on_beat(beat(OTHER, incarnation=3), now=START_S)
    assert cluster.on_beat(beat(OTHER, incarnation=2, version=9), now=START_S + 0.1) == []
    assert [member.node.incarnation for member in cluster.reachable()] == [3]


def test_only_newer_states_are_news() -> None:
    cluster = membership()
    cluster.on_beat(beat(OTHER, version=4), now=START_S)
    assert statuses(cluster.on_beat(beat(OTHER, version=4), now=START_S + 0.1)) == []
    assert statuses(cluster.on_beat(beat(OTHER, version=5), now=START_S + 0.2)) == [MemberStatus.ALIVE]


def test_the_node_that_started_later_gives_its_copied_identity_up() -> None:
    cluster = membership()
    assert cluster.on_beat(beat(ME, incarnation=4), now=START_S) == [IdentityTaken(address_of(ME))]
    assert cluster.on_beat(beat(ME, incarnation=6), now=START_S) == []


def test_dialling_oneself_is_noticed_and_not_repeated() -> None:
    cluster = membership()
    cluster.on_address("127.0.0.1:7117", manual=True)
    assert cluster.on_beat(beat(ME, incarnation=5, dialled="127.0.0.1:7117"), now=START_S) == [HangUp("127.0.0.1:7117")]
    assert cluster.on_address("127.0.0.1:7117") == []


def test_two_addresses_of_one_node_keep_one_stream() -> None:
    cluster = membership()
    cluster.on_address("localhost:7118", manual=True)
    cluster.on_address(address_of(OTHER))
    cluster.on_beat(beat(OTHER, dialled=address_of(OTHER)), now=START_S)
    assert cluster.on_beat(beat(OTHER, dialled="localhost:7118"), now=START_S + 0.1) == [HangUp("localhost:7118")]


def test_a_member_that_is_reached_by_another_name_is_not_dialled_again() -> None:
    cluster = membership()
    cluster.on_address("localhost:7118", manual=True)
    commands = cluster.on_beat(beat(OTHER, dialled="localhost:7118"), now=START_S)
    assert Dial(address_of(OTHER)) not in commands
    cluster.on_refused("localhost:7118", now=START_S + 0.1)
    assert statuses(cluster.on_refused("localhost:7118", now=START_S + 0.5)) == [MemberStatus.DEAD]


def test_an_address_where_nobody_answers_is_given_up() -> None:
    cluster = membership()
    cluster.on_address("10.0.0.9:1")
    cluster.on_address("10.0.0.9:2", manual=True)
    cluster.on_tick(now=START_S)
    assert cluster.on_tick(now=START_S + 61.0) == [HangUp("10.0.0.9:1")]


def test_own_sleep_is_not_the_others_silence() -> None:
    cluster = membership()
    cluster.on_tick(now=START_S)
    cluster.on_beat(beat(OTHER), now=START_S + 0.1)
    assert statuses(cluster.on_tick(now=START_S + 3600.0)) == []


def test_the_round_trip_is_smoothed_over_about_eight_beats() -> None:
    cluster = membership()
    cluster.on_beat(beat(OTHER), now=START_S)
    member = cluster.member(OTHER)
    assert member is not None
    cluster.on_rtt(OTHER, rtt_ms=4.0)
    assert member.rtt_ms == 4.0, "the first one is all there is"
    cluster.on_rtt(OTHER, rtt_ms=12.0)
    assert member.rtt_ms == 5.0
    for _ in range(50):
        cluster.on_rtt(OTHER, rtt_ms=2.0)
    assert member.rtt_ms == pytest.approx(2.0, rel=0.01)


def test_a_jittery_link_gets_more_patience_up_to_a_limit() -> None:
    cluster = membership()
    for second in range(60):
        cluster.on_beat(beat(OTHER), now=START_S + float(second))
    member = cluster.member(OTHER)
    assert member is not None
    assert cluster.dead_limit_s(member, now=START_S + 60.0) == 3.0


def silence_from(cluster: Membership, begin_s: float, *, seconds: float) -> list[Command]:
    return [
        command for half in range(1, int(2 * seconds)) for command in cluster.on_tick(now=START_S + begin_s + half / 2)
    ]  # in steps, or it would be this process that lagged


def test_nodes_that_an_outage_of_hours_parted_dial_each_other_until_they_meet_again() -> None:
    """A router that is off over night: both run on, both have forgotten the other, and multicast may not pass."""
    cluster = membership()
    cluster.on_address(address_of(OTHER), node_id=OTHER)
    cluster.on_beat(beat(OTHER, dialled=address_of(OTHER)), now=START_S)
    commands = silence_from(cluster, 0.0, seconds=10 * LIMITS.forget_s)
    assert cluster.member(OTHER) is None
    assert not [command for command in commands if isinstance(command, HangUp)]
    assert statuses(cluster.on_beat(beat(OTHER, dialled=address_of(OTHER)), now=START_S + 700.0)) == [
        MemberStatus.ALIVE
    ]


def test_an_address_of_an_earlier_run_is_dialled_however_late_its_machine_is_switched_on() -> None:
    cluster = membership()
    assert cluster.on_address(address_of(OTHER), node_id=OTHER, answered=True) == [Dial(address_of(OTHER))]
    assert silence_from(cluster, 0.0, seconds=10 * LIMITS.forget_s) == []


def test_a_machine_that_often_changes_its_address_is_dialled_at_the_newest() -> None:
    """A router that gives out new addresses every day, or a node that starts on any free port. It dials this node."""
    cluster, shell = membership(), _Shell()
    shell.perform(cluster.on_address("10.0.1.0:7117", manual=True))
    for life in range(30):
        address = f"10.0.1.{life}:7117"
        public = state(OTHER, incarnation=1 + life, address=address)
        shell.perform(cluster.on_beat(HeardBeat(node_id=OTHER, state=public), now=START_S + float(life)))
        assert shell.dialled == {address}
        shell.perform(
            cluster.on_beat(HeardBeat(node_id=OTHER, state=public, dialled=address), now=START_S + life + 0.1)
        )
    shell.perform(cluster.on_tick(now=START_S + 30.0))
    shell.perform([command for half in range(61, 80) for command in cluster.on_tick(now=START_S + half / 2)])
    assert shell.dialled == {"10.0.1.29:7117", "10.0.1.0:7117"}, "while it is away, a person's address counts, too"


def test_the_dead_are_dialled_for_a_while_and_then_forgotten() -> None:
    cluster = membership()
    cluster.on_beat(beat(OTHER), now=START_S)
    for second in range(1, 120):
        cluster.on_tick(now=START_S + second / 2)
    assert cluster.member(OTHER) is not None
    commands = [command for half in range(120, 140) for command in cluster.on_tick(now=START_S + half / 2)]
    assert HangUp(address_of(OTHER)) in commands
    assert cluster.member(OTHER) is None


def test_silence_is_probed_over_a_new_connection_before_it_is_death() -> None:
    cluster = membership()
    cluster.on_beat(beat(OTHER), now=START_S)
    commands = [command for tenth in range(1, 15) for command in cluster.on_tick(now=START_S + tenth / 10)]
    assert commands.count(Probe(address_of(OTHER))) == 1
    assert statuses(cluster.on_beat(beat(OTHER), now=START_S + 1.5)) == [MemberStatus.ALIVE]


def test_who_lags_itself_waits_longer() -> None:
    limits = MembershipLimits(refused_s=0.3, dead_min_s=2.0, dead_max_s=6.0, forget_s=60.0, tick_s=0.125)
    cluster = Membership(node_id=ME, incarnation=5, address=MY_ADDRESS, limits=limits)
    cluster.on_beat(beat(OTHER), now=START_S)
    cluster.on_tick(now=START_S)
    assert statuses(cluster.on_tick(now=START_S + 1.5)) == []  # nothing ran here meanwhile
    changes = [(tick, status) for tick in range(13, 60) for status in statuses(cluster.on_tick(now=START_S + tick / 8))]
    assert [status for _, status in changes] == [MemberStatus.SUSPECT, MemberStatus.DEAD]
    assert changes[-1][0] / 8 > 1.375 + 2.0 + 1.0


def test_a_node_that_announced_its_sleep_is_absent_not_dead_and_wakes() -> None:
    cluster = membership()
    cluster.on_beat(beat(OTHER), now=START_S)
    asleep = HeardBeat(node_id=OTHER, sleeping=True)
    assert statuses(cluster.on_beat(asleep, now=START_S + 1.0)) == [MemberStatus.ASLEEP]
    assert cluster.on_beat(beat(OTHER), now=START_S + 1.1) == []  # it was under way
    assert [(member.status, member.status_since_s) for member in cluster.absent()] == [
        (MemberStatus.ASLEEP, START_S + 1.0)
    ]
    assert cluster.reachable() == []
    assert MemberStatus.ALIVE in statuses(cluster.on_beat(beat(OTHER), now=START_S + 50.0))


def test_a_node_that_falls_silent_after_it_said_that_it_will_sleep_is_asleep() -> None:
    cluster = membership()
    cluster.on_beat(HeardBeat(node_id=OTHER, state=state(OTHER, sleeps_soon=True)), now=START_S + 3.0)
    for half in range(6, 14):
        cluster.on_tick(now=START_S + half / 2)
    assert [(member.status, member.status_since_s) for member in cluster.absent()] == [
        (MemberStatus.ASLEEP, START_S + 3.0)
    ]


def test_a_dead_node_is_absent_since_it_was_last_heard() -> None:
    cluster = membership()
    cluster.on_beat(beat(OTHER), now=START_S + 3.0)
    for half in range(6, 14):
        cluster.on_tick(now=START_S + half / 2)
    assert [(member.status, member.status_since_s) for member in cluster.absent()] == [
        (MemberStatus.DEAD, START_S + 3.0)
    ]


def test_two_nodes_that_do_not_hear_each_other_are_not_dead() -> None:
    cluster = membership()
    public = state(OTHER, version=2, silent=(THIRD,))
    cluster.on_beat(HeardBeat(node_id=OTHER, state=public), now=START_S)
    assert cluster.broken_links() == []  # the third may as well be dead
    cluster.on_beat(beat(THIRD), now=START_S)
    assert cluster.broken_links() == [(OTHER, THIRD)]
    assert len(cluster.reachable()) == 2


NODES = st.sampled_from([OTHER, THIRD])
ADDRESSES = st.sampled_from([address_of(OTHER), address_of(THIRD), "10.0.0.9:1", MY_ADDRESS])


@dataclass
class _Shell:
    """Performs commands the way the real shell does."""

    dialled: set[str] = field(default_factory=set)

    def perform(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Dial):
                assert command.address not in self.dialled, "dialled twice"
                self.dialled.add(command.address)
            if isinstance(command, HangUp):
                self.dialled.discard(command.address)


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: one dial per address, never oneself, silence ends in death."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = membership()
        self.shell = _Shell()
        self.now = START_S

    @rule(address=ADDRESSES, manual=st.booleans())
    def found(self, address: str, manual: bool):
        self.shell.perform(self.cluster.on_address(address, manual=manual))

    @rule(
        node=NODES, incarnation=st.integers(1, 3), version=st.integers(1, 3), leaving=st.booleans(), by_us=st.booleans()
    )
    def heard(self, node: NodeId, incarnation: int, version: int, leaving: bool, by_us: bool):
        streams = sorted(self.shell.dialled & {address_of(node), "10.0.0.9:1"})
        dialled = streams[0] if by_us and streams else ""
        heard = beat(node, incarnation=incarnation, version=version, leaving=leaving, dialled=dialled)
        self.shell.perform(self.cluster.on_beat(heard, now=self.now))

    @rule(address=ADDRESSES)
    def refused(self, address: str):
        self.shell.perform(self.cluster.on_refused(address, now=self.now))

    @rule(step_s=st.floats(0.01, 0.9))
    def time_passes(self, step_s: float):
        self.now += step_s
        self.shell.perform(self.cluster.on_tick(now=self.now))

    @rule()
    def long_silence(self):
        for _ in range(10):
            self.time_passes(step_s=0.7)
        assert self.cluster.reachable() == []

    @invariant()
    def never_oneself(self):
        assert MY_ADDRESS not in self.shell.dialled
        assert self.cluster.member(ME) is None

    @invariant()
    def reachable_members_are_dialled(self):
        for member in self.cluster.reachable():
            assert self.shell.dialled, f"nobody dials {member.node.node_id}"


AnyOrder.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_a_removed_member_is_dropped_at_once_with_all_its_addresses() -> None:
    cluster = membership()
    cluster.on_address(address_of(OTHER), node_id=OTHER)
    cluster.on_beat(beat(OTHER, dialled=address_of(OTHER)), now=START_S)
    assert cluster.node_ids() == [OTHER]
    commands = cluster.on_expelled(OTHER)
    assert statuses(commands) == [MemberStatus.LEFT]
    assert HangUp(address_of(OTHER)) in commands
    assert cluster.reachable() == []
    assert cluster.node_ids() == []


def test_a_flood_of_false_addresses_of_a_node_keeps_the_right_one_in() -> None:
    cluster = membership()
    for index in range(1000):
        cluster.on_address(f"10.9.{index // 250}.{index % 250}:7117", node_id=OTHER)
    commands = cluster.on_address(address_of(OTHER), node_id=OTHER)
    assert Dial(address_of(OTHER)) in commands
    cluster.on_beat(beat(OTHER, dialled=address_of(OTHER)), now=START_S)
    for index in range(1000):
        commands = cluster.on_address(f"10.8.{index // 250}.{index % 250}:7117", node_id=OTHER)
        assert HangUp(address_of(OTHER)) not in commands
    assert [member.node.address for member in cluster.reachable()] == [address_of(OTHER)]


def test_a_flood_in_one_nodes_name_leaves_room_for_others() -> None:
    cluster = membership()
    for index in range(1000):
        cluster.on_address(f"10.9.{index // 250}.{index % 250}:7117", node_id=OTHER)
    assert cluster.on_address(address_of(THIRD), node_id=THIRD) == [Dial(address_of(THIRD))]
