"""Searches once for nodes on every interface, without being a node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from zeroconf import IPVersion, ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from edgepipe.cluster.discovery import SERVICE_TYPE, Announcement, read_announcement
from edgepipe.cluster.interfaces import interfaces, lan_interfaces

_LOOKUP_MS = 1000
_MOST_LOOKUPS = 64  # lookups at a time; a home has a few dozen machines
_MOST_FOUND = 64
_SETTLE_S = 0.3  # a second answer to the same question comes within this time


async def browse(*, listen_s: float, until: Callable[[Announcement], bool] = lambda _: False) -> list[Announcement]:
    """Return every node that announces itself within the time; end early, soon after ``until`` holds for a node.

    Proves no node's identity.
    """
    try:
        zeroconf = AsyncZeroconf(ip_version=_version())
    except OSError:  # no interface takes multicast
        return []
    search = _Search(zeroconf, until)
    try:
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[search.changed])
        with suppress(TimeoutError):
            async with asyncio.timeout(listen_s):
                await search.satisfied.wait()
                await asyncio.sleep(_SETTLE_S)
        await browser.async_cancel()
    finally:
        await search.end()
        await zeroconf.async_close()
    return list(search.found.values())


def _version() -> IPVersion:
    """Return IPv6 for a machine that has no IPv4 on any network, as nodes choose it, too."""
    usable = lan_interfaces(interfaces())
    return IPVersion.V6Only if usable and ":" in usable[0].address else IPVersion.V4Only


class _Search:
    """The nodes found so far."""

    def __init__(self, zeroconf: AsyncZeroconf, until: Callable[[Announcement], bool]) -> None:
        self.found: dict[str, Announcement] = {}
        self.satisfied = asyncio.Event()
        self._zeroconf = zeroconf
        self._until = until
        self._lookups: set[asyncio.Task[None]] = set()

    def changed(self, *, name: str, state_change: ServiceStateChange, **_: object) -> None:
        """Look up a new or changed record."""
        if state_change is not ServiceStateChange.Removed and len(self._lookups) < _MOST_LOOKUPS:
            lookup = asyncio.get_running_loop().create_task(self._look_up(name), name=f"browse:{name}")
            self._lookups.add(lookup)
            lookup.add_done_callback(self._lookups.discard)

    async def end(self) -> None:
        """Cancel lookups under way."""
        for lookup in list(self._lookups):
            lookup.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)

    async def _look_up(self, name: str) -> None:
        info = AsyncServiceInfo(SERVICE_TYPE, name)
        if not await info.async_request(self._zeroconf.zeroconf, _LOOKUP_MS):
            return
        announcement = read_announcement(info)
        if announcement is not None and (
            name in self.found or len(self.found) < _MOST_FOUND or self._until(announcement)
        ):
            self.found[name] = announcement
            if self._until(announcement):
                self.satisfied.set()
