"""Which address a node listens on."""

from __future__ import annotations

import pytest

from edgepipe.cluster.interfaces import Interface, choose_address
from edgepipe.errors import ConfigInvalid

FOUND = [
    Interface(name="lo", address="127.0.0.1"),
    Interface(name="docker0", address="172.17.0.1"),
    Interface(name="eth0", address="192.168.1.20"),
    Interface(name="wlan0", address="192.168.1.30"),
]


def choose(interface: str = "", *, routed: str = "", found: list[Interface] = FOUND) -> str:
    return choose_address(interface=interface, available=found, routed=routed)


def test_loopback_when_named() -> None:
    assert choose("127.0.0.1", routed="192.168.1.30") == "127.0.0.1"


def test_the_lan_is_the_routed_interface() -> None:
    assert choose(routed="192.168.1.30") == "192.168.1.30"


def test_virtual_interfaces_are_skipped_even_when_routed() -> None:
    assert choose(routed="172.17.0.1") == "192.168.1.20"


@pytest.mark.parametrize("wanted", ["docker0", "172.17.0.1"])
def test_a_named_interface_is_taken_whatever_it_is(wanted: str) -> None:
    assert choose(wanted) == "172.17.0.1"


def test_an_unknown_interface_is_an_error_that_lists_those_there() -> None:
    with pytest.raises(ConfigInvalid) as error:
        choose("eth7")
    assert "eth0 192.168.1.20" in error.value.fact


def test_a_machine_without_a_network_serves_itself() -> None:
    assert choose(found=FOUND[:2]) == "127.0.0.1"
