"""Fields as clients of other servers name them: used, or refused with the name of the right one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from edgepipe.gateway.formats.detect import detect_format
from edgepipe.gateway.misspelt import misspelt
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.protocols.ollama.body import OllamaChatBody
from edgepipe.gateway.schema import ChatBody, CompletionBody
from edgepipe.gateway.strict_body import validate
from edgepipe.sampling.thought_budget import split_budget
from tests.support.gateways.fake_engine import ByteAssets, FakeEngine
from tests.support.gateways.server import Served, serving
from tests.support.gateways.template_traits import TURNS, traits_of

USER = [{"role": "user", "content": "hi"}]
THINKS = "{% if enable_thinking %}<think>{% endif %}</think>{{ reasoning_effort }}"


class ThinkingAssets(ByteAssets):
    """A template that knows a switch of reasoning."""

    traits = traits_of(THINKS + TURNS)
    chat = detect_format(THINKS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinker() -> AsyncIterator[Served]:
    async with serving(FakeEngine(answer=b"Paris.", group=64), load=lambda path: ThinkingAssets()) as value:
        yield value


async def _prompt(served: Served, **fields: Any) -> str:
    served.engine.submits.clear()
    response = await served.chat(**fields)
    assert response.status_code == 200, response.text
    return bytes(served.engine.submits[0].prompt).decode()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "as_if"),
    [
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"reasoning": {"enabled": True, "exclude": False}}, {"enable_thinking": True}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
        ({"thinking": {"type": "disabled"}, "enable_thinking": False}, {"enable_thinking": False}),
    ],
)
async def test_switches_of_other_servers_turn_reasoning_on_and_off(
    thinker: Served, fields: dict[str, Any], as_if: dict[str, Any]
) -> None:
    assert await _prompt(thinker, **fields) == await _prompt(thinker, **as_if)
    if as_if:
        assert await _prompt(thinker, **fields) != await _prompt(thinker)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 7},
        {"thinking_budget": 7, "enable_thinking": True},
        {"thinking": {"type": "enabled", "budget_tokens": 7}},
        {"reasoning": {"max_tokens": 7}},
    ],
)
async def test_a_budget_of_reasoning_binds_the_output(thinker: Served, fields: dict[str, Any]) -> None:
    await _prompt(thinker, **fields)
    budget, grammar = split_budget(thinker.engine.submits[0].sampling.grammar)
    assert budget is not None
    assert (budget.most_tokens, budget.opening, budget.closing) == (7, "<think>", "</think>")
    assert "thought" in grammar


async def test_a_budget_does_no_harm_to_a_model_that_does_not_reason(served: Served) -> None:
    await _prompt(served, thinking_token_budget=7)
    assert served.engine.submits[0].sampling.grammar == ""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "disabled"}, "enable_thinking": True}, "thinking"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning"),
        ({"thinking": {"type": "off"}}, "thinking.type"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ],
)
async def test_what_contradicts_itself_is_refused(thinker: Served, fields: dict[str, Any], param: str) -> None:
    response = await thinker.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("stop_sequences", ["e"], "send stop"),
        ("system", "Answer in French.", "'system' in messages"),
        ("format", "json", "send response_format"),
        ("options", {"num_predict": 1}, "temperature and max_tokens"),
        ("num_predict", 1, "send max_tokens"),
        ("max_new_tokens", 1, "send max_tokens"),
        ("max_output_tokens", 1, "send max_tokens"),
        ("max_token", 1, "send max_tokens"),
        ("maxTokens", 1, "send max_tokens"),
        ("temprature", 0, "send temperature"),
        ("topP", 0.5, "send top_p"),
        ("stops", ["e"], "send stop"),
    ],
)
@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_other_names_are_refused_with_the_right_one(body: type[ChatBody], name: str, value: Any, instead: str) -> None:
    with pytest.raises(HttpProblem) as caught:
        validate(body, {"messages" if body is ChatBody else "prompt": USER if body is ChatBody else "x", name: value})
    assert caught.value.param == name
    assert instead in caught.value.message
    validate(body, {"messages" if body is ChatBody else "prompt": USER if body is ChatBody else "x", name: None})


def test_ollama_s_options_are_spelt_right_too() -> None:
    with pytest.raises(HttpProblem, match="send num_predict"):
        validate(OllamaChatBody, {"model": "m", "messages": USER, "options": {"num_predicts": 1}})


@pytest.mark.parametrize(
    "name", ["session_id", "chat_id", "models", "provider", "route", "transforms", "top_a", "n_x", ""]
)
def test_fields_that_resemble_none_are_ignored(name: str) -> None:
    validate(ChatBody, {"model": "m", "messages": USER, name: ["x"]})


def test_looking_for_misspelt_fields_is_bounded() -> None:
    many = [f"x{index}" for index in range(100_000)]
    assert misspelt([*many, "max_token"], {"max_tokens"}) == ("max_token", "max_tokens")
    assert misspelt(["maxtokens", "max_tokens"], {"max_tokens"}) is None


@pytest.mark.parametrize("value", ["low", "medium", "high", None])
async def test_fields_that_do_no_harm_are_taken(served: Served, value: str | None) -> None:
    assert (await served.chat(verbosity=value, best_of=1)).status_code == 200
    assert (await served.complete(best_of=1, n=1)).status_code == 200


async def test_a_refusal_in_the_history_is_the_text_of_its_turn(served: Served) -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I may not."}]}
    response = await served.http.post("/v1/chat/completions", json={"messages": [*USER, refused, *USER]})
    assert response.status_code == 200
    assert "assistant: I may not.\n" in bytes(served.engine.submits[-1].prompt).decode()


@pytest.mark.parametrize("turn", [{"role": "tool"}, {"role": "function"}, {"role": "tool", "content": None}])
async def test_a_turn_of_a_tool_that_says_nothing_is_refused(served: Served, turn: dict[str, Any]) -> None:
    response = await served.http.post("/v1/chat/completions", json={"messages": [*USER, turn]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages.1.content"
    ollama = await served.http.post("/api/chat", json={"model": "tiny", "messages": [*USER, {"role": "tool"}]})
    assert ollama.status_code == 400
