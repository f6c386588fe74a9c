"""Access control: a guard before every route. Handlers see only requests that it accepts."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from edgepipe.gateway.problems import HttpProblem, problem_response

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
OPEN_PATHS = frozenset({"/health", "/ready"})  # polled by supervisors; their answers hold no private data
_BEARER = b"bearer "
_LOCALHOST = (
    ".localhost"  # always this machine (RFC 6761, 6.3); programs made with Tauri have the Origin tauri.localhost
)
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")  # of a host, as ``--http-name`` takes it


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """Rules that a request must meet.

    Clients on other machines always need a key. Clients on this machine need a key if ``key_on_loopback``.
    """

    keys: tuple[str, ...] = ()
    key_on_loopback: bool = False
    host_names: frozenset[str] = field(default_factory=frozenset[str])  # besides loopback names and the reached address

    @classmethod
    def of(
        cls, *, keys: Iterable[str] = (), key_on_loopback: bool = False, host_names: Iterable[str] = ()
    ) -> AccessRules:
        """Build rules from settings; names in any case."""
        names = frozenset(name.lower() for name in host_names)
        return cls(keys=tuple(keys), key_on_loopback=key_on_loopback, host_names=names)


class Guard:
    """Guard that refuses requests of foreign web pages, ambiguous body lengths and clients without a required key.

    Host and Origin must always name this machine. ``scope["state"]["owner"]`` becomes the fingerprint of the client's
    key, or its address if it sent no valid key and needs none.
    """

    def __init__(self, app: ASGIApp, *, rules: AccessRules) -> None:
        self._app = app
        self._names = LOOPBACK_NAMES | rules.host_names
        self._keys = [(key.encode(), _fingerprint(key)) for key in rules.keys]
        self._key_on_loopback = rules.key_on_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            owner = self._owner_of(scope)
        except HttpProblem as problem:
            await problem_response(problem)(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["owner"] = owner
        if (connection := state.get("connection")) is not None:
            connection.owner = owner
        await self._app(scope, receive, send)

    def _owner_of(self, scope: Scope) -> str:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._check_names(headers, scope)
        names = [name for name, _ in headers]
        if b"transfer-encoding" in names and b"content-length" in names:
            raise HttpProblem(status=400, message="the request has two body lengths", code="invalid_http")
        given = _key_in([value for name, value in headers if name == b"authorization"])
        if owner := self._owner_by_key(given):
            return owner
        if scope["path"] in OPEN_PATHS or (is_local(scope) and not self._key_on_loopback):
            return address_of(scope.get("client"))
        raise HttpProblem(
            status=401,
            message="the key is wrong" if given else "the request needs a key: send 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _check_names(self, headers: list[tuple[bytes, bytes]], scope: Scope) -> None:
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        allowed = self._names | _own_address(scope)
        if len(hosts) != 1 or host_name(hosts[0]) not in allowed:
            raise HttpProblem(status=421, message=_foreign_host(hosts), code="misdirected_request")
        origins = [
            host_name(value.decode("latin-1").partition("://")[2]) for name, value in headers if name == b"origin"
        ]
        if not all(name in allowed or (name or "").endswith(_LOCALHOST) for name in origins):
            raise HttpProblem(
                status=403, message="this server refuses requests from that Origin", code="origin_not_allowed"
            )

    def _owner_by_key(self, given: bytes) -> str:
        """Return the fingerprint of a valid key, else an empty string."""
        owner = ""
        for key, fingerprint in self._keys:  # compare with all keys in constant time, so that timing reveals nothing
            if hmac.compare_digest(key, given):
                owner = fingerprint
        return owner


def owner_of(request: Request) -> str:
    """Return the user to whose share a request counts, as ``Guard`` set it."""
    return request.scope["state"]["owner"]


def address_of(client: tuple[str, int] | None) -> str:
    """Return the owner of what a client without a key does: its address. No fingerprint has a ``:``."""
    return f"address:{client[0] if client is not None else ''}"


def _key_in(values: list[bytes]) -> bytes:
    """Return the key of a single Authorization header, else an empty string."""
    return values[0][len(_BEARER) :].strip() if len(values) == 1 and values[0].lower().startswith(_BEARER) else b""


def _foreign_host(hosts: list[str]) -> str:
    """Return the message to a client that reached this server by another name."""
    name = host_name(hosts[0]) if len(hosts) == 1 else None
    if not name or not _NAME.fullmatch(name):
        return "this server does not serve that Host"
    return f"this server does not serve the Host '{name}'. To allow it: edgepipe node start --http-name {name}"


def is_local(scope: Scope) -> bool:
    """Return whether the client is on this machine."""
    client = scope.get("client")
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def host_name(value: str) -> str | None:
    """Return the name in a Host header, lower case, without its port; None if it is malformed."""
    name, colon, port = value.strip().lower().rpartition(":")
    if not colon or value.endswith("]"):
        return value.strip().lower()
    return name if port.isascii() and port.isdigit() else None


def _own_address(scope: Scope) -> set[str]:
    """Return the address that the client reached, as a valid Host.

    It is safe: DNS rebinding by a page of another site needs a name in Host, not an address.
    """
    server = scope.get("server")
    if server is None or server[1] is None:
        return set()
    return {f"[{server[0]}]" if ":" in server[0] else server[0]}


def _fingerprint(key: str) -> str:
    """Derive an identifier of a key that does not reveal the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]
