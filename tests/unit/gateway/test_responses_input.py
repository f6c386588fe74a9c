"""Bad input to the Responses API, its tools and items, and the store of responses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.gateway.access import AccessRules
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.responses.items import InputItem, messages_of
from edgepipe.gateway.protocols.responses.stored import ResponseStore, StoredResponse
from edgepipe.gateway.thought_tokens import ThoughtTokens
from edgepipe.gateway.tool_calls import Scanned
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, serving

NOW_S = 1_000_000.0
TOOL = {"type": "function", "name": "look"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 7}, "input"),
    ({"input": []}, "input"),
    ({"input": [7]}, "input.0"),
    ({"input": [{"type": 7}]}, "input.0.type"),
    ({"input": [{"type": "wizard"}]}, "input.0.type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
    ({"input": [{"content": "hi"}]}, "input.0.role"),
    ({"input": [{"role": "wizard", "content": "hi"}]}, "input.0.role"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content"),
    ({"input": [{"type": "function_call", "name": "look"}]}, "input.0.call_id"),
    ({"input": [{"type": "function_call", "call_id": "1"}]}, "input.0.name"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input.0.output"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": [7]}]}, "input.0.output"),
    ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "x"}]}, "input.0.input"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"max_tokens": 3}, "max_tokens"),
    ({"max_output_token": 3}, "max_output_token"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"stream": "yes"}, "stream"),
    ({"instructions": ["x"]}, "instructions"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ({"tools": [{"type": "function"}]}, "tools.0.name"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools.0.tools"),
    ({"tools": [{"type": "namespace", "tools": []}]}, "tools.0.name"),
    ({"tools": [TOOL, TOOL | {"parameters": [1]}]}, "tools.1.parameters"),
    ({"tools": [TOOL] * 513}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "gone"}}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"reasoning": {"effort": "x" * 33}}, "reasoning.effort"),
    ({"metadata": {"a": 1}}, "metadata.a"),
]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("fields", "param"), BAD, ids=[param for _, param in BAD])
async def test_a_malformed_body_is_a_400_that_names_the_field(
    shared: Served, fields: dict[str, Any], param: str
) -> None:
    answer = await shared.http.post("/v1/responses", json={"input": "hi"} | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert str(error["param"]).startswith(param), error


@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_guard_refuses(shared: Served) -> None:
    zstd = {"content-type": "application/json", "content-encoding": "zstd"}
    answer = await shared.http.post("/v1/responses", content=b"x", headers=zstd)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")
    answer = await shared.http.post(
        "/v1/responses", content=b" " * (9 << 20), headers={"content-type": zstd["content-type"]}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    answer = await shared.http.put("/v1/responses", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_errors_have_the_form_of_their_path() -> None:
    async with serving(FakeEngine(), rules=AccessRules.of(keys=["k" * 20], key_on_loopback=True)) as served:
        ollama = (await served.http.post("/api/chat", json={})).json()
        assert isinstance(ollama["error"], str)
        openai = (await served.http.post("/v1/responses", json={})).json()
        assert openai["error"]["code"] == "invalid_api_key"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings", "/api/copy", "/api/push", "/api/create"])
async def test_what_ollama_has_and_edgepipe_has_not(shared: Served, path: str) -> None:
    answer = await shared.http.post(path, json={"model": "tiny"})
    assert answer.status_code == 400
    assert "edgepipe" in answer.json()["error"]


def test_items_that_belong_to_one_turn_become_one_message() -> None:
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}], "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "look", "namespace": "ns", "arguments": "{}"},
        {"type": "web_search_call", "id": "ws_1"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "a\nb"},
        {"type": "function_call_output", "call_id": "1", "output": "moon"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
        {"type": "function_call", "call_id": "3", "name": "look", "arguments": "{}"},
    ]
    messages = messages_of([InputItem.model_validate(item) for item in given])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    turn = messages[1]
    assert (turn["reasoning_content"], turn["content"]) == ("Hm.", "I look.")
    functions = [call["function"] for call in turn["tool_calls"]]
    assert functions == [
        {"name": "ns__look", "arguments": "{}"},
        {"name": "patch", "arguments": '{"input":"a\\nb"}'},
    ]


def _stored(text: str) -> StoredResponse:
    return StoredResponse(body={}, given=(InputItem(role="user", content=text),), output=())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20_000)), max_size=60))
def test_the_store_stays_within_its_bounds(kept: list[tuple[str, int]]) -> None:
    store = ResponseStore(most=10, most_bytes=100_000)
    for place, (owner, size) in enumerate(kept):
        store.keep(owner, str(place), _stored("x" * size), now_s=NOW_S)
        assert len(store) <= 10
        assert store.num_bytes <= 100_000


def test_the_user_that_holds_most_loses_its_oldest_response() -> None:
    store = ResponseStore(most=10)
    for place in range(10):
        store.keep("a", str(place), _stored("hi"), now_s=NOW_S)
    for place in range(5):
        store.keep("b", str(place), _stored("hi"), now_s=NOW_S)
    for place in range(5):
        assert store.get("a", str(place + 5), now_s=NOW_S)
        assert store.get("b", str(place), now_s=NOW_S)


def test_ten_thousand_responses_are_stored_one_after_the_other() -> None:
    store = ResponseStore()
    for place in range(10_000):
        store.keep("a", str(place), _stored("hi"), now_s=NOW_S)
    assert len(store) == 256
    assert store.get("a", "9999", now_s=NOW_S)
    with pytest.raises(HttpProblem):
        store.get("a", "9743", now_s=NOW_S)


def test_a_response_is_kept_for_an_hour_and_for_its_user() -> None:
    store = ResponseStore()
    store.keep("a", "1", _stored("hi"), now_s=NOW_S)
    assert store.get("a", "1", now_s=NOW_S + 3599)
    with pytest.raises(HttpProblem):
        store.get("b", "1", now_s=NOW_S)
    with pytest.raises(HttpProblem):
        store.get("a", "1", now_s=NOW_S + 3600)
    assert store.num_bytes == 0


@pytest.mark.parametrize(
    ("inside", "shown", "expected"),
    [
        (True, "rr.c", 3),  # the closing mark ends the reasoning
        (True, ".rr", 3),
        (False, ".rr..cc", 5),
        (False, "cc", 0),
        (False, ".c.", 0),
        (True, "r.", 2),  # cut within the closing mark
    ],
)
def test_tokens_of_reasoning(inside: bool, shown: str, expected: int) -> None:
    """Of each token: ``r`` shows reasoning, ``c`` content, and ``.`` nothing yet."""
    parts = {"r": Scanned(reasoning="x"), "c": Scanned(content="x"), ".": Scanned()}
    tokens = ThoughtTokens(inside=inside)
    for each in shown:
        tokens.add(parts[each])
    tokens.finish()
    assert tokens.count == expected
