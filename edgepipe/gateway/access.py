"""Access control: a guard before every route. Handlers see only requests that it accepts."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgepipe.cluster.interfaces import LOOPBACK
from edgepipe.gateway.batches.copies import LocalUsers
from edgepipe.gateway.key_tries import MOST_TRIES, KeyTries
from edgepipe.gateway.origins import Origins, cors_headers, is_own, is_preflight, preflight_headers, shown
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.error_forms import problem_response
from edgepipe.gateway.ui.paths import SESSION, UI, is_foreign, is_page_file
from edgepipe.gateway.ui.sessions import Sessions

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
OPEN_PATHS = frozenset({"/health", "/ready"})  # polled by supervisors; their answers hold no private data
_BEARER = b"bearer "
# Names by which containers reach their host.
_CONTAINER_NAMES = frozenset({"host.docker.internal", "host.containers.internal"})
_PAGES = frozenset({"/", "/docs"})  # pages that people open in a browser
_WHERE_KEY = (
    "On the node's machine, the key is in the file api-key of the node's data directory, which "
    "'edgepipe config show' names, or in EDGEPIPE_API_KEY"
)
_ONLY_OWN_PAGE = "only this server's own page may use /ui/: open the address of the page itself"
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")  # a host name, as ``--http-name`` takes it


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """Rules that a request must meet.

    Clients on other machines always need a key. Clients on this machine need a key if ``key_on_loopback``.
    """

    keys: tuple[str, ...] = ()
    key_on_loopback: bool = False
    # Host names besides loopback names and the reached address.
    host_names: frozenset[str] = field(default_factory=frozenset[str])
    origins: Origins = field(default_factory=Origins)  # other web origins that may ask; the node's own pages always may

    @classmethod
    def of(
        cls,
        *,
        keys: Iterable[str] = (),
        key_on_loopback: bool = False,
        host_names: Iterable[str] = (),
        origins: Iterable[str] = (),
    ) -> AccessRules:
        """Build rules from settings; names in any case."""
        names = frozenset(name.lower() for name in host_names)
        return cls(keys=tuple(keys), key_on_loopback=key_on_loopback, host_names=names, origins=Origins(origins))


def local_users(rules: AccessRules) -> LocalUsers:
    """Return the users that a gateway with these rules knows: each of its keys, and clients of this machine without."""
    keys = [_fingerprint(key) for key in rules.keys]
    open_to = frozenset[str]() if rules.key_on_loopback else frozenset({address_of((LOOPBACK, 0))})
    return LocalUsers(machine=keys[0] if keys else address_of((LOOPBACK, 0)), known=open_to | frozenset(keys))


class Guard:
    """Guard that refuses requests of foreign web pages, ambiguous body lengths and clients without a required key.

    Host must name this machine, and Origin this node or an allowed origin. ``scope["state"]["owner"]`` becomes the
    fingerprint of the client's key, or its address if it sent no valid key and needs none. A client on this machine may
    send the token of a session of ``edgepipe open`` instead of a key: then ``scope["state"]["manages"]`` is set.
    """

    def __init__(self, app: ASGIApp, *, rules: AccessRules, sessions: Sessions, tries: KeyTries) -> None:
        self._app = app
        self._sessions = sessions
        self._tries = tries
        self._names = LOOPBACK_NAMES | rules.host_names
        self._origins = rules.origins
        self._keys = [(key.encode(), _fingerprint(key)) for key in rules.keys]
        self._key_on_loopback = rules.key_on_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        try:
            origin = self._allowed_origin(scope, self._checked_host(headers, scope))
            if origin:
                send = _with_headers(send, cors_headers(origin))
            if origin and is_preflight(scope["method"], headers):
                await Response(status_code=204, headers=preflight_headers(headers))(scope, receive, send)
                return
            owner = self._owner_of(scope)
        except HttpProblem as problem:
            await _refusal(problem, scope)(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["owner"] = owner
        if (connection := state.get("connection")) is not None:
            connection.owner = owner
        await self._app(scope, receive, send)

    def _owner_of(self, scope: Scope) -> str:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        names = [name for name, _ in headers]
        if b"transfer-encoding" in names and b"content-length" in names:
            raise HttpProblem(status=400, message="the request has two body lengths", code="invalid_http")
        given = _key_in(headers)
        state, client = scope.setdefault("state", {}), scope.get("client")
        state["needs_key"] = not is_local(scope) or self._key_on_loopback
        if is_local(scope) and self._sessions.holds(given):
            state["manages"] = True
            return address_of(client)
        is_open = _is_open(scope) or not state["needs_key"]
        if given and not is_open:
            self._check_tries(client)
        if owner := self._owner_by_key(given):
            return owner
        if is_open:
            return address_of(client)
        if given:
            self._tries.failed(address_of(client))
        text = (
            "the key is wrong"
            if given
            else "the request needs a key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
        )
        raise HttpProblem(
            status=401,
            message=f"{text}. {_WHERE_KEY}",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _check_tries(self, client: tuple[str, int] | None) -> None:
        """Raise HttpProblem 429 for an address with too many wrong keys, also if this key is right: else an answer
        would tell a guesser that it is."""
        if wait_s := self._tries.wait_s(address_of(client)):
            raise HttpProblem(
                status=429,
                message=f"{MOST_TRIES} wrong keys came from this address within a minute. Try again in {wait_s} s",
                code="too_many_wrong_keys",
                headers={"Retry-After": str(wait_s)},
            )

    def _checked_host(self, headers: list[tuple[bytes, bytes]], scope: Scope) -> str:
        """Return the header Host. Raises HttpProblem if it names another machine: DNS rebinding needs such a name."""
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        name = (host_name(hosts[0]) or "").removesuffix(".") if len(hosts) == 1 else ""
        if name in self._names | _own_address(scope) or (is_local(scope) and _is_this_machine(name)):
            return hosts[0]
        raise HttpProblem(status=421, message=_foreign_host(hosts), code="misdirected_request")

    def _allowed_origin(self, scope: Scope, host: str) -> str:
        """Return the allowed origin of a web page, empty for the node's own pages and for programs without an origin.

        Requests below ``UI`` act for a person, so only the node's own page may send them.

        A page under a container's name for this machine is never the node's own: a network may resolve such a name as
        it likes. Raises HttpProblem for other origins.
        """
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if is_foreign(scope):
            raise HttpProblem(status=403, message=_ONLY_OWN_PAGE, code="origin_not_allowed")
        if not given or (len(given) == 1 and is_own(given[0], host=host) and host_name(host) not in _CONTAINER_NAMES):
            return ""
        if scope["path"].startswith(UI):
            raise HttpProblem(status=403, message=_ONLY_OWN_PAGE, code="origin_not_allowed")
        if len(given) == 1 and self._origins.allow(given[0]):
            return given[0]
        raise HttpProblem(status=403, message=_foreign_origin(given), code="origin_not_allowed")

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


def needs_key(request: Request) -> bool:
    """Return whether programs at the client's place need a key."""
    return request.scope["state"]["needs_key"]


