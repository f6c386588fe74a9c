"""Finds nodes by multicast DNS. A result is only an address to try: it authorises nothing, and this module checks only
that it is short, printable text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from zeroconf import Error as ZeroconfError
from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from edgepipe import PROTOCOL_VERSION, __version__
from edgepipe.addresses import with_port
from edgepipe.plain_words import plain

logger = logging.getLogger(__name__)

SERVICE_TYPE = "_edgepipe._tcp.local."
_LOOKUP_MS = 2000  # a node answers in milliseconds; lost multicast is asked again within this
_MAX_LOOKUPS = 64  # lookups at a time; more names than a home has machines mean a flood
_MAX_TXT_BYTES = 1024  # ours have about 250
RENEW_S = 300.0  # an adapter that was unplugged meanwhile has lost its multicast group, and no call reports that
AGAIN_S = 30.0  # pause after multicast did not work
_INCARNATION_DIGITS = 10  # digits in an instance's name, which is a DNS label: at most 63 bytes with the node's 52


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A node's description of itself in its TXT record."""

    cluster_id: str
    cluster_name: str
    node_id: str
    node_name: str
    host: str
    port: int
    incarnation: int = 0
    protocol_version: int = PROTOCOL_VERSION
    edgepipe_version: str = __version__
    pairing_port: int = 0  # port for a machine that has the code; 0: no invitation is open

    @property
    def address(self) -> str:
        """HOST:PORT of its daemon."""
        return with_port(self.host, self.port)


class Discovery:
    """Announces this node on one interface, and passes other nodes of any cluster to ``on_found``.

    It only listens on the machine's other interfaces: this node cannot be reached there.
    """

    def __init__(self, own: Announcement, on_found: Callable[[Announcement], None]) -> None:
        self.problem = ""  # why no node can be found; empty: it works, as far as this machine knows
        self._own = own
        self._on_found = on_found
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        # Browser on each of this node's further addresses.
        self._listeners: dict[str, tuple[AsyncZeroconf, AsyncServiceBrowser]] = {}
        self._others: list[str] = []  # own addresses to listen on, beside the announced one
        self._lookups: set[asyncio.Task[None]] = set()
        self._info = _service_info(own)
        self._announced: Any = None  # zeroconf's task that repeats the announcement; kept against garbage collection
        self._changing = asyncio.Lock()
        self._stopped = False

    async def start(self) -> None:
        """Register and browse. A network without multicast is no error: peers can be named by hand."""
        async with self._changing:
            await self._open()

    async def run(self, *, renew_s: float = RENEW_S, again_s: float = AGAIN_S) -> None:
        """Register and browse anew at intervals, until cancelled: sockets do not show that they have gone deaf."""
        while not self._stopped:
            await asyncio.sleep(again_s if self.problem else renew_s)
            async with self._changing:
                await self._close()
                if not self._stopped:
                    await self._open()

    async def announce_pairing(self, port: int) -> None:
        """Announce the port where a machine may join; 0: pairing is closed."""
        async with self._changing:
            self._own = replace(self._own, pairing_port=port)
            self._info = _service_info(self._own)
            if self._zeroconf is not None:
                update: Any = self._zeroconf.async_update_service  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
                self._announced = await update(self._info)

    async def listen_on(self, addresses: Sequence[str]) -> None:
        """Hear announcements in the networks of these addresses of this machine, and of no others but the own one."""
        async with self._changing:
            self._others = list(addresses)
            await self._stop_listening()
            if not self._stopped:
                await self._listen()

    async def stop(self) -> None:
        """Say goodbye and close the sockets."""
        self._stopped = True
        async with self._changing:
            await self._close()

    async def _open(self) -> None:
        problem = ""
        try:
            self._zeroconf = AsyncZeroconf(interfaces=[self._own.host], ip_version=_version(self._own.host))
            # Name: node id and incarnation. No other node has it, so the probing wait of 0.75 s can be left out.
            register: Any = self._zeroconf.async_register_service  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            self._announced = await register(self._info, cooperating_responders=True)
            self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE_TYPE, handlers=[self._changed])
        except (OSError, ZeroconfError) as exc:
            problem = f"multicast DNS does not work on {self._own.host}: {plain(exc)}"
            await self._close()
        await self._listen()
        if problem and problem != self.problem:
            logger.warning("%s; peers are found by remembered addresses and --peer", problem)
        elif self.problem and not problem:
            logger.info("multicast DNS works on %s", self._own.host)
        self.problem = problem

    async def _listen(self) -> None:
        for address in self._others:
            try:
                zeroconf = AsyncZeroconf(interfaces=[address], ip_version=_version(address))
            except (OSError, ZeroconfError) as exc:
                logger.info("no multicast DNS on %s: %s", address, exc or type(exc).__name__)
                continue
            browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[self._changed])
            self._listeners[address] = zeroconf, browser

    async def _stop_listening(self) -> None:
        for lookup in self._lookups:
            lookup.cancel()
        listeners, self._listeners = self._listeners, {}
        for zeroconf, browser in listeners.values():
            await browser.async_cancel()
            with suppress(OSError, ZeroconfError):
                await zeroconf.async_close()

    async def _close(self) -> None:
        await self._stop_listening()
        if self._browser is not None:
            await self._browser.async_cancel()
            self._browser = None
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is not None:
            unregister: Any = zeroconf.async_unregister_service  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            with suppress(OSError, ZeroconfError, KeyError):  # the network is away, or the service was not registered
                await (await unregister(self._info))  # the inner one ends when the goodbyes are sent
            with suppress(OSError, ZeroconfError):
                await zeroconf.async_close()

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        """Look up a new or changed record. Heartbeats detect nodes that go."""
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
        if found is not None and (found.node_id, found.address) != (self._own.node_id, self._own.address):
            self._on_found(found)


