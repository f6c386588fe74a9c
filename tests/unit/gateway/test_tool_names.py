"""Tools with names that no model knows: safe names on the way to the model, the client's own on the way back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.gateway.tool_names import is_safe, tool_names
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, events_of, serving

NAME = "github/issues.create: für alle"
MAPPED = "github_issues_create__fur_alle"
CALL = f'<tool_call>\n{{"name": "{MAPPED}", "arguments": {{"at": "x"}}}}\n</tool_call>'.encode()
TOOL: dict[str, Any] = {"type": "function", "function": {"name": NAME, "parameters": {"properties": {"at": {}}}}}
USER = {"role": "user", "content": "go"}
HISTORY = [
    USER,
    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": NAME, "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "a", "name": NAME, "content": "done"},
]


@pytest.mark.parametrize(
    ("name", "mapped"),
    [
        ("a.b", "a_b"),
        ("a/b", "a_b"),
        ("mcp: read file", "mcp__read_file"),
        ("Größe", "Grosse".replace("ss", "_")),
        ("get-weather_2", "get-weather_2"),
    ],
)
def test_a_name_stays_readable(name: str, mapped: str) -> None:
    assert tool_names([name]).for_model(name) == mapped


def test_names_that_would_be_the_same_differ_in_any_order() -> None:
    names = ["a.b", "a/b", "a_b", "a b", "天気", "予報", "x" * 65, "x" * 64, "x" * 66]
    mapped = {name: tool_names(names).for_model(name) for name in names}
    assert len(set(mapped.values())) == len(names)
    assert mapped["a_b"] == "a_b"
    assert mapped["x" * 64] == "x" * 64
    assert mapped == {name: tool_names(names[::-1]).for_model(name) for name in names}


@given(st.lists(st.text(min_size=1, max_size=90), unique=True, max_size=12), st.text(max_size=90))
def test_any_names_go_there_and_back(names: list[str], earlier: str) -> None:
    known = tool_names(names)
    mapped = [known.for_model(name) for name in names]
    assert all(map(is_safe, mapped))
    assert [known.for_client(name) for name in mapped] == names
    if earlier and earlier not in names:
        assert known.for_model(earlier) not in mapped


async def test_the_client_sees_its_own_name_whole_and_streamed() -> None:
    async with serving(FakeEngine(answer=CALL, group=5)) as served:
        for choice in ("auto", "required", {"type": "function", "function": {"name": NAME}}):
            answer = (await served.chat(tools=[TOOL], tool_choice=choice)).json()
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert call["function"] == {"name": NAME, "arguments": '{"at": "x"}'}
            assert MAPPED in served.engine.submits[-1].sampling.grammar
        events = events_of((await served.chat(tools=[TOOL], stream=True)).text)
        deltas = [each for event in events[:-1] for each in event["choices"][0]["delta"].get("tool_calls", ())]
        assert [each["function"]["name"] for each in deltas if "name" in each["function"]] == [NAME]


async def test_ollama_s_client_sees_its_own_name() -> None:
    async with serving(FakeEngine(answer=CALL, group=5)) as served:
        for stream in (True, False):
            body = {"model": "tiny", "messages": [USER], "tools": [TOOL], "stream": stream}
            lines = (await served.http.post("/api/chat", json=body)).text.splitlines()
            calls = [call for line in lines for call in json.loads(line)["message"].get("tool_calls", ())]
            assert calls == [{"function": {"name": NAME, "arguments": {"at": "x"}}}]


@pytest.mark.parametrize("tools", [[TOOL], None])
async def test_the_model_sees_one_name_in_tools_calls_and_results(served: Served, tools: Any) -> None:
    answer = await served.http.post("/v1/chat/completions", json={"messages": HISTORY, "tools": tools})
    assert answer.status_code == 200
    _sees_only_the_mapped_name(served, times=2 if tools else 1)
    turns = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": NAME, "arguments": {}}}]},
        {"role": "tool", "tool_name": NAME, "content": "done"},
    ]
    body = {"model": "tiny", "messages": turns, "tools": tools}
    assert (await served.http.post("/api/chat", json=body)).status_code == 200
    _sees_only_the_mapped_name(served, times=2 if tools else 1)


def _sees_only_the_mapped_name(served: Served, *, times: int) -> None:
    prompt = bytes(served.engine.submits[-1].prompt).decode()
    assert NAME not in prompt
    assert prompt.count(f'"{MAPPED}"') == times


async def test_a_tokenized_conversation_has_the_model_s_names(served: Served) -> None:
    ids = (await served.http.post("/tokenize", json={"messages": HISTORY, "tools": [TOOL]})).json()["tokens"]
    assert MAPPED in bytes(ids).decode()
    assert NAME not in bytes(ids).decode()


@pytest.mark.parametrize("name", ["", "x" * 257, None, 5])
async def test_what_is_no_name_is_refused_with_its_field(served: Served, name: object) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": name}}]
    answer = await served.chat(tools=tools)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools.1.function.name")
