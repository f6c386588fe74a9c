"""The Messages API over HTTP: recorded requests of Claude Code, bodies that are refused, keys, and what is left out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import (
    CapacityError,
    KVCacheFull,
    ModelUnknown,
    NodeUnreachable,
    NoFeasiblePlacement,
    QueueFull,
    StageLost,
)
from edgepipe.gateway.problems import HttpProblem, busy, from_error
from edgepipe.gateway.protocols.anthropic.blocks import instructions
from edgepipe.gateway.protocols.anthropic.body import CountBody
from edgepipe.gateway.protocols.error_forms import problem_response
from edgepipe.gateway.strict_body import validate
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, serving

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "clients" / "claude_code.json").read_text(encoding="utf-8"))
PATH = "/v1/messages"
USER = {"role": "user", "content": "hi"}
LOOK = {"name": "look", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "1", "name": "look", "input": {"at": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "y"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Served]:
    async with serving(FakeEngine(group=64)) as value:
        yield value


async def post(served: Served, path: str = PATH, **fields: Any) -> httpx.Response:
    body = {"messages": [USER], "max_tokens": 100} | fields
    return await served.http.post(path, json=body)


def last_prompt(served: Served) -> str:
    return bytes(served.engine.submits[-1].prompt).decode()


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_of_claude_code(gateway: Served) -> None:
    """All but the template's tools: this model has none. The hash in the first line of the instructions may change."""
    for body in RECORDED["requests"]:
        answer = await gateway.http.post(RECORDED["path"], json=body, headers=RECORDED["headers"])
        assert answer.status_code == 200, answer.text
        events = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
        assert (events[0], events[-1]) == ("message_start", "message_stop")
    prompt = last_prompt(gateway)
    assert prompt.partition("]")[2].startswith("system: Instructions 1.\n\nInstructions 2.\nuser: <system-reminder>")
    results = [line for line in prompt.splitlines() if line in ("one", "two")]
    assert results == ["one", "two"], "in the order of their calls, which is not that of the request"
    assert "billing" not in prompt


@pytest.mark.asyncio(loop_scope="module")
async def test_24_tools_of_claude_code_can_be_called(gateway: Served) -> None:
    body = RECORDED["requests"][0] | {"tools": RECORDED["tools"]}
    assert len(body["tools"]) == 24
    counted = await gateway.http.post(f"{PATH}/count_tokens", json={k: body[k] for k in ("messages", "tools")})
    assert counted.status_code == 200, counted.text
    assert counted.json()["input_tokens"] > 4096


