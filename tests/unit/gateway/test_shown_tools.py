"""Tools as a prompt shows them: unchanged where the template can, complete where it takes more for granted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.family_assets import FamilyAssets
from tests.support.gateways.server import Served, serving

# Joins texts without asking whether they are there, as templates of several families do.
DEMANDING = (
    "{% for tool in tools %}{{ tool.function.name + ': ' + tool.function.description }}"
    "{% for name, about in tool.function.parameters.properties.items() %}"
    "{{ ' ' + name + '=' + about.type + ' ' + about.description }}"
    "{% if about.type == 'array' %}{{ ' of ' + about['items'].type }}{% endif %}"
    "{% endfor %}|{% endfor %}{% for message in messages %}{{ message.content }}{% endfor %}"
)
EASY = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ messages[0].content }}"


@asynccontextmanager
async def templated(source: str) -> AsyncIterator[Served]:
    async with serving(FakeEngine(), load=lambda path: FamilyAssets(source)) as served:
        yield served


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a", **function}}


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        ({}, "a: |"),
        ({"description": None, "parameters": None}, "a: |"),
        ({"description": "d", "parameters": {"properties": None}}, "a: d|"),
        ({"parameters": {"properties": {"x": {"type": "int"}, "y": None}}}, "a:  x=integer  y=string |"),
        ({"parameters": {"properties": {"x": {"type": ["null", "any", "array"]}}}}, "a:  x=array  of string|"),
    ],
)
async def test_a_template_that_takes_texts_for_granted_gets_them(function: dict[str, Any], shown: str) -> None:
    async with templated(DEMANDING) as served:
        assert (await served.chat("Hi", tools=[tool(**function)])).status_code == 200
        assert bytes(served.engine.submits[-1].prompt).decode() == f"{shown}Hi"


async def test_any_other_template_gets_the_tool_as_it_came() -> None:
    given = tool(parameters={"type": "object", "properties": {"x": {"type": "datetime"}}})
    async with templated(EASY) as served:
        assert (await served.chat("Hi", tools=[given])).status_code == 200
        prompt = bytes(served.engine.submits[-1].prompt).decode()
    assert prompt == '{"type": "function", "function": {"name": "a", "parameters": ' + (
        '{"type": "object", "properties": {"x": {"type": "datetime"}}}}}Hi'
    )


async def test_a_template_that_refuses_complete_tools_says_why() -> None:
    async with templated("{{ tools[0].nothing.more }}") as served:
        answer = await served.chat("Hi", tools=[tool()])
    assert answer.status_code == 400
    assert "nothing" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "chosen",
    [
        "required",
        {"type": "function", "function": {"name": "b"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "b"}]}},
    ],
)
async def test_the_prompt_shows_all_tools_whichever_may_be_called(chosen: Any) -> None:
    """So that the head of a long conversation stays cached from turn to turn."""
    tools = [tool(name=name) for name in "ab"]
    async with templated(EASY) as served:
        for choice in ("auto", chosen):
            assert (await served.chat("Hi", tools=tools, tool_choice=choice)).status_code == 200
        free, bound = served.engine.submits
        assert bytes(free.prompt) == bytes(bound.prompt)
        assert "{" in bytes(free.prompt).decode()
