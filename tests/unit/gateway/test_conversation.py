"""Conversations as templates of model families want them, and whole answers of these families over HTTP.

The templates are fragments in the documented form of each family, written for these tests.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from edgepipe.gateway.conversation import client_turns, wording
from edgepipe.gateway.formats.detect import detect_format
from edgepipe.gateway.schema import Message
from edgepipe.text.conversations.efforts import keywords_of
from edgepipe.text.conversations.fitting import fit
from edgepipe.text.template import KNOWN_KEYWORDS, MAX_TEMPLATE_BYTES
from edgepipe.text.template_child import make_environment
from edgepipe.text.tokenizer import Tokenizer
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.family_assets import FamilyAssets
from tests.support.gateways.server import events_of, serving
from tests.support.gateways.template_traits import TOKENS, traits_of

GPT_OSS = """<|start|>system<|message|>Reasoning: {{ reasoning_effort|default('medium') }}<|end|>
{%- for message in messages %}
{%- if message.role == 'assistant' and 'tool_calls' in message %}
{%- if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}
{%- set said = message.content or message.thinking %}
{%- if said %}<|start|>assistant<|channel|>analysis<|message|>{{ said }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
{{ call.arguments|tojson }}<|call|>
{%- set last = call.name %}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + message.content|tojson + '<|end|>' }}
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}{% if tools %}# Tools{% endif %}<|start|>assistant"""
GLM = """[gMASK]<sop>{% if tools %}<|system|>{% for tool in tools %}{{ tool|tojson }}{% endfor %}
<tool_call>{function-name}<arg_key>{arg-key}</arg_key><arg_value>{arg-value}</arg_value></tool_call>{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.role == 'assistant' %}
{%- if loop.index0 > last.user and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>
{%- endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}
{%- endfor %}<|assistant|>{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '' }}"""
MINIMAX = """{% if tools %}<tools>{{ tools|tojson }}</tools><minimax:tool_call><invoke name="f"></invoke>
</minimax:tool_call>{% endif %}{% for m in messages %}]~b]{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}[e~[
{% if m.tool_calls or m.role == 'tool' %}{% endif %}{% endfor %}]~b]ai
<think>
"""
QWEN_CODER = """{% if tools %}<tools></tools><tool_call><function=f><parameter=p></parameter></function></tool_call>
{%- endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls %}{{ call.function.arguments|items|list }}{% endfor %}<|im_end|>
{% if m.role == 'tool' %}{% endif %}{% endfor %}<|im_start|>assistant
"""
QWEN_3_6 = """{% if tools %}<|im_start|>system
<tools></tools><tool_call><function=f><parameter=p></parameter></function></tool_call><|im_end|>
{% endif %}{%- for m in messages %}{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>
{%- else %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call><function={{ call.function.name }}>
{%- for key, value in call.function.arguments|items %}<parameter={{ key }}>{{ value }}</parameter>{% endfor -%}
</function></tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}"""
NEMOTRON_3 = """{%- set enable_thinking = enable_thinking if enable_thinking is defined else True %}
{%- set low_effort = low_effort if low_effort is defined else False %}{% if tools %}<tools></tools>
<tool_call><function=f><parameter=p></parameter></function></tool_call>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}
{%- if low_effort and m.role == 'user' %} {reasoning effort: low}{% endif %}
{%- for call in m.tool_calls or [] %}<tool_call><function={{ call.function.name }}>
{%- for name, value in call.function.arguments|items %}<parameter={{ name }}>{{ value }}</parameter>{% endfor -%}
</function></tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{{ '<think>' if enable_thinking else '<think></think>' }}"""
GEMMA_3 = """{% set first = '' %}{% if messages[0]['role'] == 'system' %}
{%- set first = messages[0]['content'] %}{% set messages = messages[1:] %}{% endif %}{{ first }}
{%- for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{% endif %}<start_of_turn>{{ m['role'] }}
{{ m['content'] }}<end_of_turn>
{% endfor %}<start_of_turn>model
"""
GEMMA_4 = """{% if tools %}<|turn>system
{% for tool in tools %}<|tool>declaration:{{ tool.function.name }}<tool|>{% endfor %}<turn|>
{% endif %}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% for call in m['tool_calls'] or [] %}<|tool_call>call:{{ call['function']['name'] }}{at:<|"|>
{{- call['function']['arguments']['at'] }}<|"|>}<tool_call|>{% endfor %}
{%- for answer in m['tool_responses'] or [] -%}
<|tool_response>response:{{ answer['name'] }}{value:<|"|>{{ answer['response'] }}<|"|>}<tool_response|>
{%- endfor %}{{ m['content'] }}{% if not m['tool_responses'] %}<turn|>
{% endif %}{% endfor %}{% if not messages[-1]['tool_responses'] %}<|turn>model
{% endif %}{{ '' if enable_thinking else '<|channel>thought\n<channel|>' }}"""
DEEPSEEK_V31 = """{% for message in messages %}{% if message['role'] == 'user' %}<｜User｜>{{ message['content'] }}
{%- elif message['tool_calls'] is defined %}{% for tool in message['tool_calls'] -%}
{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' -}}
{{ '' + tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}{% endfor %}<｜tool▁calls▁end｜>
{%- elif message['role'] == 'tool' %}{{ message['content'] }}{% endif %}{% endfor %}<｜Assistant｜>
{{- '<think>' if thinking else '</think>' }}"""
MISTRAL = """{% for message in messages %}{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}{% for call in message.tool_calls %}
{%- if call.id|length != 9 %}{{ raise_exception('Tool call IDs should be nine characters') }}{% endif -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments|tojson }}{% endfor %}
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.tool_call_id }}{{ message.content }}[/TOOL_RESULTS]
{%- endif %}{% endfor %}{% if tools %}{% endif %}{# [THINK] #}"""
PHI = """{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message %}<|system|>
{{- message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}<|end|>{% else -%}
<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}<|assistant|>"""
GRANITE = """{% if tools %}<|start_of_role|>available_tools<|end_of_role|>{{ tools|tojson }}<|end_of_text|>
{% endif %}{# write <|tool_call|> and a list #}{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>
{{- m.content }}{{ m.tool_calls|tojson if m.tool_calls }}<|end_of_text|>
{% if m.role == 'tool' %}{% endif %}{% endfor %}<|start_of_role|>assistant<|end_of_role|>"""
LFM2_5 = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'assistant' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- if tools %}<|im_start|>system
List of tools: {{ tools|tojson }}<|im_end|>
{% endif %}{% for message in messages %}{{ "<|im_start|>" + message.role + "\\n" }}
{%- if message.role == "assistant" %}{% generation %}
{%- if message.thinking is defined and (keep_past_thinking or loop.index0 == ns.last) -%}
<think>{{ message.thinking }}</think>{% endif %}
{%- if message.tool_calls is defined %}<|tool_call_start|>[{% for tool_call in message.tool_calls -%}
{%- set func_args = tool_call.function.arguments %}{{ tool_call.function.name }}(
{%- for name, value in func_args.items() %}{{ name + '="' + value|string + '"' }}{% endfor %})
{%- if not loop.last %}, {% endif %}{% endfor %}]<|tool_call_end|>{% endif %}{% endgeneration %}{% endif %}
{{- message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
OLMO_3 = """{% for message in messages %}{% if message['role'] == 'user' %}<|im_start|>user
{{ message['content'] }}<|im_end|>
{% elif message['role'] == 'assistant' %}<|im_start|>assistant
{{ message['content'] }}{% if message.get('tool_calls', none) is not none %}<function_calls>
{%- for tool_call in message['tool_calls'] %}{% set args = tool_call['function']['arguments'] -%}
{%- set ns = namespace(listed=[]) %}{% for key, value in args.items() -%}
{%- set ns.listed = ns.listed + [key ~ '=' ~ (value | tojson)] %}{% endfor -%}
{%- set arguments = ns.listed | join(', ') -%}
{{- tool_call['function']['name'] + '(' + arguments + ')' }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor -%}
</function_calls>{% endif %}<|im_end|>
{% elif message['role'] == 'tool' %}<|im_start|>environment
{{ message['content'] }}<|im_end|>
{% endif %}{% endfor %}{% if tools is not none %}<functions>{{ tools|tojson }}</functions>{% endif %}"""

TEMPLATES = {
    "harmony": GPT_OSS,
    "glm": GLM,
    "minimax": MINIMAX,
    "qwen-coder": QWEN_CODER,
    "gemma4": GEMMA_4,
    "deepseek-v3.1": DEEPSEEK_V31,
    "mistral-args": MISTRAL,
    "phi": PHI,
    "granite": GRANITE,
    "lfm2": LFM2_5,
    "olmo": OLMO_3,
    "hermes": GEMMA_3,
}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}, "times": {"type": "integer"}}},
    },
}