def require_manager(request: Request) -> None:
    """Raise HttpProblem 401 unless the client has an open session of ``edgepipe open``."""
    if not request.scope["state"].get("manages"):
        raise HttpProblem(
            status=401,
            message="this needs the right to manage. On the node's machine, type: edgepipe open",
            code="session_needed",
        )


def _is_open(scope: Scope) -> bool:
    """Return whether a request needs no key."""
    return scope["path"] in OPEN_PATHS or scope["path"] == SESSION or is_page_file(scope)


def _key_in(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the key of a single Authorization header, or of Anthropic's ``x-api-key``; an empty string without a key.

    Raises HttpProblem if they have different keys: a client sends a key of another service by mistake.
    """
    bearers = [value for name, value in headers if name == b"authorization"]
    found = {value.strip() for name, value in headers if name == b"x-api-key"} - {b""}
    if len(bearers) == 1 and bearers[0].lower().startswith(_BEARER):
        found.add(bearers[0][len(_BEARER) :].strip())
    if len(found) > 1:
        text = "the request has different keys in Authorization and x-api-key: send one of them"
        raise HttpProblem(status=401, message=text, code="invalid_api_key")
    return next(iter(found), b"")


def _foreign_host(hosts: list[str]) -> str:
    """Return the message to a client that reached this server by another name."""
    name = host_name(hosts[0]) if len(hosts) == 1 else None
    if not name or not _NAME.fullmatch(name):
        return "this server does not serve that Host"
    return f"this server does not serve the Host '{name}'. To allow it: edgepipe node start --http-name {name}"


def _foreign_origin(origins: list[str]) -> str:
    """Return the message to a web page that may not ask."""
    origin = shown(origins[0]) if len(origins) == 1 else ""
    if not origin:
        return "this server refuses requests from that Origin"
    return f"this server refuses requests from the Origin '{origin}'. To allow it: {_allow(origin)}"


def _allow(origin: str) -> str:
    return f"edgepipe node start --http-origin {origin}"


def _is_this_machine(name: str) -> bool:
    """Return whether a client on this machine may call it so: by any loopback address, or from a container.

    An address is safe, see ``_own_address``. ``0.0.0.0`` reaches this machine, too; clients that share a server's
    setting send it.
    """
    if name in _CONTAINER_NAMES:
        return True
    try:
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _refusal(problem: HttpProblem, scope: Scope) -> Response:
    """Build the answer: text for a person without a key who opens a page, else JSON."""
    if problem.status != 401 or scope["path"] not in _PAGES or scope["method"] not in ("GET", "HEAD"):
        return problem_response(problem, path=scope["path"])
    host = next(value.decode("latin-1") for name, value in scope["headers"] if name == b"host")
    example = f"curl -H 'Authorization: Bearer KEY' http://{host}{scope['path']}"
    text = f"edgepipe: {problem.message}.\n\n{example}\n"
    return PlainTextResponse(text, status_code=problem.status, headers=dict(problem.headers))


def _with_headers(send: Send, more: Mapping[str, str]) -> Send:
    """Return a ``send`` that adds headers to the answer."""
    added = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in more.items()]

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return send_with_headers


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
