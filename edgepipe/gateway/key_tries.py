"""How many wrong keys an address may send (PURE)."""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict, deque
from collections.abc import Callable

MOST_TRIES = 10
WINDOW_S = 60.0
_MOST_ADDRESSES = 4096  # the one that tried longest ago is forgotten


class KeyTries:
    """Times of the wrong keys of each address. The addresses of one IPv6 network of 64 bits count as one."""

    def __init__(self, *, now_s: Callable[[], float]) -> None:
        """``now_s``: monotonic."""
        self._now_s = now_s
        self._tries: OrderedDict[str, deque[float]] = OrderedDict()

    def failed(self, address: str) -> None:
        """Count a wrong key."""
        tries = self._tries.setdefault(_network(address), deque(maxlen=MOST_TRIES))
        tries.append(self._now_s())
        self._tries.move_to_end(_network(address))
        if len(self._tries) > _MOST_ADDRESSES:
            self._tries.popitem(last=False)

    def wait_s(self, address: str) -> int:
        """Return after how many seconds the address may send a key again; 0: now."""
        tries = self._tries.get(_network(address))
        if tries is None or len(tries) < MOST_TRIES:
            return 0
        return max(0, math.ceil(tries[0] + WINDOW_S - self._now_s()))


def _network(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address.removeprefix("address:"))
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
