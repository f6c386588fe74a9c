"""Find nodes of the same cluster by multicast DNS. What is found is only an address to try: it authorises nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from edgepipe import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

SERVICE_TYPE = "_edgepipe._tcp.local."
_LOOKUP_MS = 2000  # a node answers in milliseconds; lost multicast is asked again within this
_MAX_LOOKUPS = 64  # at a time; more names than a home has machines means that somebody floods


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What a node says of itself in its TXT record."""

    cluster_id: str
    node_id: str
    node_name: str
    host: str
    port: int
    incarnation: int = 0
    protocol_version: int = PROTOCOL_VERSION

    @property
    def address(self) -> str:
        """HOST:PORT of its daemon."""
        return f"{self.host}:{self.port}"


class Discovery:
    """Announces this node and tells ``on_found`` of others, on one interface, from ``start`` to ``stop``."""

    def __init__(self, own: Announcement, on_found: Callable[[Announcement], None]) -> None:
        self._own = own
        self._on_found = on_found
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._lookups: set[asyncio.Task[None]] = set()
        self._info = _service_info(own)
        self._announced: Any = None  # zeroconf's task that repeats the announcement; kept, so that it is not lost

    async def start(self) -> None:
        """Register and browse. A network without multicast is no error: peers can be named by hand."""
        try:
            self._zeroconf = AsyncZeroconf(interfaces=[self._own.host], ip_version=IPVersion.V4Only)
            # Name: node id and incarnation. Nobody else has it, so the probing wait of 0.75 s can be left out.
            register: Any = self._zeroconf.async_register_service  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            self._announced = await register(self._info, cooperating_responders=True)
            self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE_TYPE, handlers=[self._changed])
        except OSError as exc:
            logger.warning("multicast DNS does not work on %s: %s; name peers with --peer", self._own.host, exc)

    async def stop(self) -> None:
        """Say goodbye and close the sockets."""
        for lookup in self._lookups:
            lookup.cancel()
        if self._browser is not None:
            await self._browser.async_cancel()
        if self._zeroconf is not None:
            unregister: Any = self._zeroconf.async_unregister_service  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            await (await unregister(self._info))  # the inner one ends when the goodbyes are sent
            await self._zeroconf.async_close()
            self._zeroconf = None

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        """A record came, changed or went. Goodbyes are left to the heartbeats."""
        if state_change is ServiceStateChange.Removed or name == self._info.name or len(self._lookups) >= _MAX_LOOKUPS:
            return
        lookup = asyncio.get_running_loop().create_task(self._look_up(zeroconf, name), name=f"mdns:{name}")
        self._lookups.add(lookup)
        lookup.add_done_callback(self._lookups.discard)

    async def _look_up(self, zeroconf: Zeroconf, name: str) -> None:
        info = AsyncServiceInfo(SERVICE_TYPE, name)
        if not await info.async_request(zeroconf, _LOOKUP_MS):
            logger.debug("no answer from %s", name)
            return
        found = read_announcement(info)
        if found is not None and found.cluster_id == self._own.cluster_id:
            self._on_found(found)


def read_announcement(info: AsyncServiceInfo) -> Announcement | None:
    """The announcement in a DNS-SD record; None if it is not one of ours."""
    texts = {
        key.decode(errors="replace"): (value or b"").decode(errors="replace") for key, value in info.properties.items()
    }
    hosts = info.parsed_addresses(IPVersion.V4Only)
    protocol = texts.get("protocol", "")
    if not hosts or not info.port or not texts.get("node_id") or not protocol.isdecimal():
        return None
    return Announcement(
        cluster_id=texts.get("cluster_id", ""),
        node_id=texts["node_id"],
        node_name=texts.get("name", ""),
        host=hosts[0],
        port=info.port,
        protocol_version=int(protocol),
    )


def _service_info(own: Announcement) -> AsyncServiceInfo:
    name = f"{own.node_id}-{own.incarnation}"  # two copies of one data directory differ in the latter
    return AsyncServiceInfo(
        SERVICE_TYPE,
        f"{name}.{SERVICE_TYPE}",
        port=own.port,
        parsed_addresses=[own.host],
        server=f"{name}.local.",
        properties={
            "cluster_id": own.cluster_id,
            "node_id": own.node_id,
            "name": own.node_name,
            "protocol": str(own.protocol_version),
        },
    )
