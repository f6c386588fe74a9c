"""Each value of a request, however deep, may have any JSON type: the answer is never an internal error."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import Served, serving

_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1]}}}},
}
_MESSAGES = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "hi"}, {"type": "thinking", "thinking": [{"type": "text", "text": "x"}]}],
    },
    {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": _MESSAGES,
        "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "stop": ["x"],
        "logit_bias": {"1": 1},
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": True},
        "max_tokens": 1,
    },
    "/v1/completions": {"prompt": ["a"], "structured_outputs": {"choice": ["a"]}, "stop": "x", "max_tokens": 1},
    "/tokenize": {"messages": _MESSAGES, "tools": [_TOOL]},
    "/api/chat": {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "tool_name": "f", "content": "1"},
        ],
        "tools": [_TOOL],
        "options": {"stop": ["x"]},
    },
    "/api/generate": {"model": "tiny", "prompt": "a", "options": {"num_predict": 1}, "think": True, "keep_alive": "1s"},
}
VALUES: list[Any] = [None, True, 7, "x", ["x"], {}]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a body."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Served]:
    async with serving(FakeEngine()) as made:
        yield made


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("url", BODIES)
async def test_no_type_of_a_value_is_an_internal_error(gateway: Served, url: str) -> None:
    statuses: set[int] = set()
    for path in places(BODIES[url]):
        for value in VALUES:
            body = copy.deepcopy(BODIES[url])
            parent: Any = body
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = value
            response = await gateway.http.post(url, json={"stream": False, **body})
            assert response.status_code < 500, (path, value, response.text)
            statuses.add(response.status_code)
    assert {200, 400} <= statuses