def read_announcement(info: AsyncServiceInfo) -> Announcement | None:
    """Parse the announcement in a DNS-SD record; None unless every field is well-formed."""
    hosts = info.parsed_addresses(IPVersion.V4Only) or info.parsed_addresses(IPVersion.V6Only)
    texts = read_texts(info.properties)
    if not hosts or not info.port or texts is None:
        return None
    try:
        return Announcement(
            cluster_id=texts["cluster_id"],
            cluster_name=texts["cluster"],
            node_id=texts["node_id"],
            node_name=texts["name"],
            host=hosts[0],
            port=info.port,
            protocol_version=_number(texts["protocol"]),
            edgepipe_version=texts["version"],
            pairing_port=_number(texts.get("pairing", "0")),
        )
    except (KeyError, ValueError):
        return None


def read_texts(properties: Mapping[bytes, bytes | None]) -> dict[str, str] | None:
    """Return the keys and values of a TXT record; None if it is too long, not UTF-8 or not printable."""
    if sum(len(key) + len(value or b"") for key, value in properties.items()) > _MAX_TXT_BYTES:
        return None
    try:
        texts = {key.decode(): (value or b"").decode() for key, value in properties.items()}
    except UnicodeDecodeError:
        return None
    return texts if all(text.isprintable() for pair in texts.items() for text in pair) else None


def _version(address: str) -> IPVersion:
    """Return the kind of network that an address of this machine belongs to."""
    return IPVersion.V6Only if ":" in address else IPVersion.V4Only


def _number(text: str) -> int:
    """Parse a number. Raises ValueError: ``int`` alone accepts signs, blanks and digits of other scripts."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 5):
        raise ValueError(text)
    return int(text)


def _service_info(own: Announcement) -> AsyncServiceInfo:
    digits = str(own.incarnation)[-_INCARNATION_DIGITS:]
    name = f"{own.node_id}-{digits}"  # two copies of one data directory differ in the latter
    return AsyncServiceInfo(
        SERVICE_TYPE,
        f"{name}.{SERVICE_TYPE}",
        port=own.port,
        parsed_addresses=[own.host],
        server=f"{name}.local.",
        properties={
            "cluster_id": own.cluster_id,
            "cluster": own.cluster_name,
            "node_id": own.node_id,
            "name": own.node_name,
            "protocol": str(own.protocol_version),
            "version": own.edgepipe_version,
            "pairing": str(own.pairing_port),
        },
    )