def call(number: int, at: str) -> dict[str, Any]:
    return {"id": f"call_{number}", "function": {"name": "look", "arguments": json.dumps({"at": at})}}


TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "see"},
    {"role": "assistant", "content": "I look.", "reasoning": "Twice.", "tool_calls": [call(1, "x"), call(2, "y")]},
    {"role": "tool", "tool_call_id": "call_2", "content": "sun"},
    {"role": "tool", "tool_call_id": "call_1", "content": "moon"},
]


def rendered(template: str, turns: Sequence[Mapping[str, Any]] = TURNS, *, effort: str | None = None) -> str:
    return prompt_of(template, turns, effort=effort, tools=[LOOK])


def prompt_of(
    template: str,
    turns: Sequence[Mapping[str, Any]],
    *,
    effort: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The prompt that the gateway makes of a client's messages."""
    traits = traits_of(template).choose(tools=bool(tools))
    messages = [Message.model_validate(turn) for turn in turns]
    fitted = fit(client_turns(messages), tools=tools, traits=traits, wording=wording(detect_format(template)))
    keywords = keywords_of({}, effort, traits) | TOKENS | {"tools": list(fitted.tools) or None}
    return (
        make_environment().from_string(template).render(messages=fitted.turns, add_generation_prompt=True, **keywords)
    )


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items())
def test_the_format_is_chosen_by_the_template(name: str, template: str) -> None:
    assert detect_format(template).name == name


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items())
def test_calls_and_their_results_are_in_every_prompt(name: str, template: str) -> None:
    prompt = rendered(template)
    assert [word for word in ("look", "x", "y", "moon", "sun") if word not in prompt] == []
    assert prompt.index("moon") < prompt.index("sun"), "in the order of their calls"


