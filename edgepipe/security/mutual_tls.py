"""Mutual TLS with pinned certificates: proves a process's identity, and checks the processes it calls and its callers.

TLS alone admits every owner of a pinned certificate. So each call is checked again: its certificate, the kind of that
process, and whether that kind may call the method. A connection outlives the removal of its owner, so calls under way
are cut when their caller is no longer known.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc
import grpc.aio

from edgepipe.addresses import host_and_port
from edgepipe.errors import (
    AccessDenied,
    CertificateInvalid,
    ConnectTimeout,
    NodeUnreachable,
    PairingRejected,
    QueueFull,
)
from edgepipe.ids import NodeId
from edgepipe.plain_words import plain
from edgepipe.security.access import ProcessKind, allowed
from edgepipe.security.certificates import Certificate, Fingerprint, KeyPair, peek_fingerprint, read_certificate

Context = grpc.aio.ServicerContext[Any, Any]
Cut = Callable[[AccessDenied], None]

MAX_CALLS_PER_CALLER = 64  # an eighth of a server's limit: no member keeps the others out
# Time for the last beat, which reports the removal to the removed node.
_FAREWELL_S = {"/edgepipe.wire.v1.Node/Heartbeat": 1.0}
_MAX_CONNECTIONS = 4096  # remembered, so that each connection is counted once
_TLS = b"TLSv1.3"  # two ends of edgepipe agree on it; an older version means a foreign end, or a machine in the middle


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A process that this one may know."""

    node_id: NodeId  # the node that the process belongs to
    kind: ProcessKind
    certificate: Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class Denial:
    """A refused call."""

    who: str  # node id, else the fingerprint or the address
    what: str  # method and reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The parameters of one channel: the only certificate that may answer. Empty without encryption."""

    server_name: str = ""
    node_id: str = ""  # the daemon that must answer; empty for channels to other processes
    tls: grpc.ChannelCredentials | None = None
    keepalive: bool = True  # True: the connection sends pings


class Security(Protocol):
    """The security of channels and servers."""

    @property
    def certificate(self) -> bytes:
        """This process's own certificate (PEM), for other processes. Empty without encryption."""
        ...

    def to_node(self, node_id: str) -> Credentials:
        """Return credentials for a channel to a node's daemon. Raises NodeUnreachable if it is not in the cluster."""
        ...

    async def to_address(self, address: str, *, node_id: str, timeout_s: float) -> Credentials:
        """Return credentials for a channel to the daemon at ``address``: of ``node_id``; empty: of any member.

        Raises PairingRejected if another process answers there, ConnectTimeout without an answer.
        """
        ...

    def to_process(self, certificate: bytes) -> Credentials:
        """Return credentials for a channel to a process with that certificate (PEM). Raises CertificateInvalid."""
        ...

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Return credentials for a listening port; None without encryption."""
        ...

    def entering(self, method: str, context: Context, cut: Cut) -> contextlib.AbstractContextManager[None]:
        """Guard a handler. Raise AccessDenied to a caller that may not call ``method``, and QueueFull to a caller with
        too many calls under way. Call ``cut`` once if the caller loses the permission meanwhile."""
        ...

    def require_node(self, context: Context, node_id: str) -> None:
        """Raise AccessDenied unless the caller is a process of that node: no process speaks in another's name."""
        ...

    def caller(self, context: Context, kind: ProcessKind) -> Peer | None:
        """Return the caller as a process of that kind; None without encryption."""
        ...

    def set_neighbours(self, peers: Collection[Peer]) -> None:
        """Replace the processes that may call besides the introduced ones, while their nodes are in the cluster."""
        ...


class Plaintext:
    """No encryption and no checks: for Unix sockets, for tests and benches in one process."""

    certificate = b""

    def to_node(self, node_id: str) -> Credentials:
        """See ``Security.to_node``."""
        return Credentials()

    async def to_address(self, address: str, *, node_id: str, timeout_s: float) -> Credentials:
        """See ``Security.to_address``."""
        return Credentials()

    def to_process(self, certificate: bytes) -> Credentials:
        """See ``Security.to_process``."""
        return Credentials()

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """See ``Security.server_credentials``."""
        return None

    @contextmanager
    def entering(self, method: str, context: Context, cut: Cut) -> Generator[None]:
        """See ``Security.entering``."""
        yield

    def require_node(self, context: Context, node_id: str) -> None:
        """See ``Security.require_node``."""

    def caller(self, context: Context, kind: ProcessKind) -> Peer | None:
        """See ``Security.caller``."""
        return None

    def set_neighbours(self, peers: Collection[Peer]) -> None:
        """See ``Security.set_neighbours``."""


@dataclass(eq=False, slots=True, kw_only=True)
class _Call:
    """A call under way."""

    method: str
    fingerprint: Fingerprint
    cut: Cut


