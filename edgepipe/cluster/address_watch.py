"""Detects that the address that a node listens on no longer leads to other machines. PURE."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from edgepipe.cluster.interfaces import Interface

_LOOKS = 2  # consecutive checks: an address that DHCP takes away for a moment comes back


class AddressWatch:
    """Compares the node's address with the machine's addresses. Call ``moved`` at intervals."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._away = 0

    def moved(self, *, wanted: str, available: set[str]) -> bool:
        """Return whether to listen on ``wanted`` instead: the own address is gone or its cable is out, or the node
        started without a network, or with IPv6 only and ``wanted`` is IPv4.

        ``available``: the addresses of this machine that have a cable or a radio network. Without a network there is
        nowhere to move to: the node then stays and waits for one.
        """
        own, other = ipaddress.ip_address(self._host), ipaddress.ip_address(wanted)
        stale = self._host not in available or own.is_loopback or own.version > other.version
        useful = wanted != self._host and not other.is_loopback
        self._away = self._away + 1 if stale and useful else 0
        return self._away >= _LOOKS


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberContact:
    """A member that answers this node."""

    host: str  # the address that it listens on
    reaches_us: bool  # the node has opened a connection to this one and still sends over it


class ReachWatch:
    """Compares the node's network with those of its members. Call ``better`` at intervals.

    After a cable broke, a member may have moved to another network. This node can call it there, but the member calls
    this node's address in vain.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._apart = 0

    def better(self, *, usable: Sequence[Interface], contacts: Collection[MemberContact]) -> str:
        """Return this machine's address in a network with members; empty while this node should stay.

        It stays where a member reaches it or is in its network: there a firewall may be in the way, not the network.
        ``usable``: the machine's addresses that lead to other machines.
        """
        here = [interface for interface in usable if interface.address == self._host]
        there = [interface for interface in usable if interface.address != self._host]
        stays = not here or any(one.reaches_us or _is_in(one.host, here[0]) for one in contacts)
        found = [interface.address for interface in there if any(_is_in(one.host, interface) for one in contacts)]
        self._apart = self._apart + 1 if found and not stays else 0
        return found[0] if found and self._apart >= _LOOKS else ""


def _is_in(host: str, interface: Interface) -> bool:
    """Return whether an address is in an interface's network. A member may report anything as its host."""
    try:
        return ipaddress.ip_address(host) in interface.network
    except ValueError:
        return False
