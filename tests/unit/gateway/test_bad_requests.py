"""Whatever comes in, the answer is an error in OpenAI's shape, with the right status, and the engine hears nothing.

Here: bodies that are no JSON, fields out of bounds, prompts, models, hosts, origins, routes (H1-H19 and H22-H24 of the
catalogue of bad input). Keys and routes without one (H20, H21) are in ``test_access``, sockets (H25-H28, H31) in
``test_connections``, the queue (H29) in ``test_admission``, clients that leave (H30) in ``tests/cluster``, hostile
output (H32) in ``test_tool_calls``. Two rows of the catalogue are valid here: no content beside tool calls (H9), and
keywords that templates know (H17); two end earlier than it says: a key of 1 MB by its header (431), a schema of 10 MB
by its body (413).
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.gateways.fake_engine import CONTEXT, FakeEngine, view_of
from tests.support.gateways.server import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest_asyncio.fixture(loop_scope="module")
async def served(shared: Served) -> Served:
    """The shared gateway, its engine having heard nothing."""
    shared.engine.submits.clear()
    return shared


def check_error(response: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """The error inside, after checking its shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) - {"edgepipe"} == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "Traceback" not in response.text
    if code is not None:
        assert body["error"]["code"] == code
    return body["error"]


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}


def _tool(parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a", "parameters": parameters, **fields}}


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    *[({"n": value}, "n") for value in (0, -1, 9, 10**6, 1.5, "3", True)],
    *[({"max_tokens": value}, "max_tokens") for value in (0, -2, 2**31, "5", 1.5, -1.0)],
    *[({"max_completion_tokens": value}, "max_completion_tokens") for value in (0, -2)],
    *[({"temperature": value}, "temperature") for value in (-1, 2.1, 1e308, "warm")],
    *[({"seed": value}, "seed") for value in (2**63, -(2**63) - 1, 1.5)],
    *[({"stop": value}, "stop") for value in (["a"] * 65, ["x" * 257], ["a"] * 1000, "x" * 10_000, 3, [3])],
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1 << 32]}, "stop_token_ids"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    *[({"top_p": value}, "top_p") for value in (0, 1.1, -1)],
    *[({"top_k": value}, "top_k") for value in (-2, 1.5, 2**40)],
    *[({"min_p": value}, "min_p") for value in (-0.1, 1.1)],
    *[({name: value}, name) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, "1")],
    *[({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1, 101)],
    *[({"min_tokens": value}, "min_tokens") for value in (-1, 1.5)],
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    *[({"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (-1, 21, 10**6)],
    *[
        ({"logit_bias": value}, "logit_bias")
        for value in (
            {"1": 101},
            {"1": -101},
            {"1": "much"},
            {"x": 1},
            {"-1": 1},
            {"257": 1},
            {"99999999999": 1},
            {"1": 1, "01": 2},
            {str(token): 1 for token in range(301)},
            {str(token): 1 for token in range(100_000)},
            [1],
        )
    ],
    *[
        ({"tools": value}, "tools")
        for value in (
            [{"type": "function"}],
            [{"type": "code"}],
            [{"type": "function", "function": {"name": "a" * 257}}],
            [TOOL, {"type": "function", "function": TOOL["function"] | {"description": "another"}}],
            [TOOL] * 10_000,
            [{"type": "function", "function": {"name": "a", "parameters": 3}}],
            [_tool(LOOP, strict=True)],
            [_tool({"properties": {"x": {"type": "string", "pattern": "(("}}}, strict=True)],
            [_tool({"properties": {"x": {"description": "y" * 300_000}}})],
            "all",
        )
    ],
    ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    *[
        ({"response_format": value}, "response_format")
        for value in (
            {"type": "xml"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "a"}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "wizard"}}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"description": "x" * 70_000}}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"anyOf": [{"const": 1}] * 10_000}}},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": LOOP}},
            "json",
        )
    ],
    *[({"chat_template_kwargs": value}, "chat_template_kwargs") for value in ({"tokenize": True}, {"messages": []}, 3)],
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"functions": [{"name": "a"}]}, "functions"),
    ({"suffix": "x"}, "suffix"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"best_of": 2}, "best_of"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    *[
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": value}]}]}, "messages.0.content")
        for value in ("x", {"url": "http://127.0.0.1/x.png"}, {"url": "file:///etc/passwd"})
    ],
    ({"messages": "hi"}, "messages"),
    ({"messages": USER * 2049}, "messages"),
    ({"model": 3}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda value: str(value)[:40])