class MutualTls:
    """``Security`` of a process with a key pair. Until ``introduce`` names the known processes, it denies all calls."""

    def __init__(
        self,
        own: KeyPair,
        *,
        callers: Collection[ProcessKind],
        on_denied: Callable[[Denial], None] = lambda denial: None,
        keepalive: bool = True,
    ) -> None:
        """``callers``: the only kinds of processes that connect to this one; ``keepalive``: see ``Credentials``."""
        self._keepalive = keepalive
        self._own = own
        self._kinds = frozenset(callers)
        self._on_denied = on_denied
        self._introduced: tuple[Peer, ...] = ()
        self._neighbours: tuple[Peer, ...] = ()
        self._callers: dict[Fingerprint, list[Peer]] = {}
        self._nodes: dict[NodeId, Certificate] = {}
        self._calls: set[_Call] = set()
        self._roots = self._given_roots = own.certificate.pem  # read on gRPC's threads
        self._handshakes = _Handshakes()

    @property
    def certificate(self) -> bytes:
        """See ``Security.certificate``."""
        return self._own.certificate.pem

    @property
    def node_id(self) -> NodeId:
        """The hash of its key; for a daemon, its node's id."""
        return NodeId(self._own.fingerprint)

    @property
    def refused_handshakes(self) -> int:
        """Connections that ended before they proved an identity, or never made a call."""
        return self._handshakes.refused

    def introduce(self, callers: Iterable[Peer], *, nodes: Iterable[Peer]) -> None:
        """Replace the known processes: those that may call, and the nodes to reach. Call it on the event loop.

        Calls of processes that are no longer among ``callers`` are cut.
        """
        self._introduced = tuple(callers)
        self._nodes = {peer.node_id: peer.certificate for peer in nodes if peer.kind is ProcessKind.NODE}
        self._settle()

    def set_neighbours(self, peers: Collection[Peer]) -> None:
        """See ``Security.set_neighbours``."""
        self._neighbours = tuple(peers)
        self._settle()

    def to_node(self, node_id: str) -> Credentials:
        """See ``Security.to_node``."""
        certificate = self._nodes.get(NodeId(node_id))
        if certificate is None:
            raise NodeUnreachable(f"node {node_id} is not in this cluster", next_step="see 'edgepipe peers'")
        return replace(self._pinned(certificate), node_id=node_id)

    async def to_address(self, address: str, *, node_id: str, timeout_s: float) -> Credentials:
        """See ``Security.to_address``."""
        if NodeId(node_id) in self._nodes:
            return self.to_node(node_id)
        found = await who_answers(address, timeout_s=timeout_s)
        if NodeId(found) not in self._nodes:
            raise PairingRejected(
                f"the node at {address} is not in this cluster",
                fact=f"it is {found}",
                next_step="let it in with 'edgepipe node invite' here and 'edgepipe node join CODE' there",
            )
        return self.to_node(found)

    def to_process(self, certificate: bytes) -> Credentials:
        """See ``Security.to_process``."""
        return self._pinned(read_certificate(certificate))

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """See ``Security.server_credentials``."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._on_connection,  # pyright: ignore[reportArgumentType] - None is documented, the stubs do not know
            require_client_authentication=True,
        )

    @contextmanager
    def entering(self, method: str, context: Context, cut: Cut) -> Generator[None]:
        """See ``Security.entering``."""
        self._handshakes.authenticated(context.peer())
        fingerprint = _fingerprint_of(context)
        if _tls_of(context) != _TLS:
            raise self._deny(fingerprint, f"{method}: the connection is not TLS 1.3")
        if not self._may(fingerprint, method):
            raise self._deny(fingerprint, method)
        if sum(call.fingerprint == fingerprint for call in self._calls) >= MAX_CALLS_PER_CALLER:
            raise QueueFull("this process has enough calls of yours under way", fact=f"{MAX_CALLS_PER_CALLER} are")
        call = _Call(method=method, fingerprint=fingerprint, cut=cut)
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    def require_node(self, context: Context, node_id: str) -> None:
        """See ``Security.require_node``."""
        fingerprint = _fingerprint_of(context)
        if all(peer.node_id != node_id for peer in self._callers.get(fingerprint, ())):
            raise self._deny(fingerprint, f"it speaks in the name of {node_id[:60]}")

    def caller(self, context: Context, kind: ProcessKind) -> Peer | None:
        """See ``Security.caller``."""
        known = self._callers.get(_fingerprint_of(context), ())
        return next((peer for peer in known if peer.kind is kind), None)

    def _settle(self) -> None:
        present = {peer.node_id for peer in self._introduced}
        peers = [*self._introduced, *(peer for peer in self._neighbours if peer.node_id in present)]
        callers: dict[Fingerprint, list[Peer]] = {}
        for peer in peers:
            if peer.kind in self._kinds:
                callers.setdefault(peer.certificate.fingerprint, []).append(peer)
        self._callers = callers
        pems = {self._own.certificate.pem, *(peer.certificate.pem for peers in callers.values() for peer in peers)}
        roots = b"".join(sorted(pems))
        if roots != self._roots:
            self._roots = roots
        for call in [call for call in self._calls if not self._may(call.fingerprint, call.method)]:
            if farewell_s := _FAREWELL_S.get(call.method):
                asyncio.get_running_loop().call_later(farewell_s, self._cut, call)
            else:
                self._cut(call)

    def _cut(self, call: _Call) -> None:
        """End a call that may no longer continue, if it is still under way."""
        if call in self._calls and not self._may(call.fingerprint, call.method):
            self._calls.discard(call)
            call.cut(self._deny(call.fingerprint, f"{call.method}: it was removed while it ran"))

    def _may(self, fingerprint: Fingerprint, method: str) -> bool:
        kinds = allowed(method)
        return any(peer.kind in kinds for peer in self._callers.get(fingerprint, ()))

    def _deny(self, fingerprint: Fingerprint, reason: str) -> AccessDenied:
        known = self._callers.get(fingerprint)
        who = known[0].node_id if known else fingerprint
        self._on_denied(Denial(who=who, what=reason))
        kind = (
            f"a {known[0].kind} of node {who}" if known else f"{fingerprint or 'the caller'}, which is not known here"
        )
        return AccessDenied(f"{kind} may not do this here", fact=reason)

    def _pinned(self, certificate: Certificate) -> Credentials:
        tls = grpc.ssl_channel_credentials(
            root_certificates=certificate.pem,
            private_key=self._own.key_pem,
            certificate_chain=self._own.certificate.pem,
        )
        return Credentials(server_name=certificate.dns_name, tls=tls, keepalive=self._keepalive)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        self._given_roots = self._roots
        return grpc.ssl_server_certificate_configuration(
            [(self._own.key_pem, self._own.certificate.pem)], root_certificates=self._given_roots
        )

    def _on_connection(self) -> grpc.ServerCertificateConfiguration | None:
        """Return a new configuration before a handshake, on a thread of gRPC's; None if nothing has changed.

        gRPC 1.85 reads its configuration outside the lock under which it replaces it. Replacing it for every connection
        aborted the process when a hundred connections came at once.
        """
        self._handshakes.began()
        return None if self._roots is self._given_roots else self._configuration()


class _Handshakes:
    """Counts handshakes: gRPC reports no failed one, but it asks for certificates once per connection, before calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._good = 0
        self._seen: OrderedDict[str, None] = OrderedDict()

    @property
    def refused(self) -> int:
        return max(0, self._begun - self._good)

    def began(self) -> None:
        with self._lock:
            self._begun += 1

    def authenticated(self, address: str) -> None:
        """Note a call from ``address`` (IP and port)."""
        if address in self._seen:
            self._seen.move_to_end(address)
            return
        self._seen[address] = None
        self._good += 1
        if len(self._seen) > _MAX_CONNECTIONS:
            self._seen.popitem(last=False)


