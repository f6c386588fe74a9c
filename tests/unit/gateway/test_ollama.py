"""Ollama's endpoints, as its clients read them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from edgepipe.gateway.protocols.ollama.body import OllamaMessage
from tests.support.gateways.fake_engine import CONTEXT, FakeEngine
from tests.support.gateways.server import Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER = FakeEngine().answer.decode()
USER = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(loop_scope="module")
async def served(shared: Served) -> AsyncIterator[Served]:
    shared.engine.submits.clear()
    yield shared


async def _post(served: Served, path: str, **body: Any) -> Any:
    return await served.http.post(path, json={"model": "tiny"} | body)


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


async def test_a_chat_streams_lines_unless_told_otherwise(served: Served) -> None:
    response = await _post(served, "/api/chat", messages=USER)
    assert response.headers["content-type"] == "application/x-ndjson"
    *parts, last = _lines(response.text)
    assert "".join(part["message"]["content"] for part in parts) == ANSWER
    assert not any(part["done"] for part in parts)
    assert (last["done"], last["done_reason"]) == (True, "stop")
    assert last["eval_count"] == len(ANSWER) + 1
    whole = (await _post(served, "/api/chat", messages=USER, stream=False)).json()
    assert whole["message"] == {"role": "assistant", "content": ANSWER}
    assert whole["prompt_eval_count"] == len("user: hi\nassistant:")


async def test_options_reach_the_engine(served: Served) -> None:
    options = {"temperature": 0.1, "top_k": 5, "num_predict": 3, "repeat_penalty": 1.5, "seed": 4, "num_ctx": 2048}
    whole = (await _post(served, "/api/chat", messages=USER, stream=False, options=options)).json()
    assert whole["done_reason"] == "length"
    submit = served.engine.submits[0]
    assert (submit.max_tokens, submit.sampling.top_k, submit.sampling.seed) == (3, 5, 4)
    assert submit.sampling.repetition_penalty == 1.5
    await _post(served, "/api/chat", messages=USER, options={"num_predict": -1, "stop": ["x"]})
    assert served.engine.submits[1].max_tokens > 1000
    assert served.engine.submits[1].sampling.temperature == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("options", "temperature", "top_p", "min_p"),
    [
        ({"temperature": 5}, 2.0, 0.9, 0.0),
        ({"temperature": -1, "top_p": 1.5}, 0.0, 1.0, 0.0),
        ({"temperature": 1.5, "top_p": 0}, 0.0, 1.0, 0.0),  # only the likeliest token is left
        ({"top_p": -0.5, "min_p": 7}, 0.0, 1.0, 1.0),
        ({"temperature": 1, "top_p": 0.5, "min_p": -1}, 1.0, 0.5, 0.0),
    ],
)
async def test_options_out_of_range_count_as_the_nearest_possible(
    served: Served, options: dict[str, float], temperature: float, top_p: float, min_p: float
) -> None:
    response = await _post(served, "/api/chat", messages=USER, stream=False, options=options)
    assert response.status_code == 200
    sampling = served.engine.submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (temperature, pytest.approx(top_p), min_p)


async def test_generate_goes_through_the_template_unless_raw(served: Served) -> None:
    whole = (await _post(served, "/api/generate", prompt="ab", system="be brief", stream=False)).json()
    assert whole["response"] == ANSWER
    assert bytes(served.engine.submits[0].prompt) == b"system: be brief\nuser: ab\nassistant:"
    lines = _lines((await _post(served, "/api/generate", prompt="ab", raw=True)).text)
    assert "".join(line["response"] for line in lines) == ANSWER
    assert bytes(served.engine.submits[1].prompt) == b"ab"


async def test_format_binds_the_answer(served: Served) -> None:
    await _post(served, "/api/chat", messages=USER, format="json")
    await _post(served, "/api/chat", messages=USER, format={"type": "object", "properties": {"a": {}}})
    assert all(submit.sampling.grammar for submit in served.engine.submits)
    assert (await _post(served, "/api/chat", messages=USER, format="xml")).status_code == 400


async def test_raw_prompts_have_a_format_too(served: Served) -> None:
    await _post(served, "/api/generate", prompt="x", raw=True, format="json")
    assert served.engine.submits[0].sampling.grammar


@pytest.mark.parametrize("raw", [None, False, True])
async def test_logprobs(served: Served, raw: bool | None) -> None:
    """``raw`` None: of a chat."""
    fields: dict[str, Any] = {"messages": USER} if raw is None else {"prompt": "hi", "raw": raw}
    path = "/api/chat" if raw is None else "/api/generate"
    for stream in (True, False):
        response = await _post(served, path, stream=stream, logprobs=True, top_logprobs=1, **fields)
        scores = [score for line in _lines(response.text) for score in line.get("logprobs", ())]
        assert "".join(score["token"] for score in scores) == ANSWER
        assert scores[0]["top_logprobs"] == [{"token": "A", "logprob": -1.0, "bytes": [65]}]
    assert "logprobs" not in (await _post(served, path, stream=False, **fields)).json()


async def test_thinking_is_told_to_the_template(served: Served) -> None:
    for think, beginning in ((False, b"[enable_thinking=False]"), ("low", b"[reasoning_effort=low]")):
        await _post(served, "/api/chat", messages=USER, think=think, stream=False)
        assert bytes(served.engine.submits[-1].prompt).startswith(beginning)


async def test_null_is_as_good_as_absent(served: Served) -> None:
    """Ollama is written in Go, whose decoder leaves a field as it was."""
    call = {"id": None, "function": {"name": "look", "arguments": None}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    options = {"temperature": None, "presence_penalty": None, "top_k": -1}
    for fields in ({}, dict.fromkeys(("stream", "logprobs", "top_logprobs", "format", "keep_alive", "tools"))):
        response = await _post(served, "/api/chat", messages=messages, options=options, **fields)
        assert response.status_code == 200, response.text
        assert len(_lines(response.text)) > 1
    response = await _post(served, "/api/generate", prompt="x", raw=None, system=None)
    assert bytes(served.engine.submits[-1].prompt) == b"user: x\nassistant:"
    (line,) = _lines((await _post(served, "/api/generate", prompt=None)).text)
    assert line["done_reason"] == "load"


async def test_a_raw_prompt_takes_no_system_text_and_an_empty_one_only_loads(served: Served) -> None:
    response = await _post(served, "/api/generate", prompt="x", system="be brief", raw=True)
    assert (response.status_code, response.json()["error"]) == (400, "system is only allowed without raw: true")
    (line,) = _lines((await _post(served, "/api/generate", prompt="", raw=True)).text)
    assert line["done_reason"] == "load"
    assert served.engine.submits == []


async def test_no_messages_only_ask_that_the_model_be_there(served: Served) -> None:
    (line,) = _lines((await _post(served, "/api/chat", messages=[])).text)
    assert (line["done"], line["done_reason"]) == (True, "load")
    (line,) = _lines((await _post(served, "/api/generate")).text)
    assert line["response"] == ""
    assert served.engine.submits == []


async def test_tool_calls_come_whole_with_objects() -> None:
    call = b'<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with serving(FakeEngine(answer=call, group=5)) as served:
        for stream in (True, False):
            response = await _post(served, "/api/chat", messages=USER, tools=[tool], stream=stream)
            calls = [c for line in _lines(response.text) for c in line["message"].get("tool_calls", ())]
            assert calls == [{"function": {"name": "look", "arguments": {"at": "x"}}}]


async def test_a_call_that_is_cut_off_is_dropped() -> None:
    """Its arguments are an object here, and what came of one is none."""
    call = b'<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with serving(FakeEngine(answer=call, group=5)) as served:
        for stream in (True, False):
            fields = {"tools": [tool], "stream": stream, "options": {"num_predict": 45}}
            lines = _lines((await _post(served, "/api/chat", messages=USER, **fields)).text)
            assert all(line["message"] == {"role": "assistant", "content": ""} for line in lines)
            assert lines[-1]["done_reason"] == "length"


@pytest.mark.parametrize("depth", [99, 101, 980, 5000])
async def test_a_call_of_endless_brackets_is_dropped(depth: int) -> None:
    arguments = b'{"at": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    call = b'<tool_call>\n{"name": "look", "arguments": ' + arguments + b"}\n</tool_call>"
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    async with serving(FakeEngine(answer=call, group=64)) as served:
        for stream in (True, False):
            response = await _post(served, "/api/chat", messages=USER, tools=[tool], stream=stream)
            assert response.status_code == 200, response.text
            lines = _lines(response.text)
            assert lines[-1]["done"]
            assert any("tool_calls" in line["message"] for line in lines) == (depth < 100)


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
async def test_no_content_type_is_needed(served: Served, kind: str | None) -> None:
    """``curl -d`` without a header, as in Ollama's documentation."""
    headers = {} if kind is None else {"content-type": kind}
    for path, body in (("chat", {"messages": USER}), ("generate", {"prompt": "hi"}), ("show", {})):
        content = json.dumps({"model": "tiny", "stream": False} | body)
        response = await served.http.post(f"/api/{path}", content=content, headers=headers)
        assert response.status_code == 200, response.text
        foreign = {"origin": "https://elsewhere.example"}
        assert (await served.http.post(f"/api/{path}", content=content, headers=headers | foreign)).status_code == 403


