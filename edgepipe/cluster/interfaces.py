"""The address that a node listens on and announces.

Whether a bridge leads to other machines is decided by its members and by routes: macOS calls the bridge of its
Thunderbolt ports ``bridge0``, and that of a virtual machine ``bridge100``.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass

import ifaddr

from edgepipe.addresses import is_loopback
from edgepipe.cluster.interface_facts import BridgeMember, interface_facts
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
_MACHINES = ("vmnet", "vmenet", "vnic", "vboxnet", "vnet")  # virtual ones; Proxmox's vmbr leads to the LAN
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
_LONGEST_PREFIX = {4: 30, 6: 126}  # a longer one leaves no second machine in the network, as tunnels have it
_LOCAL6 = ipaddress.ip_network("fc00::/7")  # RFC 4193
_NO_TRAFFIC = "192.0.2.1"  # a documentation address: connecting a UDP socket only asks the routing table


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One address of this machine: IPv4, or IPv6 without a scope."""

    name: str
    address: str
    prefix: int = 24  # bits of its network
    members: tuple[BridgeMember, ...] | None = None  # members of a bridge; None: no bridge
    carrier: bool = True  # False: the cable is out, or no radio network is joined

    @property
    def network(self) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
        """Return the addresses that it reaches without a router."""
        return ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False)


def interfaces() -> list[Interface]:
    """Return this machine's addresses, without those of IPv6 that need a scope."""
    adapters = list(ifaddr.get_adapters())
    facts = interface_facts({adapter.nice_name for adapter in adapters})
    return [
        Interface(
            name=adapter.nice_name,
            address=address,
            prefix=ip.network_prefix,
            members=facts[adapter.nice_name].members,
            carrier=facts[adapter.nice_name].carrier,
        )
        for adapter in adapters
        for ip in adapter.ips
        if (address := ip.ip if isinstance(ip.ip, str) else ip.ip[0])
        and not (":" in address and ipaddress.ip_address(address.partition("%")[0]).is_link_local)
    ]


def lan_interfaces(available: Iterable[Interface], *, routed: str = "") -> list[Interface]:
    """Return the addresses that lead to other machines, the best first: no loopback, containers or tunnels.

    Addresses with a cable or a radio network come before those without one; IPv4 comes before IPv6, which is left out
    beside IPv4. ``routed``: this machine's address on the route to the internet.
    """
    usable = [interface for interface in available if _leads_out(interface, routed=routed)]
    if any(":" not in interface.address for interface in usable):
        usable = [interface for interface in usable if ":" not in interface.address]
    return sorted(usable, key=lambda interface: _preference(interface, routed=routed))


def _leads_out(interface: Interface, *, routed: str) -> bool:
    version = 6 if ":" in interface.address else 4
    if is_loopback(interface.address) or interface.prefix > _LONGEST_PREFIX[version]:
        return False
    if interface.members is None:
        return not interface.name.startswith(_SKIPPED)
    return interface.address == routed or any(not member.virtual for member in interface.members)


def _preference(interface: Interface, *, routed: str) -> tuple[bool, bool, bool]:
    """Return a key for sorting: a live link, then the route to the internet, then an address that was assigned.

    Of IPv6 addresses, local ones (fc00::/7) come first: they lead into the home only, and last.
    """
    address = ipaddress.ip_address(interface.address)
    lasting = not address.is_link_local if address.version == 4 else address in _LOCAL6
    return not interface.carrier, interface.address != routed, not lasting


def own_addresses() -> list[str]:
    """Return every address of this machine, IPv4 and IPv6."""
    return [ip.ip if isinstance(ip.ip, str) else ip.ip[0] for adapter in ifaddr.get_adapters() for ip in adapter.ips]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLocal:
    """An interface's own IPv6 address."""

    address: str
    index: int  # number of the interface in the operating system


def link_local6(name: str) -> LinkLocal | None:
    """Return the link-local IPv6 address of an interface; None if it has none."""
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            if adapter.nice_name == name and isinstance(ip.ip, tuple) and str(ip.ip[0]).startswith("fe80"):
                return LinkLocal(address=str(ip.ip[0]), index=int(ip.ip[2]))
    return None


def link_locals6() -> list[str]:
    """Return this machine's link-local addresses of IPv6 on networks to other machines."""
    adapters = [adapter for adapter in ifaddr.get_adapters() if not adapter.nice_name.startswith(_SKIPPED)]
    found = [str(ip.ip[0]) for adapter in adapters for ip in adapter.ips if not ip.is_IPv4]
    return [address for address in found if address.startswith("fe80")]


def choose_address(*, interface: str, available: list[Interface], routed: str) -> str:
    """Return the address to listen on: the named interface's, else the routed one, else loopback.

    ``routed``: this machine's address on the route to the internet. Raises ConfigInvalid.
    """
    if interface:
        return _named(interface, available=available)
    usable = lan_interfaces(available, routed=routed)
    return usable[0].address if usable else LOOPBACK  # a machine without a network can still serve itself


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
    matching = [candidate.address for candidate in available if interface in (candidate.name, candidate.address)]
    found = min(matching, key=lambda address: ":" in address, default="")
    if not found and is_loopback(interface):
        found = interface
    if not found:
        raise ConfigInvalid(
            f"there is no interface '{interface}'",
            fact=f"found: {', '.join(f'{candidate.name} {candidate.address}' for candidate in available)}",
            next_step="name one of them with --interface",
        )
    return found