async def who_answers(address: str, *, timeout_s: float) -> Fingerprint:
    """Return the fingerprint of the certificate shown at ``address``. Only a channel pinned to it proves the identity.

    Raises ConnectTimeout without an answer, PairingRejected if no edgepipe node answers.
    """
    host, port = host_and_port(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    except (TimeoutError, ConnectionError, OSError, ValueError) as exc:
        if isinstance(exc, ssl.SSLError):
            raise PairingRejected(f"no edgepipe node answers at {address}", fact=plain(exc)) from exc
        raise ConnectTimeout(f"{address} cannot be reached", fact=plain(exc)) from exc
    try:
        shown: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return peek_fingerprint(ssl.DER_cert_to_PEM_cert(shown or b"").encode())
    except CertificateInvalid as exc:
        raise PairingRejected(f"no edgepipe node answers at {address}", fact=exc.fact) from exc
    finally:
        writer.transport.abort()


def _fingerprint_of(context: Context) -> Fingerprint:
    """Return the fingerprint of the certificate that the caller proved to own; empty if it cannot be read."""
    for pem in (context.auth_context() or {}).get("x509_pem_cert", ()):
        with contextlib.suppress(CertificateInvalid):
            return peek_fingerprint(bytes(pem))
    return Fingerprint("")


def _tls_of(context: Context) -> bytes:
    """Return the TLS version of the connection."""
    for version in (context.auth_context() or {}).get("ssl_tls_version", ()):
        return bytes(version)
    return b""
