"""Detects that the address that a node listens on no longer leads to other machines. PURE."""

from __future__ import annotations

import ipaddress

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
