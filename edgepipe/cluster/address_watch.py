"""Notices that the machine has another address than the one its node listens on. PURE."""

from __future__ import annotations

import ipaddress

_LOOKS = 2  # in a row: an address that DHCP takes away for a moment comes back


class AddressWatch:
    """Look now and then; a look tells when the node should move."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._away = 0

    def moved(self, *, wanted: str, available: set[str]) -> bool:
        """Whether to listen on ``wanted`` instead: the own address is gone, or there was no network at the start.

        Without a network there is nowhere to move to: then the node stays as it is and waits for one.
        """
        stale = self._host not in available or ipaddress.ip_address(self._host).is_loopback
        useful = wanted != self._host and not ipaddress.ip_address(wanted).is_loopback
        self._away = self._away + 1 if stale and useful else 0
        return self._away >= _LOOKS
