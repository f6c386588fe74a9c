"""Conversations that a model's chat template refuses or shortens, over HTTP: they are repaired, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.gateway.conversation import render_chat
from edgepipe.gateway.schema import ChatBody
from edgepipe.gateway.tool_choice import choose_tools
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.family_assets import FamilyAssets
from tests.support.gateways.server import serving
from tests.support.gateways.strict_templates import (
    ALTERNATES,
    NEEDS_USER,
    NULL_CONTENT,
    OBJECTS,
    ONE_CALL,
    SHORT_IDS,
    STRICT_TEMPLATES,
)

LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
Turn = Mapping[str, Any]


def said(role: str, content: str | list[dict[str, str]] | None, **more: Any) -> Turn:
    return {"role": role, "content": content, **more}


def called(*places: str, content: str | None = None) -> Turn:
    return said("assistant", content, tool_calls=[call(place, json.dumps({"at": place})) for place in places])


def call(place: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_of_{place}", "type": "function", "function": {"name": "look", "arguments": arguments}}


def result(place: str) -> Turn:
    return said("tool", f"seen {place}", tool_call_id=f"call_of_{place}")


@asynccontextmanager
async def chatting(template: str) -> AsyncIterator[Any]:
    """Posts a conversation and returns the prompt; an answer other than 200 fails the test."""
    engine = FakeEngine(answer=b"fine")
    async with serving(engine, load=lambda path: FamilyAssets(template)) as served:

        async def chat(*turns: Turn, path: str = "/v1/chat/completions", **fields: Any) -> str:
            answer = await served.http.post(path, json={"model": "tiny", "messages": turns, **fields})
            assert answer.status_code == 200, answer.text
            return bytes(engine.submits[-1].prompt).decode()

        chat.engine = engine  # type: ignore[attr-defined]
        yield chat


EFFORTS = {
    "high": "xhigh",
    "max": "xhigh",
    "xhigh": "xhigh",
    "medium": "medium",
    "low": "low",
    "minimal": "low",
    "none": "low",
    "of my own": "xhigh",
}


async def test_every_effort_becomes_a_level_that_the_template_takes() -> None:
    async with chatting(NEEDS_USER) as chat:
        for effort, level in EFFORTS.items():
            prompt = await chat(said("user", "hi"), reasoning_effort=effort)
            assert prompt.endswith(f"<assistant effort={level}>"), effort
        prompt = await chat(said("user", "hi"), chat_template_kwargs={"reasoning_effort": "high"})
        assert prompt.endswith("<assistant effort=xhigh>")


async def test_ollama_s_think_high_becomes_a_level_that_the_template_takes() -> None:
    async with chatting(NEEDS_USER) as chat:
        prompt = await chat(said("user", "hi"), path="/api/chat", think="high", stream=False)
        assert prompt.endswith("<assistant effort=xhigh>")


async def test_the_product_s_own_parallel_calls_do_not_end_a_conversation() -> None:
    """The template takes one call in a turn: the history has two turns, and the grammar lets the model make one."""
    turns = [said("user", "go"), called("moon", "sun"), result("sun"), result("moon")]
    async with chatting(ONE_CALL) as chat:
        prompt = await chat(*turns, said("assistant", "done"), said("user", "and now?"), tools=[LOOK])
        places = [prompt.index(part) for part in ('{"at": "moon"}', "seen moon", '{"at": "sun"}', "seen sun", "done")]
        assert places == sorted(places)
        grammar = chat.engine.submits[-1].sampling.grammar
        await chat(*turns, tools=[LOOK], parallel_tool_calls=False)
        assert chat.engine.submits[-1].sampling.grammar == grammar


async def test_an_empty_list_of_calls_counts_as_no_calls() -> None:
    async with chatting(ONE_CALL) as chat:
        prompt = await chat(said("user", "go"), said("assistant", "yes", tool_calls=[]), said("user", "on"))
        assert prompt == "<user>go<assistant>yes<user>on<assistant>"


@pytest.mark.parametrize("template", [OBJECTS, NEEDS_USER, NULL_CONTENT])
async def test_arguments_that_are_no_object_do_not_end_a_conversation(template: str) -> None:
    async with chatting(template) as chat:
        for arguments in ("[1]", "null", '"text"', '{"at": "the mo', "", "7"):
            odd = said("assistant", None, tool_calls=[call("moon", arguments)])
            prompt = await chat(said("user", "go"), odd, result("moon"), tools=[LOOK])
            assert "look" in prompt.partition("go")[2]
            assert "seen moon" in prompt


async def test_a_chat_without_a_user_s_turn_is_answered() -> None:
    async with chatting(NEEDS_USER) as chat:
        assert (await chat(said("system", "Be brief."))).startswith("<system>Be brief.<user><assistant")
        prompt = await chat(said("system", "Be brief."), called("moon"), result("moon"), tools=[LOOK])
        assert prompt.startswith("<system>Be brief.<user><assistant>[call look at=moon]<tool>seen moon")


@pytest.mark.parametrize("content", [None, ""])
async def test_a_call_is_shown_where_the_template_asks_for_null_content(content: str | None) -> None:
    async with chatting(NULL_CONTENT) as chat:
        prompt = await chat(said("user", "go"), called("moon", content=content), result("moon"))
        assert prompt == '<user>go<assistant>[call look {"at": "moon"}]<tool>seen moon<assistant>'
        prompt = await chat(said("user", "go"), called("moon", content="I look."), result("moon"))
        assert (
            prompt == '<user>go<assistant>I look.<end><assistant>[call look {"at": "moon"}]<tool>seen moon<assistant>'
        )


async def test_tools_are_in_the_user_s_turn_where_the_template_has_no_system_role() -> None:
    async with chatting(ALTERNATES) as chat:
        prompt = await chat(said("system", "Be brief."), said("user", "go"), tools=[LOOK])
        assert prompt.startswith("<user>Be brief.\n\nYou may call functions")
        assert prompt.endswith("go<assistant>")
        prompt = await chat(said("user", "go"), called("moon"), result("moon"), tools=[LOOK])
        assert '"name": "look", "arguments": {"at": "moon"}' in prompt
        assert "<user><tool_response>\nseen moon" in prompt


@pytest.mark.parametrize("template", [ALTERNATES, SHORT_IDS])
async def test_a_greeting_first_and_two_answers_in_a_row_are_taken_where_roles_alternate(template: str) -> None:
    async with chatting(template) as chat:
        prompt = await chat(said("assistant", "Welcome!"), said("user", "one"), said("assistant", "two"))
        assert [prompt.index(word) for word in ("Welcome!", "one", "two")] == sorted(
            map(prompt.index, ("Welcome!", "one", "two"))
        )
        prompt = await chat(
            said("user", "one"), said("assistant", "two"), said("assistant", "three"), said("user", "4")
        )
        assert "two\n\nthree" in prompt


async def test_a_user_may_go_on_right_after_a_result_where_roles_alternate() -> None:
    async with chatting(SHORT_IDS) as chat:
        prompt = await chat(said("user", "go"), called("moon"), result("moon"), said("user", "stop"), tools=[LOOK])
        assert "[TOOL_RESULTS]seen moon[/TOOL_RESULTS]</s>[INST]stop[/INST]" in prompt


async def test_a_conversation_that_no_repair_fits_is_shown_as_text_or_its_turn_is_named() -> None:
    refusing = "{% if messages | selectattr('content', 'in', ['bad']) | list %}{{ raise_exception('a bad word') }}"
    refusing += "{% endif %}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    async with serving(FakeEngine(), load=lambda path: FamilyAssets(refusing)) as served:
        turns = [said("user", "one"), said("assistant", "two"), said("user", "bad"), said("assistant", "four")]
        answer = await served.http.post("/v1/chat/completions", json={"model": "tiny", "messages": turns})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert "messages.2, of role 'user'" in error["message"]
        assert "a bad word" in error["message"]


TEXTS = st.sampled_from(["alpha", "beta", "gamma", "délta", "{{ x }}", "None"])


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Turns that a client may send, in any order."""
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 7))):
        role = draw(st.sampled_from(["system", "developer", "user", "user", "assistant", "assistant", "calls", "tool"]))
        text = f"{draw(TEXTS)} {number}."
        if role == "calls":
            places = draw(st.lists(st.sampled_from(["moon", "sun", "mars"]), min_size=1, max_size=3))
            turns.append(called(*places, content=draw(st.sampled_from([None, "", text]))))
        elif role == "tool":
            turns.append(result(draw(st.sampled_from(["moon", "sun", "mars"]))))
        elif role == "assistant":
            more = draw(st.sampled_from([{}, {"tool_calls": []}, {"reasoning_content": "why"}]))
            turns.append(said(role, draw(st.sampled_from([None, "", text])), **more))
        else:
            turns.append(said(role, draw(st.sampled_from([text, text, [{"type": "text", "text": text}]]))))
    return turns


@pytest.mark.parametrize("name", STRICT_TEMPLATES)
@given(turns=conversations(), with_tools=st.booleans(), effort=st.sampled_from([None, "none", "high", "max", "odd"]))
@settings(max_examples=15, deadline=None)
async def test_whatever_a_client_sends_becomes_a_prompt_with_its_texts(
    name: str, turns: Sequence[Turn], with_tools: bool, effort: str | None
) -> None:
    """Texts of systems may move to the front; one template shows its system only if the user has the last word."""
    assets = FamilyAssets(STRICT_TEMPLATES[name])
    fields = {"messages": turns, "reasoning_effort": effort}
    prompt = await render_chat(
        assets, ChatBody.model_validate(fields), choose_tools([LOOK] if with_tools else []), owner="", defaults={}
    )
    for turn in turns:
        text = turn["content"]
        text = text[0]["text"] if isinstance(text, list) else text
        is_shown = turn["role"] in ("user", "tool") or (turn["role"] == "assistant" and not turn.get("tool_calls"))
        assert not is_shown or not text or text in prompt or json.dumps(text) in prompt
        for called_place in turn.get("tool_calls") or []:
            assert json.loads(called_place["function"]["arguments"])["at"] in prompt