async def test_a_tag_behind_the_name_does_no_harm(served: Served) -> None:
    response = await served.http.post("/api/chat", json={"model": "tiny:latest", "messages": USER, "stream": False})
    assert response.json()["model"] == "tiny"


async def test_lists_and_facts(served: Served) -> None:
    (tag,) = (await served.http.get("/api/tags")).json()["models"]
    assert (tag["name"], tag["model"]) == ("tiny", "tiny")
    (loaded,) = (await served.http.get("/api/ps")).json()["models"]
    assert loaded["context_length"] == CONTEXT
    shown = (await _post(served, "/api/show")).json()
    assert shown["template"] == "lines"
    assert "tools" in shown["capabilities"]
    assert shown["model_info"]["general.basename"] == "tiny"


async def test_what_clients_ask_first(served: Served) -> None:
    """Ollama's command line asks for ``/``; VS Code wants version 0.6.4 or newer."""
    for method in ("HEAD", "GET"):
        response = await served.http.request(method, "/")
        assert (response.status_code, response.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    version = (await served.http.get("/api/version")).json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]


async def test_calls_keep_their_ids_so_that_results_find_them() -> None:
    """LangChain sends results in any order, with the ids of their calls."""
    calls = [{"id": name, "function": {"name": "look", "arguments": {"at": name}}} for name in ("x", "y")]
    turn = OllamaMessage.model_validate({"role": "assistant", "tool_calls": [*calls, {"function": {"name": "look"}}]})
    assert [call["id"] for call in turn.fields(1)["tool_calls"]] == ["x", "y", "call_1_2"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/chat", {"model": "nothing", "messages": USER}, 404),
        ("/api/chat", {"messages": USER}, 400),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "wizard"}]}, 400),
        ("/api/chat", {"model": "tiny", "messages": USER, "options": {"temperature": "warm"}}, 400),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400),
        ("/api/generate", {"model": "tiny", "prompt": 3}, 400),
        ("/api/show", {"model": "nothing"}, 404),
    ],
)
async def test_errors_are_one_line_of_text(served: Served, path: str, body: dict[str, Any], status: int) -> None:
    response = await served.http.post(path, json=body)
    assert response.status_code == status
    assert set(response.json()) == {"error"}
    assert isinstance(response.json()["error"], str)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name: "),
        ({"format": {"type": "wizard"}}, "format: "),
        ({"options": {"temperature": "warm"}}, "options.temperature: "),
        ({"keep_alive": True}, "keep_alive: "),
    ],
)
async def test_a_bad_field_is_named(served: Served, fields: dict[str, Any], name: str) -> None:
    response = await served.http.post("/api/chat", json={"model": "tiny", "messages": USER, **fields})
    assert response.status_code == 400
    assert response.json()["error"].startswith(name)
