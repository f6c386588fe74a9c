"""Detects that the machine no longer has the address that its node listens on. PURE."""

from __future__ import annotations

import ipaddress

_LOOKS = 2  # consecutive checks: an address that DHCP takes away for a moment comes back


class AddressWatch:
    """Compares the node's address with the machine's addresses. Call ``moved`` at intervals."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._away = 0

    def moved(self, *, wanted: str, available: set[str]) -> bool:
        """Return whether to listen on ``wanted`` instead: the own address is gone, or the node started without network.

        Without a network there is nowhere to move to: the node then stays and waits for one.
        """
        stale = self._host not in available or ipaddress.ip_address(self._host).is_loopback
        useful = wanted != self._host and not ipaddress.ip_address(wanted).is_loopback
        self._away = self._away + 1 if stale and useful else 0
        return self._away >= _LOOKS
