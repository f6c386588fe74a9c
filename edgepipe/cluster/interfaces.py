"""The address that a node listens on and announces."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import ifaddr

from edgepipe.errors import ConfigInvalid

LOOPBACK = "127.0.0.1"
_CONTAINERS = (
    "docker",
    "br-",
    "veth",
    "virbr",
    "lxcbr",
    "lxdbr",
    "incusbr",
    "podman",
    "cni",
    "flannel",
    "cali",
    "cilium",
)
_MACHINES = ("vmnet", "vmenet", "vnic", "vboxnet", "vnet", "bridge")  # virtual ones; Proxmox's vmbr leads to the LAN
_TUNNELS = (
    "tailscale",
    "utun",
    "tun",
    "tap",
    "wg",
    "zt",
    "feth",
    "ppp",
    "ipsec",
    "nordlynx",
    "proton",
    "gpd",
    "cscotun",
)
_MORE_TUNNELS = ("mullvad", "surfshark", "outline", "CloudflareWARP", "ham", "nebula", "awdl", "llw")
_SKIPPED = (*_CONTAINERS, *_MACHINES, *_TUNNELS, *_MORE_TUNNELS)
_LONGEST_PREFIX = 30  # a longer one leaves no second machine in the network, as tunnels have it
_NO_TRAFFIC = "192.0.2.1"  # a documentation address: connecting a UDP socket only asks the routing table


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One IPv4 address of this machine."""

    name: str
    address: str
    prefix: int = 24  # bits of its network


def interfaces() -> list[Interface]:
    """Return all IPv4 addresses of this machine."""
    return [
        Interface(name=adapter.nice_name, address=ip.ip, prefix=ip.network_prefix)
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
        if isinstance(ip.ip, str)
    ]


def lan_interfaces(available: Iterable[Interface]) -> list[Interface]:
    """Return the addresses that lead to other machines: no loopback, containers or tunnels."""
    return [
        interface
        for interface in available
        if not _is_loopback(interface.address)
        and not interface.name.startswith(_SKIPPED)
        and interface.prefix <= _LONGEST_PREFIX
    ]


def own_addresses() -> list[str]:
    """Return every address of this machine, IPv4 and IPv6."""
    return [ip.ip if isinstance(ip.ip, str) else ip.ip[0] for adapter in ifaddr.get_adapters() for ip in adapter.ips]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLocal:
    """An interface's own IPv6 address."""

    address: str
    index: int  # of the interface


def link_local6(name: str) -> LinkLocal | None:
    """Return the link-local IPv6 address of an interface; None if it has none."""
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            if adapter.nice_name == name and isinstance(ip.ip, tuple) and str(ip.ip[0]).startswith("fe80"):
                return LinkLocal(address=str(ip.ip[0]), index=int(ip.ip[2]))
    return None


def choose_address(*, interface: str, available: list[Interface], routed: str) -> str:
    """Return the address to listen on: the named interface's, else the routed one, else loopback.

    ``routed``: this machine's address on the route to the internet. Raises ConfigInvalid.
    """
    if interface:
        return _named(interface, available=available)
    usable = lan_interfaces(available)
    if not usable:
        return LOOPBACK  # a machine without a network can still serve itself
    return next((candidate.address for candidate in usable if candidate.address == routed), usable[0].address)


def is_wireless(address: str, available: list[Interface]) -> bool:
    """Return whether an address belongs to a wireless interface, as far as Linux's names tell (wlan0, wlp3s0)."""
    return any(candidate.address == address and candidate.name.startswith("wl") for candidate in available)


def routed_address() -> str:
    """Return this machine's address on the route to the internet; empty without a route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_NO_TRAFFIC, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def _named(interface: str, *, available: list[Interface]) -> str:
    found = next((candidate.address for candidate in available if interface in (candidate.name, candidate.address)), "")
    if not found and _is_loopback(interface):
        found = interface
    if not found:
        raise ConfigInvalid(
            f"there is no interface '{interface}'",
            fact=f"found: {', '.join(f'{candidate.name} {candidate.address}' for candidate in available)}",
            next_step="name one of them with --interface",
        )
    return found


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
