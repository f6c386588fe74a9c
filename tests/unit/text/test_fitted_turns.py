"""Turns as templates take them: calls with their results, answers in a row, missing content."""

from __future__ import annotations

from typing import Any

import pytest

from edgepipe.text.conversations.calls import one_call_each, texts_before_calls
from edgepipe.text.conversations.fitting import Wording, fit
from edgepipe.text.conversations.roles import Turn, joined_assistants, system_in_user
from edgepipe.text.conversations.traits import TemplateTraits
from tests.support.gateways.template_traits import traits_of

CALLING = """{% for m in messages %}<{{ m.role }}>{{ CONTENT }}{% for call in m.tool_calls or [] %}
<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}{% endfor %}
{{- tools | tojson if tools }}"""
WORDING = Wording(write_calls=lambda calls: "", describe_tools=lambda tools: "")


def said(role: str, content: str | None, **more: Any) -> Turn:
    return {"role": role, "content": content, **more}


def call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}


def test_with_one_call_in_a_turn_no_call_gets_the_result_of_a_later_one() -> None:
    results = [said("tool", f"of {name}", tool_call_id=name) for name in ("b", "c")]
    turns = one_call_each([said("assistant", None, tool_calls=[call("a"), call("b"), call("c")]), *results])
    shown = [turn["content"] or turn["tool_calls"][0]["id"] for turn in turns]
    assert shown == ["a", "b", "of b", "c", "of c"], "nothing came back from a"


def test_answers_in_a_row_are_joined_where_they_are() -> None:
    turns = [said("assistant", "hello"), said("user", "hi"), said("assistant", "one"), said("assistant", "two")]
    joined = [(turn["role"], turn["content"]) for turn in joined_assistants(turns)]
    assert joined == [("assistant", "hello"), ("user", "hi"), ("assistant", "one\n\ntwo")]


def test_an_answer_and_a_call_behind_it_become_one_turn_unless_only_texts_are_joined() -> None:
    turns = [said("assistant", "one"), said("assistant", None, tool_calls=[call("a")])]
    assert joined_assistants(turns) == [said("assistant", "one", tool_calls=[call("a")])]
    assert joined_assistants(turns, only_texts=True) == turns


def test_a_text_beside_calls_comes_before_them() -> None:
    turns = [said("user", "hi"), said("assistant", "one", tool_calls=[call("a")])]
    expected = [said("user", "hi"), said("assistant", "one"), said("assistant", None, tool_calls=[call("a")])]
    assert texts_before_calls(turns) == expected


@pytest.mark.parametrize("turns", [[said("user", "hi")], []])
def test_an_empty_text_of_the_system_adds_nothing_to_the_user_s(turns: list[Turn]) -> None:
    assert system_in_user([said("system", ""), *turns]) == (turns or [said("user", "")])


@pytest.mark.parametrize(("assistants", "texts"), [("kept", ["one", "two"]), ("joined", ["one\n\ntwo"])])
def test_answers_in_a_row_are_joined_for_templates_that_need_it(assistants: str, texts: list[str]) -> None:
    turns = [said("assistant", "one"), said("assistant", "two")]
    fitted = fit(turns, tools=(), traits=TemplateTraits(assistants=assistants), wording=WORDING).turns
    assert [turn["content"] for turn in fitted] == texts


def test_missing_content_of_a_turn_without_calls_is_an_empty_text() -> None:
    turns = [said("user", None), said("assistant", None, tool_calls=[])]
    fitted = fit(turns, tools=(), traits=TemplateTraits(), wording=WORDING).turns
    assert fitted == [said("user", ""), said("assistant", "")]


@pytest.mark.parametrize(("content", "call_content"), [("m.content", "empty"), ("m.content or ''", "kept")])
def test_a_template_that_writes_missing_content_of_calls_gets_an_empty_text(content: str, call_content: str) -> None:
    """Else the model would read the word None before each call."""
    traits = traits_of(CALLING.replace("CONTENT", content)).choose(tools=True)
    assert traits.call_content == call_content


@pytest.mark.parametrize("keyword", ["low_effort", "other"])
def test_a_template_shortens_reasoning_if_it_obeys_the_keyword(keyword: str) -> None:
    source = CALLING.replace("CONTENT", "m.content or ''") + f"{{{{ 'Think briefly.' if {keyword} }}}}"
    assert traits_of(source).choose(tools=True).shortens == (keyword == "low_effort")
