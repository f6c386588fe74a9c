"""When a node moves to another address of its machine."""

from __future__ import annotations

import pytest

from edgepipe.cluster.address_watch import AddressWatch, MemberContact, ReachWatch
from edgepipe.cluster.interfaces import Interface

OLD, NEW, LOOPBACK = "192.168.1.20", "192.168.1.77", "127.0.0.1"


def test_a_new_address_in_place_of_the_old_one_is_followed_at_the_second_look() -> None:
    watch = AddressWatch(OLD)
    assert not watch.moved(wanted=NEW, available={NEW, LOOPBACK})
    assert watch.moved(wanted=NEW, available={NEW, LOOPBACK})


def test_a_second_network_does_not_move_a_node() -> None:
    watch = AddressWatch(OLD)
    assert not any(watch.moved(wanted=NEW, available={OLD, NEW, LOOPBACK}) for _ in range(5))


def test_an_address_that_comes_back_and_a_network_that_is_away_move_nothing() -> None:
    watch = AddressWatch(OLD)
    assert not watch.moved(wanted=NEW, available={NEW})
    assert not watch.moved(wanted=OLD, available={OLD})
    assert not watch.moved(wanted=NEW, available={NEW})
    assert not any(watch.moved(wanted=LOOPBACK, available={LOOPBACK}) for _ in range(5))


def test_a_node_that_began_without_a_network_moves_to_the_first_one() -> None:
    watch = AddressWatch(LOOPBACK)
    assert not watch.moved(wanted=NEW, available={LOOPBACK, NEW})
    assert watch.moved(wanted=NEW, available={LOOPBACK, NEW})


def test_a_node_that_was_told_to_keep_to_loopback_does() -> None:
    watch = AddressWatch(LOOPBACK)
    assert not any(watch.moved(wanted=LOOPBACK, available={LOOPBACK, NEW}) for _ in range(3))


def test_a_cable_that_is_out_moves_a_node_to_the_other_network() -> None:
    """The address is still there, but it is not among those with a link."""
    watch = AddressWatch(OLD)
    assert not watch.moved(wanted="10.91.0.1", available={"10.91.0.1", LOOPBACK})
    assert watch.moved(wanted="10.91.0.1", available={"10.91.0.1", LOOPBACK})


def test_a_node_that_began_with_ipv6_only_moves_to_ipv4_and_never_back() -> None:
    watch = AddressWatch("fd00:77::11")
    assert not watch.moved(wanted=NEW, available={"fd00:77::11", NEW})
    assert watch.moved(wanted=NEW, available={"fd00:77::11", NEW})
    watch = AddressWatch(OLD)
    assert not any(watch.moved(wanted="fd00:77::11", available={OLD, "fd00:77::11"}) for _ in range(3))


HERE, THERE = Interface(name="eth0", address=OLD), Interface(name="eth1", address="10.91.0.2")
REACHES_US = {
    "a member that moved to the other network": ([("10.91.0.1", False)], "10.91.0.2"),
    "it still reaches this node": ([("10.91.0.1", True)], ""),
    "another member is in this network": ([("10.91.0.1", False), ("192.168.1.50", False)], ""),
    "another member reaches this node": ([("10.91.0.1", False), ("172.16.0.9", True)], ""),
    "a member behind a router": ([("172.16.0.9", False)], ""),
    "a member that reports nonsense": ([("kitchen", False)], ""),
    "no member answers": ([], ""),
}


@pytest.mark.parametrize("case", REACHES_US)
def test_a_node_that_nobody_reaches_follows_its_members_to_the_other_network(case: str) -> None:
    members, wanted = REACHES_US[case]
    contacts = [MemberContact(host=host, reaches_us=reaches_us) for host, reaches_us in members]
    watch = ReachWatch(OLD)
    assert not watch.better(usable=[HERE, THERE], contacts=contacts), "the first look decides nothing"
    assert watch.better(usable=[HERE, THERE], contacts=contacts) == wanted


def test_a_node_on_a_dead_cable_or_a_named_interface_is_not_moved_by_its_members() -> None:
    watch = ReachWatch(OLD)
    contacts = [MemberContact(host="10.91.0.1", reaches_us=False)]
    for usable in ([THERE], [HERE], []):
        assert not any(watch.better(usable=usable, contacts=contacts) for _ in range(4))