def test_other_formats_and_signs() -> None:
    for text, name in {
        "{{ '<tool_call>' }}": "hermes",
        "[TOOL_CALLS]": "mistral",
        "<|python_tag|>": "llama",
        "{{ messages }}": "hermes",
        "function<｜tool▁sep｜>name\n```json": "deepseek-v3",
        "<｜DSML｜function_calls>": "deepseek-v3.2",
        "{{ '<|tool_list_start|>' }}": "lfm2",
        "{{ '<function_calls>' + message['function_calls'] + '</function_calls>' }}": "olmo",
    }.items():
        assert detect_format(text).name == name
    assert detect_format("<tool_call> <think>").reasoning is not None
    assert detect_format("<tool_call>").reasoning is None


@pytest.mark.parametrize("mark", ["<|channel|>", "<|message|>", "keep_past_thinking", "[TOOL_CALLS]", "[ARGS]"])
def test_a_long_hostile_template_is_read_in_time(mark: str) -> None:
    """A pattern that looks for the rest from every mark on takes minutes."""
    expected = "mistral" if mark == "[TOOL_CALLS]" else "hermes"
    assert detect_format(mark * (MAX_TEMPLATE_BYTES // len(mark))).name == expected


@pytest.mark.parametrize("template", [*TEMPLATES.values(), QWEN_3_6, NEMOTRON_3], ids=lambda text: text[:20])
@pytest.mark.parametrize("arguments", ['{"at": "the mo', "[1]", None])
def test_a_call_with_broken_or_no_arguments_does_not_end_the_conversation(template: str, arguments: str | None) -> None:
    """Clients send back what they got: a call that ``max_tokens`` cut off."""
    function = {"name": "look", "arguments": arguments}
    cut_off = {"role": "assistant", "content": None, "tool_calls": [{"id": None, "type": None, "function": function}]}
    turns = [TURNS[0], cut_off, {"role": "tool", "tool_call_id": "", "content": "sun"}]
    assert "sun" in rendered(template, turns)


@pytest.mark.parametrize(
    ("condition", "role"), [("true", "system"), ("m.role in ['developer', 'system', 'user']", "developer")]
)
def test_a_developer_is_the_system_of_templates_that_do_not_know_the_role(condition: str, role: str) -> None:
    """Qwen's templates write turns of known roles only: the client's instructions would be lost."""
    template = f"{{% for m in messages if {condition} %}}{{{{ m.role }}}}:{{{{ m.content }}}};{{% endfor %}}"
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert prompt_of(template, turns) == f"{role}:Be brief.;user:hi;"


LINES = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
FIRST = """{% set shown = messages %}{% if messages[0].role == 'system' %}{{ 'system:' + messages[0].content + ';' }}
{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list %}{% endif %}"""
STRICT = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"""
ALTERNATING = """{% for m in messages | rejectattr('role', 'equalto', 'system') %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}{% endfor %}
{%- if messages[1:] | selectattr('role', 'equalto', 'system') | list %}{{ raise_exception('late') }}{% endif %}"""


@pytest.mark.parametrize(
    ("template", "roles", "prompt"),
    [
        (LINES, "system system user", "system:0;system:1;user:2;"),
        (FIRST + LINES, "system system user", "system:0\n\n1;user:2;"),
        (FIRST + LINES, "developer system user", "system:0\n\n1;user:2;"),
        (LINES, "user system user", "user:0;system:1;user:2;"),
        (STRICT + LINES, "system user system user", "system:0;user:1\n\n<system>\n2\n</system>;user:3;"),
        (STRICT + LINES, "user system user", "user:0\n\n<system>\n1\n</system>;user:2;"),
        (
            ALTERNATING + LINES,
            "user system user assistant user",
            "user:0\n\n<system>\n1\n</system>\n\n2;assistant:3;user:4;",
        ),
        (LINES, "user user", "user:0;user:1;"),
    ],
)
def test_several_turns_are_one_where_the_template_takes_one(template: str, roles: str, prompt: str) -> None:
    """Coding agents send several of the system's; Qwen 3.5 and 3.6 refuse all but one at the beginning.

    A client whose answer was stopped sends two of the user's in a row; Gemma 3 and Mistral refuse that.
    """
    assert prompt_of(template, [{"role": role, "content": str(i)} for i, role in enumerate(roles.split())]) == prompt


def test_harmony_has_one_call_in_a_turn_and_its_result_after_it() -> None:
    prompt = rendered(GPT_OSS, effort="high")
    assert "Reasoning: high" in prompt
    assert "analysis<|message|>Twice.\nI look.<|end|>" in prompt
    places = [prompt.index(part) for part in ('{"at": "x"}', '"moon"', '{"at": "y"}', '"sun"')]
    assert places == sorted(places)
    done = rendered(GPT_OSS, [*TURNS[:1], {"role": "assistant", "content": "2", "reasoning_content": "because"}])
    assert "because" not in done
    assert keywords_of({}, "none", traits_of(GPT_OSS).plain)["reasoning_effort"] == "low"


def test_reasoning_before_the_last_question_is_dropped_as_the_template_says() -> None:
    assert "<think>Twice.</think>" in rendered(GLM)
    assert "Twice" not in rendered(GLM, [*TURNS, {"role": "user", "content": "and now?"}])


def test_no_effort_turns_reasoning_off() -> None:
    assert rendered(GLM, effort="none").endswith("<think></think>")
    assert rendered(GEMMA_4, effort="none").endswith("<channel|>")
    assert rendered(DEEPSEEK_V31).endswith("</think>")
    assert keywords_of({"enable_thinking": True}, None, traits_of(DEEPSEEK_V31).plain)["thinking"] is True


@pytest.mark.parametrize("template", [QWEN_3_6, NEMOTRON_3])
def test_qwen_3_6_and_nemotron_3_call_as_qwen_s_coder_and_reason(template: str) -> None:
    chat = detect_format(template)
    assert chat.name == "qwen-coder"
    assert chat.opens_reasoning(rendered(template))
    assert not chat.opens_reasoning(rendered(template, effort="none"))
    prompt = rendered(template)
    assert "<tool_call><function=look><parameter=at>x</parameter></function></tool_call>" in prompt
    assert [word for word in ("moon", "sun") if f"<tool_response>{word}</tool_response>" not in prompt] == []


def test_a_low_effort_shortens_nemotron_3_s_reasoning() -> None:
    assert "{reasoning effort: low}" in rendered(NEMOTRON_3, effort="low")
    assert "{reasoning effort: low}" not in rendered(NEMOTRON_3, effort="high")
    assert "low_effort" not in keywords_of({}, "low", traits_of(QWEN_3_6).plain)


def test_what_a_template_does_not_know_is_in_the_text() -> None:
    phi = rendered(PHI)
    assert '<|tool|>[{"name": "look"' in phi
    assert '<|tool_call|>[{"name": "look", "arguments": {"at": "x"}}' in phi
    gemma = rendered(GEMMA_3)
    assert "<tools>" in gemma
    assert "<start_of_turn>user\n<tool_response>\nmoon\n</tool_response>\n<tool_response>\nsun" in gemma


def test_gemma_4_has_results_in_the_turn_of_their_calls() -> None:
    prompt = rendered(GEMMA_4)
    assert '<|tool_response>response:look{value:<|"|>sun<|"|>}<tool_response|>' in prompt
    assert "<|turn>tool" not in prompt


def test_lfm2_has_turns_of_tools_and_the_last_reasoning() -> None:
    prompt = rendered(LFM2_5)
    assert '<|tool_call_start|>[look(at="x"), look(at="y")]<|tool_call_end|>' in prompt
    assert prompt.count("<|im_start|>tool") == 2
    assert "<think>Twice.</think>" in prompt
    assert "Twice" not in rendered(LFM2_5, [*TURNS, {"role": "assistant", "content": "so"}])


def test_olmo_3_reads_arguments_as_objects() -> None:
    prompt = rendered(OLMO_3)
    assert '<function_calls>look(at="x")\nlook(at="y")</function_calls>' in prompt
    assert prompt.count("<|im_start|>environment") == 2


@pytest.mark.parametrize("template", [*TEMPLATES.values(), QWEN_3_6, NEMOTRON_3])
def test_all_keywords_of_templates_are_known(template: str) -> None:
    for effort in ("none", "minimal", "low", "high"):
        assert set(keywords_of({}, effort, traits_of(template).plain)) <= KNOWN_KEYWORDS


def test_mistral_refuses_other_ids_than_nine_characters() -> None:
    prompt = rendered(MISTRAL)
    ids = {prompt.partition(f"{word}[/TOOL_RESULTS]")[0][-9:] for word in ("sun", "moon")}
    assert len(ids) == 2
    assert all(each.isalnum() for each in ids)


CALL = {"at": "the moon", "times": 2}
ANSWERS = {
    "harmony": "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
    "to=functions.look <|constrain|>json<|message|>" + json.dumps(CALL),
    "glm": "\n<think>Let me see.</think>\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>the moon</arg_value>\n"
    "<arg_key>times</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "minimax": 'Let me see.\n</think>\n\n<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">the moon'
    '</parameter>\n<parameter name="times">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "lfm2": '<think>Let me see.</think><|tool_call_start|>[look(at="the moon", times=2)]<|tool_call_end|>',
    "gemma4": "<|channel>thought\nLet me see.<channel|>"
    '<|tool_call>call:look{at:<|"|>the moon<|"|>,times:2}<tool_call|>',
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_reasoning_and_calls_over_http(name: str) -> None:
    engine = FakeEngine(answer=ANSWERS[name].encode(), group=3)
    async with serving(engine, load=lambda path: FamilyAssets(TEMPLATES[name])) as served:
        (choice,) = (await served.chat(tools=[LOOK])).json()["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert (message["content"], message["reasoning_content"]) == (None, "Let me see.")
        (called,) = message["tool_calls"]
        assert (called["function"]["name"], json.loads(called["function"]["arguments"])) == ("look", CALL)

        chunks = events_of((await served.chat(tools=[LOOK], tool_choice="required", stream=True)).text)[:-1]
        deltas = [each["delta"] for chunk in chunks for each in chunk["choices"]]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Let me see."
        assert "".join(delta.get("content", "") for delta in deltas) == ""
        pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls", ())]
        assert [piece["name"] for piece in pieces if "name" in piece] == ["look"]
        assert "name" in pieces[0]
        assert len(pieces) > 2
        assert json.loads("".join(piece["arguments"] for piece in pieces)) == CALL

        turns = [
            {"role": "user", "content": "hi"},
            message,
            {"role": "tool", "tool_call_id": called["id"], "content": "x"},
        ]
        answered = await served.http.post("/v1/chat/completions", json={"messages": turns, "tools": [LOOK]})
        assert answered.status_code == 200
        assert "the moon" in bytes(engine.submits[-1].prompt).decode() or name == "minimax"

        line = await served.http.post(
            "/api/chat", json={"model": "tiny", "messages": turns[:1], "tools": [LOOK], "stream": False}
        )
        body = line.json()["message"]
        assert (body["content"], body["thinking"]) == ("", "Let me see.")
        assert body["tool_calls"] == [{"function": {"name": "look", "arguments": CALL}}]


HALVES = {
    "glm": '<tool_call>look\n<arg_key>seen</arg_key>\n<arg_value>["\\ud83d"]</arg_value>\n</tool_call>',
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"seen": ["\\ud83d"]}}\n</tool_call>',
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", HALVES)
async def test_half_of_a_surrogate_pair_in_a_call_is_passed_on(name: str, stream: bool) -> None:
    """JSON may have it as an escape; no UTF-8 can."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"seen": {"type": "array"}}}}}
    engine = FakeEngine(answer=HALVES[name].encode(), group=3)
    async with serving(engine, load=lambda path: FamilyAssets(TEMPLATES[name])) as served:
        text = (await served.chat(tools=[tool], stream=stream)).text
        bodies = events_of(text)[:-1] if stream else [json.loads(text)]
        parts = [each["delta" if stream else "message"] for body in bodies for each in body["choices"]]
        pieces = [call["function"]["arguments"] for part in parts for call in part.get("tool_calls", ())]
        assert json.loads("".join(pieces)) == {"seen": ["\ud83d"]}

        asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [tool], "stream": stream}
        lines = (await served.http.post("/api/chat", json=asked)).text.splitlines()
        calls = [call for line in lines for call in json.loads(line)["message"].get("tool_calls", ())]
        assert calls == [{"function": {"name": "look", "arguments": {"seen": ["\ud83d"]}}}]


async def test_harmony_without_tools_shows_its_final_channel() -> None:
    text = "<|channel|>analysis<|message|>Simple.<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4."
    async with serving(FakeEngine(answer=text.encode()), load=lambda path: FamilyAssets(GPT_OSS)) as served:
        (choice,) = (await served.chat(reasoning_effort="low")).json()["choices"]
        assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("2 + 2 = 4.", "Simple.")
        assert choice["finish_reason"] == "stop"
        assert b"Reasoning: low" in bytes(served.engine.submits[0].prompt)
        await served.chat("hi", guided_choice=["yes", "no"])
        assert "final" in served.engine.submits[1].sampling.grammar


def vocabulary(*special: str) -> Tokenizer:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library
    from tokenizers.models import WordLevel

    library = Library(WordLevel({"x": 0}, unk_token="x"))
    library.add_special_tokens([AddedToken(name, special=True) for name in special])
    return Tokenizer(library)


def test_the_end_of_a_message_is_no_end_of_a_harmony_answer() -> None:
    gpt_oss = vocabulary("<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|message|>")
    assert set(gpt_oss.end_ids(())) == {gpt_oss.special_ids["<|return|>"], gpt_oss.special_ids["<|call|>"]}
    assert gpt_oss.hidden_ids == set(gpt_oss.end_ids(()))
    phi = vocabulary("<|end|>", "<|tool_call|>")
    assert phi.end_ids(()) == (phi.special_ids["<|end|>"],)
    gemma = vocabulary("<turn|>", "<|tool_response>", "<|channel>", '<|"|>')
    assert set(gemma.end_ids(())) == {gemma.special_ids["<turn|>"], gemma.special_ids["<|tool_response>"]}
    assert gemma.hidden_ids == set(gemma.end_ids(()))