ASSISTANT = {"role": "assistant", "content": "a"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
    ({"messages": [{"role": "user", "content": [CALL]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "assistant", "content": [RESULT]}, USER]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, USER]}, "messages.0.content.0.id"),
    ({"messages": [{"role": "assistant", "content": [CALL | {"input": 7}]}, USER]}, "messages.0.content.0.input"),
    ({"messages": [{"role": "system", "content": [RESULT]}, USER]}, "messages.0.content.0.type"),
    ({"messages": [USER, ASSISTANT]}, "messages"),
    ({"system": 7}, "system"),
    ({"system": [RESULT]}, "system"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"tools": [{"name": "look"}]}, "tools.0.input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
    ({"tools": [LOOK, LOOK | {"description": "other"}]}, "tools.1.name"),
    ({"tools": [LOOK | {"input_schema": {"type": "string"}}]}, "tools.0.input_schema"),
    ({"tools": [{"type": "web_search_1", "name": "w"}, LOOK, LOOK | {"strict": True}]}, "tools.2.name"),
    ({"tools": [LOOK], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "hear"}}, "tool_choice"),
    ({"tools": [{"type": "web_search_1", "name": "w"}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "output_config.format.schema"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"temperatur": 1}, "temperatur"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("fields", "named"), BAD)
async def test_a_malformed_body_is_refused_by_the_name_of_its_field(
    gateway: Served, fields: dict[str, Any], named: str
) -> None:
    gateway.engine.submits.clear()
    answer = await post(gateway, **fields)
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert (set(body), body["type"]) == ({"type", "error"}, "error")
    assert (set(body["error"]), body["error"]["type"]) == ({"type", "message"}, "invalid_request_error")
    assert named in body["error"]["message"]
    assert gateway.engine.submits == []


@pytest.mark.asyncio(loop_scope="module")
async def test_other_refusals_have_the_form_of_this_api(gateway: Served) -> None:
    http = gateway.http
    answers = {
        "invalid_request_error": await http.post(PATH, content=b"{", headers={"content-type": "application/json"}),
        "request_too_large": await http.post(
            PATH, content=b" " * (9 << 20), headers={"content-type": "application/json"}
        ),
        "not_found_error": await http.get(f"{PATH}/batches"),
    }
    for kind, answer in answers.items():
        assert answer.json()["error"]["type"] == kind, answer.text
    packed = await http.post(
        PATH, content=b"x", headers={"content-type": "application/json", "content-encoding": "zstd"}
    )
    assert (packed.status_code, packed.json()["type"]) == (415, "error")
    assert (await http.head("/")).status_code == 200


@pytest.mark.parametrize(
    ("problem", "status", "kind"),
    [
        (busy("no time"), 529, "overloaded_error"),
        (from_error(KVCacheFull()), 529, "overloaded_error"),
        (from_error(CapacityError("the model is not ready yet")), 529, "overloaded_error"),
        (from_error(QueueFull("full")), 429, "rate_limit_error"),
        (from_error(NoFeasiblePlacement()), 500, "api_error"),
        (from_error(StageLost("stage 1 ended")), 500, "api_error"),
        (from_error(NodeUnreachable()), 500, "api_error"),
        (from_error(ModelUnknown()), 404, "not_found_error"),
    ],
    ids=lambda value: value.code if isinstance(value, HttpProblem) else "",
)
def test_only_too_much_work_is_an_overload(problem: HttpProblem, status: int, kind: str) -> None:
    answer = problem_response(problem, path=PATH)
    assert (answer.status_code, json.loads(bytes(answer.body))["error"]["type"]) == (status, kind)
    assert ("retry-after" in answer.headers) == (problem.status in (429, 503)), "clients may try it again later"


@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_model_cannot_read_is_replaced_where_clients_send_it_again(gateway: Served) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    history = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "text", "text": "I look."},
                CALL,
            ],
        },
        {"role": "user", "content": [{"type": "text", "text": "go on"}, RESULT | {"content": [image]}]},
    ]
    assert (await post(gateway, messages=history)).status_code == 200
    prompt = last_prompt(gateway)
    assert "a block of type 'image' was left out" in prompt
    assert prompt.index("was left out") < prompt.index("go on"), "results come before the user's text"
    assert "xyz" not in prompt
    failed = RESULT | {"content": "no file", "is_error": True}
    assert (await post(gateway, messages=[*history[:2], {"role": "user", "content": [failed]}])).status_code == 200
    assert "Error: no file" in last_prompt(gateway)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_large_body_is_read_as_a_small_one(gateway: Served) -> None:
    """Another process checks it."""
    schema = {"type": "json_schema", "schema": {"type": "object", "description": "x" * 200}}
    parts = [{"type": "text", "text": "x" * 90}] * 2000
    fields: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [RESULT]},
        ],
        "system": [{"type": "text", "text": "Be brief."}],
        "tools": [LOOK],
        "output_config": {"format": schema},
    }
    counted = await gateway.http.post(f"{PATH}/count_tokens", json=fields)
    assert counted.json()["input_tokens"] > 180_000
    too_long = (await post(gateway, **fields)).json()["error"]["message"]
    assert too_long.startswith("prompt is too long: ")


def test_lines_that_bill_a_request_are_no_instructions() -> None:
    for system in (
        [{"type": "text", "text": "x-anthropic-billing-header: a=1;"}, {"type": "text", "text": "Be brief."}],
        "x-anthropic-billing-header: a=2;\nBe brief.",
    ):
        body = validate(CountBody, {"messages": [USER], "system": system})
        assert instructions(body.system or ()) == "Be brief."


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
BLOCKS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), min_size=1, max_size=3)


@given(texts=st.lists(BLOCKS, min_size=1, max_size=4), system=st.none() | TEXTS | BLOCKS)
def test_every_text_of_a_conversation_is_in_its_common_form(texts: list[Any], system: Any) -> None:
    turns = [turn for content in texts for turn in ({"role": "user", "content": content}, ASSISTANT)][:-1]
    fields = {"messages": turns} | ({} if system is None else {"system": system})
    chat = validate(CountBody, fields).chat()
    whole = "\n".join(message.content or "" for message in chat.messages)
    given_texts = [block["text"] for content in texts for block in content]
    given_texts += [block["text"] for block in system] if isinstance(system, list) else [system or ""]
    assert all(text in whole for text in given_texts)
