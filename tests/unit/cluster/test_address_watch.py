"""When a node moves to another address of its machine."""

from __future__ import annotations

from edgepipe.cluster.address_watch import AddressWatch

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
