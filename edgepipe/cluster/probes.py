"""Checks the network layer by layer, so that a person learns which layer fails. Changes nothing."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from edgepipe.plain_words import plain

_MDNS_PORT = 5353
_GROUP4, _GROUP6 = "224.0.0.251", "ff02::fb"
_QUERY = (  # RFC 6762 section 5 and RFC 6763 section 9: asks all machines which services they offer
    struct.pack("!6H", 0, 0, 1, 0, 0, 0)
    + b"".join(bytes([len(part)]) + part for part in (b"_services", b"_dns-sd", b"_udp", b"local"))
    + b"\0"
    + struct.pack("!2H", 12, 1)
)
_MAX_DATAGRAM = 9000
_PROBES_AT_ONCE = 32
_HEADER_BYTES = 20 + 20 + 12  # IPv4, TCP, and the time stamps that are taken off a segment


class Reach(StrEnum):
    """The result of a TCP connection attempt."""

    OPEN = "open"
    REFUSED = "refused"  # the machine answers, and no process listens
    TIMEOUT = "timeout"  # something drops the packets, or the machine is off
    NO_ROUTE = "no route"
    NO_NAME = "no name"  # the host's name has no address
    BLOCKED = "blocked"  # this machine's own system refuses


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpProbe:
    """One attempt to connect."""

    host: str
    port: int
    reach: Reach
    took_ms: float
    error: str = ""
    errno: int = 0
    path_mtu_bytes: int = 0  # path MTU of the open connection; 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class MulticastProbe:
    """The answers to a multicast question on one interface."""

    address: str
    sent: bool
    error: str = ""
    errno: int = 0
    others: tuple[str, ...] = ()  # addresses of other machines that answered, each once
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsProbe:
    """The certificate that an address shows."""

    certificate_pem: bytes = b""  # empty: no handshake
    silent: bool = False  # connected, and no data came
    error: str = ""


async def probe_tcp(host: str, port: int, *, timeout_s: float) -> TcpProbe:
    """Connect and hang up. Failures of the network raise nothing."""
    began = time.monotonic()

    def result(reach: Reach, error: OSError | UnicodeError | None = None, path_mtu_bytes: int = 0) -> TcpProbe:
        return TcpProbe(
            host=host,
            port=port,
            reach=reach,
            took_ms=(time.monotonic() - began) * 1e3,
            error=plain(error) if error else "",
            errno=(error.errno or 0) if isinstance(error, OSError) else 0,
            path_mtu_bytes=path_mtu_bytes,
        )

    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return result(Reach.TIMEOUT)
    except (socket.gaierror, UnicodeError) as exc:
        return result(Reach.NO_NAME, exc)
    except OSError as exc:
        return result(reach_of(exc.errno or 0), exc)
    mtu = _path_mtu(writer.get_extra_info("socket"))
    writer.close()
    return result(Reach.OPEN, path_mtu_bytes=mtu)


def reach_of(number: int) -> Reach:
    """Translate an error number of ``connect``."""
    if number == errno.ECONNREFUSED:
        return Reach.REFUSED
    if number in (errno.EPERM, errno.EACCES):
        return Reach.BLOCKED
    return Reach.TIMEOUT if number == errno.ETIMEDOUT else Reach.NO_ROUTE


async def probe_ports(host: str, ports: Iterable[int], *, timeout_s: float) -> list[TcpProbe]:
    """Probe all ports, some at a time; return the results in order."""
    places = asyncio.Semaphore(_PROBES_AT_ONCE)

    async def one(port: int) -> TcpProbe:
        async with places:
            return await probe_tcp(host, port, timeout_s=timeout_s)

    return list(await asyncio.gather(*(one(port) for port in ports)))


async def probe_tls(host: str, port: int, *, timeout_s: float) -> TlsProbe:
    """Read the certificate that an address shows, without trusting it and without showing one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # a caller that trusts the certificate compares its key
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except TimeoutError:
        return TlsProbe(silent=True, error=f"no answer within {timeout_s:g} s")
    except OSError as exc:  # ssl.SSLError is one
        return TlsProbe(error=plain(exc))
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
    writer.transport.abort()
    return TlsProbe(certificate_pem=ssl.DER_cert_to_PEM_cert(der).encode() if der else b"")


async def probe_multicast(address: str, *, own: Sequence[str], listen_s: float) -> MulticastProbe:
    """Ask all machines on the interface of ``address`` (IPv4) for their services. Listen until a machine other than
    ``own`` is heard, or the time is over."""

    def open_socket() -> socket.socket:
        sock = _mdns_socket(socket.AF_INET)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
        sock.setsockopt(
            socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(_GROUP4) + socket.inet_aton(address)
        )
        return sock

    return await _probe_multicast(address, open_socket, (_GROUP4, _MDNS_PORT), own, listen_s)


async def probe_multicast6(address: str, index: int, *, own: Sequence[str], listen_s: float) -> MulticastProbe:
    """Ask over IPv6, like ``probe_multicast``; ``index``: of the interface."""

    def open_socket() -> socket.socket:
        sock = _mdns_socket(socket.AF_INET6)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        group = socket.inet_pton(socket.AF_INET6, _GROUP6) + struct.pack("@I", index)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
        return sock

    return await _probe_multicast(address, open_socket, (_GROUP6, _MDNS_PORT, 0, index), own, listen_s)


async def _probe_multicast(
    address: str,
    open_socket: Callable[[], socket.socket],
    target: tuple[str, int] | tuple[str, int, int, int],
    own: Sequence[str],
    listen_s: float,
) -> MulticastProbe:
    began = time.monotonic()
    try:
        sock = open_socket()
    except OSError as exc:
        return MulticastProbe(address=address, sent=False, error=plain(exc), errno=exc.errno or 0)
    heard: dict[str, None] = {}
    failure: OSError | None = None
    with sock:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendto(sock, _QUERY, target)
        except OSError as exc:
            failure = exc
        try:
            async with asyncio.timeout(listen_s):
                while not heard:
                    _, source = await loop.sock_recvfrom(sock, _MAX_DATAGRAM)
                    if (host := str(source[0]).partition("%")[0]) not in own:
                        heard[host] = None
        except TimeoutError:
            pass
    return MulticastProbe(
        address=address,
        sent=failure is None,
        error=plain(failure) if failure else "",
        errno=(failure.errno or 0) if failure else 0,
        others=tuple(heard),
        waited_s=time.monotonic() - began,
    )


def _mdns_socket(family: int) -> socket.socket:
    """Return a socket bound to the mDNS port, which other programs may use at the same time."""
    sock = socket.socket(family, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(("", _MDNS_PORT))
    except OSError:
        sock.close()
        raise
    return sock


def _path_mtu(sock: socket.socket) -> int:
    """Return the largest packet that Linux knows to pass: from packets that were too large, or from the other end's
    limit. 0 on other systems."""
    number = getattr(socket, "IP_MTU", 14)
    try:
        known = sock.getsockopt(socket.IPPROTO_IP, number)
        agreed = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) + _HEADER_BYTES
    except OSError:
        return 0
    return min(known, agreed)


def neighbour_is_known(host: str, *, table: Path = Path("/proc/net/arp")) -> bool | None:
    """Return whether the machine with that address answered ARP lately: then it is on, and a firewall drops packets.
    None: this system does not tell."""
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    for line in lines:
        columns = line.split()
        if columns and columns[0] == host:
            return columns[2] != "0x0"  # flags: 0x0 is an incomplete entry
    return None