async def test_a_bad_field_is_named(served: Served, fields: dict[str, Any], param: str) -> None:
    error = check_error(await served.http.post(CHAT, json={"messages": USER} | fields), 400)
    assert error["param"].startswith(param)
    assert served.engine.submits == []


@pytest.mark.parametrize("prompt", ["", [], [[]], [-1], [1 << 32], ["a", 3], 3, None, [[["x"]]], ["x"] * 65])
async def test_a_bad_prompt_is_refused(served: Served, prompt: Any) -> None:
    error = check_error(await served.http.post(TEXT, json={"prompt": prompt}), 400)
    assert error["param"].startswith("prompt")
    assert served.engine.submits == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xef\xbb\xbf{}",
        '{"messages": 1}'.encode("utf-16"),
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e400}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"logit_bias": {"1": -Infinity}}',
        b'{"n": 1, "n": 2}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"a": ' * 50 + b"1" + b"}" * 50,
    ],
    ids=lambda body: repr(body[:30]),
)
async def test_what_is_no_clean_json_object_is_refused(served: Served, body: bytes) -> None:
    response = await served.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    check_error(response, 400, "invalid_json")


async def test_a_bad_key_of_logit_bias_is_named(served: Served) -> None:
    error = check_error(await served.http.post(CHAT, json={"messages": USER, "logit_bias": {"Paris": 1}}), 400)
    assert "'Paris'" in error["message"]


async def test_a_missing_field_is_named(served: Served) -> None:
    assert check_error(await served.http.post(CHAT, json={}), 400)["param"] == "messages"
    assert check_error(await served.http.post(TEXT, json={}), 400)["param"] == "prompt"


async def test_a_body_over_the_limit_is_413(served: Served) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * (9 << 20)}]}).encode()
    headers = {"content-type": "application/json"}
    check_error(await served.http.post(CHAT, content=body, headers=headers), 413)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * (1 << 20)

    check_error(await served.http.post(CHAT, content=chunks(), headers=headers), 413)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_only_json_is_taken(served: Served, kind: str) -> None:
    response = await served.http.post(CHAT, content=b"{}", headers={"content-type": kind})
    check_error(response, 415)


async def test_a_prompt_that_fills_the_context_is_too_long(served: Served) -> None:
    response = await served.complete([97] * (CONTEXT - 1))
    assert response.json()["choices"][0]["finish_reason"] == "length"
    for response in (
        await served.complete([97] * CONTEXT),
        await served.chat("x" * CONTEXT),
        await served.chat("x" * (200 << 10)),  # read in another process
        await served.complete([97] * (200 << 10)),
    ):
        error = check_error(response, 400, "context_length_exceeded")
        assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens")


async def test_an_unknown_model_lists_those_served(served: Served) -> None:
    for name in ("gpt-4", "../../etc/passwd"):
        error = check_error(await served.chat(model=name), 404, "model_not_found")
        assert "tiny" in error["message"]
        assert error["param"] == "model"
        check_error(await served.http.get("/v1/models/" + name), 404)


async def test_an_empty_or_missing_model_is_the_only_one_served(served: Served) -> None:
    cases: list[dict[str, Any]] = [{}, {"model": ""}, {"model": None}]
    for fields in cases:
        assert (await served.chat(**fields)).json()["model"] == "tiny"


async def test_with_two_models_one_must_be_named() -> None:
    async with serving(FakeEngine(), names=("a/one", "two")) as served:
        error = check_error(await served.chat(), 404, "model_not_found")
        assert "a/one, two" in error["message"]
        assert (await served.chat(model="a/one")).status_code == 200
        assert (await served.http.get("/v1/models/a/one")).json()["id"] == "a/one"


