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


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("nordlynx", 16), ("ppp0", 32), ("proton0", 24), ("tap0", 24), ("gpd0", 32), ("feth1", 24), ("of-tomorrow0", 32)],
)
def test_a_vpn_that_has_the_route_to_the_internet_does_not_take_the_node_off_the_lan(name: str, prefix: int) -> None:
    """Other machines do not reach the address that a VPN gave to this one."""
    vpn = Interface(name=name, address="10.5.0.2", prefix=prefix)
    assert choose(routed="10.5.0.2", found=[FOUND[0], vpn, *FOUND[1:]]) == "192.168.1.20"


@pytest.mark.parametrize("name", ["lxdbr0", "vboxnet0", "podman0", "cni0", "vnet3"])
def test_networks_of_virtual_machines_and_containers_are_skipped(name: str) -> None:
    found = [FOUND[0], Interface(name=name, address="10.8.0.1"), *FOUND[1:]]
    assert choose(routed="", found=found) == "192.168.1.20"


@pytest.mark.parametrize("name", ["br0", "vmbr0", "bond0", "en0", "enp3s0", "wlp2s0", "eth0.20"])
def test_lan_bridges_and_adapters_are_taken(name: str) -> None:
    assert choose(routed="10.1.1.1", found=[Interface(name=name, address="10.1.1.1")]) == "10.1.1.1"


@pytest.mark.parametrize("wanted", ["docker0", "172.17.0.1"])
def test_a_named_interface_is_taken_whatever_it_is(wanted: str) -> None:
    assert choose(wanted) == "172.17.0.1"


def test_an_unknown_interface_is_an_error_that_lists_those_there() -> None:
    with pytest.raises(ConfigInvalid) as error:
        choose("eth7")
    assert "eth0 192.168.1.20" in error.value.fact


def test_a_machine_without_a_network_serves_itself() -> None:
    assert choose(found=FOUND[:2]) == "127.0.0.1"
