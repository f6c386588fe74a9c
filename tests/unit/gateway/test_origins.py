"""Web pages of other origins: refused before any work unless a setting allows them; what browsers are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgepipe.config import load_config
from edgepipe.errors import ConfigInvalid
from edgepipe.gateway.access import AccessRules
from edgepipe.gateway.origins import Origins
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, serving

CHAT = "/v1/chat/completions"
DESKTOP = (
    *("app://obsidian.md", "vscode-webview://0a1b2c", "chrome-extension://abcdef", "moz-extension://0-1", "file://"),
    *("null", "tauri://localhost", "http://tauri.localhost", "http://localhost:3000", "https://example.com"),
)
BODY = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}'


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", [CHAT, "/api/chat"])
@pytest.mark.parametrize("origin", DESKTOP)
async def test_a_page_that_is_not_allowed_gets_nothing_done(shared: Served, origin: str, path: str) -> None:
    """A browser sends such a request without asking first: its type is one that forms may have."""
    before = len(shared.engine.submits)
    headers = {"origin": origin, "content-type": "text/plain;charset=UTF-8"}
    refused = await shared.http.post(path, headers=headers, content=BODY)
    error = refused.json()["error"]
    message = error if path == "/api/chat" else error["message"]
    assert refused.status_code == 403
    assert message.endswith(f"To allow it: edgepipe node start --http-origin {origin}")
    assert len(shared.engine.submits) == before
    asked = {"origin": origin, "access-control-request-method": "POST"}
    preflight = await shared.http.request("OPTIONS", path, headers=asked)
    assert preflight.status_code == 403
    assert not [name for name in preflight.headers if name.startswith("access-control")]


async def test_the_node_s_own_page_may_ask(served: Served) -> None:
    for scheme in ("http", "https"):  # a proxy may add TLS
        for host in (f"localhost:{served.port}", f"127.0.0.1:{served.port}", "localhost"):
            headers = {"origin": f"{scheme}://{host}", "host": host}
            assert (await served.http.post(CHAT, headers=headers, json={"messages": []})).status_code == 400
    headers = {"origin": f"http://localhost:{served.port + 1}", "host": f"localhost:{served.port}"}
    assert (await served.http.get("/v1/models", headers=headers)).status_code == 403


async def test_an_allowed_page_asks_first_and_reads_every_answer() -> None:
    origin = "app://obsidian.md"
    rules = AccessRules.of(keys=("ep-a-long-enough-key",), key_on_loopback=True, origins=(origin,))
    async with serving(FakeEngine(), rules=rules) as served:
        asked = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
            "access-control-request-private-network": "true",
        }
        preflight = await served.http.request("OPTIONS", CHAT, headers=asked)  # browsers send no key with it
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == origin
        assert preflight.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-private-network"] == "true"
        assert preflight.headers["vary"] == "Origin"
        key = {"authorization": "Bearer ep-a-long-enough-key"}
        chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        for headers, status in ((key, 200), ({}, 401)):
            answer = await served.http.post(CHAT, headers={"origin": origin} | headers, json=chat)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == origin
        other = await served.http.get("/v1/models", headers=key | {"origin": "app://other"})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers


async def test_two_origins_at_once_are_refused() -> None:
    async with serving(FakeEngine(), rules=AccessRules.of(origins=("*",))) as served:
        twice = [("origin", "app://a"), ("origin", "app://b")]
        assert (await served.http.get("/v1/models", headers=twice)).status_code == 403
        assert (await served.http.get("/v1/models", headers=twice[:1])).status_code == 200


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        ("*", DESKTOP, ()),
        ("null", ("null",), ("http://null",)),
        ("app://*", ("app://obsidian.md", "APP://x"), ("apps://x", "http://app", "app://x/y")),
        ("http://localhost:*", ("http://localhost:3000",), ("http://localhost", "http://localhost.evil.example:1")),
        ("http://localhost", ("http://localhost", "http://localhost:80"), ("http://localhost:8080",)),
        ("https://*.example.org", ("https://a.example.org",), ("https://example.org", "https://a.example.org.evil")),
        (
            "https://ai.example.org",
            ("https://AI.example.org:443",),
            ("http://ai.example.org", "https://aixexample.org"),
        ),
    ],
)
def test_patterns(pattern: str, allowed: tuple[str, ...], refused: tuple[str, ...]) -> None:
    origins = Origins((pattern,))
    assert [each for each in allowed if not origins.allow(each)] == []
    assert [each for each in refused if origins.allow(each)] == []


@pytest.mark.parametrize("value", ["localhost:3000", "http://localhost:3000/", "http://a b", "http://*:*@x", "x" * 400])
def test_what_is_no_origin_is_refused_as_a_setting(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="http_origins"):
        load_config({"http_origins": [value]}, environ={"HOME": str(tmp_path)})
    good = load_config({"http_origins": [*DESKTOP, "*", "http://localhost:*"]}, environ={"HOME": str(tmp_path)})
    assert len(good.values.http_origins) == len(DESKTOP) + 2