async def test_models_health_and_ready(served: Served) -> None:
    listed = (await served.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [(card["id"], card["object"], card["max_model_len"]) for card in listed["data"]] == [
        ("tiny", "model", CONTEXT)
    ]
    assert (await served.http.get("/health")).status_code == 200
    assert (await served.http.get("/ready")).json() == {"status": "ready"}


async def test_while_nothing_is_served_health_is_fine_and_the_rest_says_so() -> None:
    async with serving(FakeEngine()) as served:
        served.gateway.update(view_of())
        async with asyncio.timeout(5):
            while (response := await served.http.get("/ready")).status_code == 200:
                pass
        check_error(response, 503, "not_ready")
        assert (await served.http.get("/health")).status_code == 200
        assert "no model is served" in check_error(await served.chat(), 404)["message"]


async def test_a_model_that_loads_gives_503_and_says_when_to_come_back() -> None:
    async with serving(FakeEngine()) as served:
        served.gateway.update(view_of(served.address, state="loading"))
        async with asyncio.timeout(5):
            while (response := await served.chat(model="tiny")).status_code == 200:
                pass
        check_error(response, 503)
        assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost:80:90", "localhost:x", ""])
async def test_a_foreign_host_is_refused(served: Served, host: str) -> None:
    check_error(await served.http.get("/v1/models", headers={"host": host}), 421)


async def test_a_refused_host_is_named_with_the_command_that_allows_it(served: Served) -> None:
    refused = (await served.http.get("/v1/models", headers={"host": "ai.example.org:8117"})).json()
    assert refused["error"]["message"].endswith("edgepipe node start --http-name ai.example.org")
    odd = (await served.http.get("/v1/models", headers={"host": "$(reboot).example"})).json()
    assert "reboot" not in odd["error"]["message"]


LOOPBACK = [
    "localhost",
    "LOCALHOST:1",
    "127.0.0.1:9",
    "[::1]:8117",
    "[::1]",
    "localhost.:8117",
    "127.0.0.2",
    "0.0.0.0:8117",
]
IN_CONTAINERS = ["host.docker.internal:8117", "host.containers.internal"]


@pytest.mark.parametrize("host", [*LOOPBACK, *IN_CONTAINERS])
async def test_loopback_hosts_are_served(served: Served, host: str) -> None:
    assert (await served.http.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://127.0.0.1.evil.example",
        "http://tauri.localhost.evil.example",
        "http://evil-localhost",
        "http://a.localhost:80:80",
    ],
)
async def test_a_foreign_origin_is_refused_whatever_the_method(served: Served, method: str, origin: str) -> None:
    response = await served.http.request(method, CHAT, headers={"origin": origin})
    check_error(response, 403)
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/", 405), ("GET", "/v1", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405), ("POST", "/x", 404)],
)
async def test_other_routes_and_methods(served: Served, method: str, path: str, status: int) -> None:
    response = await served.http.request(method, path)
    check_error(response, status)
    assert ("under /v1" in response.json()["error"]["message"]) == (status == 404)  # a base URL without it is common


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br", "identity, gzip"])
@pytest.mark.parametrize("path", [CHAT, "/api/chat"])
async def test_a_packed_body_is_refused_by_the_name_of_its_packing(served: Served, path: str, encoding: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    response = await served.http.post(path, headers=headers, content=gzip.compress(b'{"model": "tiny"}'))
    assert response.status_code == 415
    assert f"Content-Encoding: {encoding.split()[-1]}; send it uncompressed" in response.text
    assert response.headers["accept-encoding"] == "identity"
    plain = {"content-type": "application/json", "content-encoding": "identity"}
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}'
    assert (await served.http.post(path, headers=plain, content=body)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/api/chat", "/tokenize"])
async def test_a_body_of_900_mb_is_refused_before_it_is_sent(served: Served, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = await served.raw(f"{head}Expect: 100-continue\r\nContent-Length: 900000000\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"the body is larger than 8 MiB" in answer


@pytest.mark.parametrize(
    ("method", "path", "near"),
    [
        ("POST", "/v1/chat/completions/", CHAT),
        ("GET", "/v1/models/", "/v1/models"),
        ("GET", "/api/tags/", "/api/tags"),
        ("POST", "/chat/completions", CHAT),
        ("POST", "/v1/v1/chat/completions", CHAT),
        ("POST", "//v1/chat/completions", CHAT),
        ("POST", "/v1/chat/completion", CHAT),
        ("GET", "/api/models/list/all", ""),
    ],
)
async def test_a_wrong_path_is_answered_with_the_right_one(served: Served, method: str, path: str, near: str) -> None:
    """By no redirection either: many clients do not follow, or send their body twice."""
    response = await served.http.request(method, f"http://127.0.0.1:{served.port}{path}", follow_redirects=False)
    error = response.json()["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert response.status_code == 404
    assert message.endswith(f"Did you mean {near}?") == bool(near)
