"""Who is let in: keys, hosts, and nothing behind a route that forgot to ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.types import Receive, Scope, Send

from edgepipe.cluster.interfaces import interfaces, lan_interfaces
from edgepipe.gateway.access import OPEN_PATHS, AccessRules, Guard
from edgepipe.gateway.key_tries import KeyTries
from edgepipe.gateway.service import listen
from edgepipe.gateway.ui.sessions import Sessions
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import FixedClock, Served, serving

KEY, OTHER = "ep-a-long-enough-key", "ep-another-long-key"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def locked() -> AsyncIterator[Served]:
    rules = AccessRules.of(keys=(KEY, OTHER), key_on_loopback=True)
    async with serving(FakeEngine(), rules=rules) as value:
        yield value


async def _paths(served: Served) -> list[str]:
    document = (await served.http.get("/openapi.json", headers=_bearer(KEY))).json()
    known = [path.replace("{id}", "tiny") for path in document["paths"]]
    return [*known, "/openapi.json", "/docs", "/v1", "/nothing/here", "//v1/models", "/v1/models/../models"]


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.asyncio(loop_scope="module")
async def test_no_route_answers_by_any_method_without_a_key(locked: Served) -> None:
    paths = await _paths(locked)
    assert len(paths) > 20
    for path in paths:
        bodies = {method: {"model": "tiny"} if method == "POST" else None for method in METHODS}
        asking = (locked.http.request(method, path, json=body) for method, body in bodies.items())
        for method, response in zip(METHODS, await asyncio.gather(*asking), strict=True):
            if path in OPEN_PATHS:
                assert response.status_code in (200, 405), (method, path)
            else:
                assert response.status_code == 401, (method, path)
    assert locked.engine.submits == []


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("key", [KEY, OTHER])
async def test_each_key_opens(locked: Served, key: str) -> None:
    assert (await locked.http.get("/v1/models", headers=_bearer(key))).status_code == 200
    assert (await locked.http.get("/v1/models", headers={"authorization": f"bearer  {key}"})).status_code == 200


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer wrong",
        KEY.encode(),
        b"Basic " + KEY.encode(),
        f"Bearer {KEY}x".encode(),
        f"Bearer {KEY[:-1]}".encode(),
        b"Bearer \xff\xfe",
        b"Bearer " + b"x" * 12_000,
    ],
    ids=lambda value: repr(value[:20]),
)
async def test_what_is_no_key_does_not(locked: Served, value: bytes) -> None:
    response = await locked.http.get("/v1/models", headers=[(b"authorization", value)])
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"
    assert KEY not in response.text


@pytest.mark.asyncio(loop_scope="module")
async def test_two_keys_at_once_are_none(locked: Served) -> None:
    headers = [(b"authorization", f"Bearer {KEY}".encode())] * 2
    assert (await locked.http.get("/v1/models", headers=headers)).status_code == 401


class _Behind:
    """What a guard lets through."""

    def __init__(self) -> None:
        self.owners: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.owners.append(scope["state"]["owner"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def _status(
    rules: AccessRules, *, client: str, host: str = "localhost", path: str = "/v1/models", **more: str
) -> int:
    """The guard's answer to a client that comes from another address."""
    transport = httpx.ASGITransport(_At(_guard(_Behind(), rules), client), client=(client, 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return (await http.get(path, headers={"host": host} | more)).status_code


def _guard(behind: Any, rules: AccessRules) -> Guard:
    now_s = FixedClock().monotonic_s
    return Guard(behind, rules=rules, sessions=Sessions(now_s=now_s, new_token=str), tries=KeyTries(now_s=now_s))


class _At:
    """The server's own address in every scope."""

    def __init__(self, app: Guard, client: str) -> None:
        self._app = app
        self._address = "127.0.0.1" if client.startswith("127.") else "192.168.1.20"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app({**scope, "server": (self._address, 8117)}, receive, send)


async def test_a_user_is_a_key_or_else_an_address_of_this_machine() -> None:
    behind = _Behind()
    rules = AccessRules.of(keys=(KEY, OTHER))
    for client, headers in (
        ("127.0.0.1", {}),
        ("127.0.0.2", {}),
        ("127.0.0.1", _bearer("not-needed")),
        ("127.0.0.1", _bearer(KEY)),
        ("192.168.1.7", _bearer(KEY)),
        ("127.0.0.1", _bearer(OTHER)),
    ):
        transport = httpx.ASGITransport(_At(_guard(behind, rules), client), client=(client, 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (await http.get("/v1/models", headers={"host": "localhost"} | headers)).status_code == 200
    first, second, unneeded, key, elsewhere, other = behind.owners
    assert (first, second, unneeded) == ("address:127.0.0.1", "address:127.0.0.2", "address:127.0.0.1")
    assert key == elsewhere != other
    assert not {key, other} & {first, second}


async def test_another_machine_needs_a_key_and_this_one_does_not() -> None:
    rules = AccessRules.of(keys=(KEY,))
    assert await _status(rules, client="127.0.0.1") == 200
    assert await _status(rules, client="::1") == 200
    lan = {"client": "192.168.1.30", "host": "192.168.1.20:8117"}
    assert await _status(rules, **lan) == 401
    assert await _status(rules, **lan, authorization=f"Bearer {KEY}") == 200
    assert await _status(rules, **lan, path="/health") == 200
    assert await _status(AccessRules(), **lan) == 401  # no keys at all let nobody in


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("192.168.1.20", 200),
        ("192.168.1.20:8117", 200),
        ("studio.local:8117", 200),
        ("STUDIO.local", 200),
        ("192.168.1.21", 421),
        ("192.168.1.20.evil.example", 421),
        ("evil.example", 421),
        ("studio.local:80:80", 421),
        ("192.168.1.20:x", 421),
        ("studio.local.", 200),
        ("host.docker.internal", 421),
        ("127.0.0.2", 421),
        ("0.0.0.0", 421),
    ],
)
async def test_hosts_beyond_loopback(host: str, status: int) -> None:
    rules = AccessRules.of(keys=(KEY,), host_names=("Studio.local",))
    given = await _status(rules, client="192.168.1.30", host=host, authorization=f"Bearer {KEY}")
    assert given == status


async def test_a_page_under_a_container_s_name_is_not_the_node_s_own() -> None:
    """A network may resolve that name to an attacker's page first, and to this machine afterwards."""
    host = "host.docker.internal:8117"
    assert await _status(AccessRules(), client="127.0.0.1", host=host) == 200
    assert await _status(AccessRules(), client="127.0.0.1", host=host, origin=f"http://{host}") == 403
    allowed = AccessRules.of(origins=(f"http://{host}",))
    assert await _status(allowed, client="127.0.0.1", host=host, origin=f"http://{host}") == 200


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("path", "accept"), [("/docs", "text/html,*/*;q=0.8"), ("/docs", "*/*"), ("/", "*/*")])
async def test_a_person_without_a_key_reads_where_it_is(locked: Served, path: str, accept: str) -> None:
    page = await locked.http.get(path, headers={"accept": accept})
    assert page.status_code == 401
    assert page.headers["content-type"].startswith("text/plain")
    assert "is in the file api-key of the node's data directory" in page.text
    assert f"Authorization: Bearer KEY' http://127.0.0.1:{locked.port}{path}" in page.text


@pytest.mark.asyncio(loop_scope="module")
async def test_ollama_s_clients_read_a_refusal_in_their_form(locked: Served) -> None:
    error = (await locked.http.post("/api/chat", json={})).json()["error"]
    assert error.startswith("the request needs a key")
    assert "api-key" in error


async def test_a_header_cannot_claim_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uvicorn takes the client's address from X-Forwarded-For if the environment asks for it."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    async with serving(FakeEngine(), rules=AccessRules.of(keys=(KEY,))) as served:
        assert (await served.http.get("/v1/models", headers={"x-forwarded-for": "192.0.2.7"})).status_code == 200
        for here in lan_interfaces(interfaces())[:1]:
            sock = listen(host=here.address, port=0)
            serving_here = asyncio.create_task(served.gateway.serve(sock))
            async with httpx.AsyncClient(trust_env=False, verify=False) as http:
                url = f"http://{here.address}:{sock.getsockname()[1]}/v1/models"
                assert (await http.get(url, headers={"x-forwarded-for": "127.0.0.1"})).status_code == 401
            serving_here.cancel()
            await asyncio.gather(serving_here, return_exceptions=True)
