"""Results of calls in the prompt: each belongs to its call, whatever the order in which the client sends them."""

from typing import Any

import pytest

from edgepipe.gateway.conversation import client_turns, wording
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.gateway.schema import Message
from edgepipe.text.conversations.calls import results_in_calls
from edgepipe.text.conversations.fitting import fit
from edgepipe.text.template_child import make_environment
from tests.support.gateways.template_traits import traits_of

KIMI = """{% for m in messages %}<|im_{{ m.role }}|>{% if m.role == 'tool' %}of {{ m.tool_call_id }}: {% endif %}
{{- m.content or '' }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}
{{- '<|tool_call_begin|>functions.' + call.function.name + ':' + loop.index0|string }}<|tool_call_argument_begin|>
{{- call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}
{%- endfor %}{{ tools | tojson }}"""
HERMES = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>{% if m.role == 'tool' %}{% endif %}{% endfor %}{{ tools | tojson }}"""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def call(name: str) -> dict[str, Any]:
    return {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def prompt(template: str) -> str:
    once = [
        {"role": "assistant", "content": None, "tool_calls": [call("sky"), call("sea")]},
        {"role": "tool", "tool_call_id": "id-sea", "content": "green"},
        {"role": "tool", "tool_call_id": "id-sky", "content": "blue"},
    ]
    turns = [Message.model_validate(turn) for turn in [{"role": "user", "content": "hi"}, *once, *once]]
    traits = traits_of(template).choose(tools=True)
    fitted = fit(client_turns(turns), tools=[TOOL], traits=traits, wording=wording(detect_format(template)))
    return make_environment().from_string(template).render(messages=fitted.turns, tools=[TOOL])


@pytest.mark.parametrize("template", [KIMI, HERMES], ids=["kimi", "hermes"])
def test_results_follow_the_order_of_their_calls(template: str) -> None:
    text = prompt(template)
    assert text.count("blue") == text.count("green") == 2
    assert text.index("sky") < text.index("sea") < text.index("blue") < text.index("green")


def test_results_have_the_names_that_kimi_s_template_gives_to_calls() -> None:
    text = prompt(KIMI)
    assert text.count("of functions.sky:0: blue") == text.count("of functions.sea:1: green") == 2


def test_unnamed_results_have_the_names_of_the_calls_in_order() -> None:
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [call("sky"), call("sea")]},
        {"role": "tool", "content": "blue"},
        {"role": "tool", "content": "green"},
        {"role": "tool", "content": "deep"},
        {"role": "tool", "content": "own", "name": "moon"},
        {"role": "tool", "content": "first", "tool_call_id": "id-sky"},
    ]
    [turn] = results_in_calls(turns)
    named = [(answer["name"], answer["response"]) for answer in turn["tool_responses"]]
    assert named == [("sky", "blue"), ("sea", "green"), ("sea", "deep"), ("moon", "own"), ("sky", "first")]
