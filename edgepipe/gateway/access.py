"""Who may ask: the guard before every route. What it does not let through, no handler sees."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from edgepipe.gateway.problems import HttpProblem, problem_response

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
OPEN_PATHS = frozenset({"/health", "/ready"})  # what supervisors poll; they say nothing about anybody
_BEARER = b"bearer "


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """What a request must show.

    Keys: whoever is not on this machine needs one, always. On this machine one is needed if ``key_on_loopback``.
    """

    keys: tuple[str, ...] = ()
    key_on_loopback: bool = False
    host_names: frozenset[str] = field(default_factory=frozenset[str])  # besides loopback's and the address asked at

    @classmethod
    def of(
        cls, *, keys: Iterable[str] = (), key_on_loopback: bool = False, host_names: Iterable[str] = ()
    ) -> AccessRules:
        """Rules from settings; names in any case."""
        names = frozenset(name.lower() for name in host_names)
        return cls(keys=tuple(keys), key_on_loopback=key_on_loopback, host_names=names)


class Guard:
    """Refuses what a foreign web page may have caused (Host and Origin must name this machine, always), messages whose
    length is told twice, and whoever lacks a key. The key's fingerprint becomes ``scope["state"]["owner"]``."""

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
            scope.setdefault("state", {})["owner"] = self._owner_of(scope)
        except HttpProblem as problem:
            await problem_response(problem)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _owner_of(self, scope: Scope) -> str:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._check_names(headers, scope)
        names = [name for name, _ in headers]
        if b"transfer-encoding" in names and b"content-length" in names:
            raise HttpProblem(status=400, message="the body's length is told twice", code="invalid_http")
        if scope["path"] in OPEN_PATHS or (is_local(scope) and not self._key_on_loopback):
            return ""
        return self._owner_by_key([value for name, value in headers if name == b"authorization"])

    def _check_names(self, headers: list[tuple[bytes, bytes]], scope: Scope) -> None:
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        allowed = self._names | _own_address(scope)
        if len(hosts) != 1 or host_name(hosts[0]) not in allowed:
            raise HttpProblem(
                status=421, message="this server does not answer for that Host", code="misdirected_request"
            )
        for name, value in headers:
            if name == b"origin" and host_name(value.decode("latin-1").partition("://")[2]) not in allowed:
                raise HttpProblem(status=403, message="this Origin may not ask here", code="origin_not_allowed")

    def _owner_by_key(self, values: list[bytes]) -> str:
        given = values[0][len(_BEARER) :].strip() if len(values) == 1 and values[0].lower().startswith(_BEARER) else b""
        owner = ""
        for key, fingerprint in self._keys:  # all of them, each in constant time: how long it takes tells nothing
            if hmac.compare_digest(key, given):
                owner = fingerprint
        if not owner:
            raise HttpProblem(
                status=401,
                message="a key is needed: send it as 'Authorization: Bearer KEY'" if not given else "the key is wrong",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return owner


def is_local(scope: Scope) -> bool:
    """Whether the client is on this machine."""
    client = scope.get("client")
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def host_name(value: str) -> str | None:
    """The name in a Host header, lower case, without its port; None if it is malformed."""
    name, colon, port = value.strip().lower().rpartition(":")
    if not colon or value.endswith("]"):
        return value.strip().lower()
    return name if port.isascii() and port.isdigit() else None


def _own_address(scope: Scope) -> set[str]:
    """The address that the client reached. A page on another site cannot have its browser put that there: rebinding
    needs a name."""
    server = scope.get("server")
    if server is None or server[1] is None:
        return set()
    return {f"[{server[0]}]" if ":" in server[0] else server[0]}


def _fingerprint(key: str) -> str:
    """Tells keys apart in accounts without being one."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]
