"""Formats of model families: transcripts in their documented forms, any cut of any text, and grammars that fit."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.gateway.answer_form import answer_form
from edgepipe.gateway.answer_reader import AnswerFormat, AnswerReader
from edgepipe.gateway.formats.chat_format import ChatFormat, Reasoning
from edgepipe.gateway.formats.detect import FORMATS, detect_format
from edgepipe.gateway.schema import CompletionBody
from edgepipe.gateway.structured import GrammarCompiler, plan_output
from edgepipe.gateway.tool_calls import Call, Scanned, joined_calls
from edgepipe.gateway.tool_choice import choose_tools
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import BuiltGrammar, GrammarTokenizer, check_grammar
from edgepipe.text.token_marks import TOOL_MARKS
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.emulated_folder import EOS_TOKEN_ID, SMALLEST_VOCAB, byte_level_tokenizer

BY_NAME = {known.name: known for known in FORMATS}
THINK = Reasoning("<think>", "</think>")
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["C", "F"]},
        "where": {"type": "object", "properties": {"lat": {"type": "number"}}, "additionalProperties": False},
        "hours": {"type": ["array", "null"], "items": {"type": "integer"}},
        "exact": {"$ref": "#/$defs/flag"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
FUNCTIONS: Mapping[str, Any] = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}, "free": {}}


@dataclass(frozen=True)
class Answer:
    """What a text gives in the end."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]  # names and arguments
    num_calls: int
    in_call: bool


def read(
    chat: ChatFormat,
    pieces: list[str],
    *,
    followed_by: str | None = None,
    in_reasoning: bool = False,
    functions: Mapping[str, Any] = FUNCTIONS,
) -> Answer:
    answer = AnswerFormat(chat=chat, functions=functions, in_reasoning=in_reasoning)
    reader = AnswerReader(answer, new_id=lambda index: f"id{index}")
    found: list[Scanned] = []
    for piece in pieces:
        found.append(reader.push(piece))
        indices = [call.index for call in found[-1].calls]
        assert len(set(indices)) == len(indices), "clients take one entry of an index"
    found.append(reader.finish(followed_by=followed_by))
    deltas = [call for part in found for call in part.calls]
    for place, delta in enumerate(deltas):
        first = all(earlier.index != delta.index for earlier in deltas[:place])
        assert bool(delta.name) == first
        assert delta.call_id == (f"id{delta.index}" if first else "")
    calls = joined_calls(deltas)
    assert [call.index for call in calls] == list(range(reader.num_calls))
    return Answer(
        "".join(part.content for part in found),
        "".join(part.reasoning for part in found),
        tuple((call.name, call.arguments) for call in calls),
        reader.num_calls,
        reader.in_call,
    )


ROME = {"city": "Rome", "days": 3}
TRANSCRIPTS: list[tuple[str, str, str, str, list[tuple[str, Any]]]] = [
    # docs/format.md of openai/harmony: a call after reasoning, a preamble, a final answer, the recipient in the role
    (
        "harmony",
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome", "days": 3}<|call|>',
        "",
        "Need to use function get_weather.",
        [("get_weather", ROME)],
    ),
    (
        "harmony",
        '<|channel|>analysis<|message|>User asks: "What is 2 + 2?" Simple.<|end|>'
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        "2 + 2 = 4.",
        'User asks: "What is 2 + 2?" Simple.',
        [],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>long<|end|><|start|>assistant<|channel|>commentary<|message|>**Plan**: look"
        "<|end|><|start|>assistant<|channel|>commentary to=functions.now<|constrain|>json<|message|>{}<|call|>",
        "**Plan**: look",
        "long",
        [("now", {})],
    ),
    (
        "harmony",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "<|"}',
        "",
        "",
        [("get_weather", {"city": "<|"})],
    ),
    # GLM-4.5 and 4.6 with line breaks, GLM-4.7 without; the template's opening of an answer has none
    (
        "glm",
        "\n<think>Rome, 3 days.</think>\nLet me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "Let me see.",
        "Rome, 3 days.",
        [("get_weather", ROME)],
    ),
    (
        "glm",
        "<think></think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>now</tool_call>",
        "",
        "",
        [("get_weather", ROME), ("now", {})],
    ),
    (
        "qwen-coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\nYork \n</parameter>\n<parameter=where>\n"
        '{"lat": 1.5}\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>',
        "I look.",
        "",
        [("get_weather", {"city": "New\nYork ", "where": {"lat": 1.5}, "exact": True})],
    ),
    (
        "qwen-coder",
        "<think>\nRome, three days.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
        "</tool_call>",
        "",
        "Rome, three days.",
        [("get_weather", ROME), ("now", {})],
    ),
    (  # as it often begins a call
        "qwen-coder",
        "I look.\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<function=now>\n</function>\n</tool_call>",
        "I look.",
        "",
        [("get_weather", ROME), ("now", {})],
    ),
    (
        "nemotron-2",
        '<think>hm</think>\n<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}, '
        '{"name": "now", "arguments": {}}]</TOOLCALL>',
        "",
        "hm",
        [("get_weather", ROME), ("now", {})],
    ),
    (
        "cohere",
        '<|START_THINKING|>I will look.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": '
        '"get_weather", "parameters": {"city": "Rome", "days": 3}},\n    {"tool_call_id": "1", "tool_name": "now", '
        '"parameters": {}}\n]<|END_ACTION|>',
        "",
        "I will look.",
        [("get_weather", ROME), ("now", {})],
    ),
    (
        "cohere",
        "<|START_THINKING|>Easy.<|END_THINKING|><|START_RESPONSE|>It <|is|> sunny.<|END_RESPONSE|>",
        "It <|is|> sunny.",
        "Easy.",
        [],
    ),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="hours">[1, 2]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        "",
        [("get_weather", {"city": "Rome", "hours": [1, 2]}), ("now", {})],
    ),
    (
        "deepseek-v3",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Rome", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n'
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Sure.",
        "",
        [("get_weather", ROME), ("now", {})],
    ),
    (
        "deepseek-v3.1",
        "<think>hm</think>Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Rome", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Sure.",
        "hm",
        [("get_weather", ROME)],
    ),
    (
        "deepseek-v3.2",
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">12</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "",
        "",
        [("get_weather", {"city": "12", "days": 3})],
    ),
    # https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4
    (
        "gemma4",
        '<|channel>thought\nThe user wants Rome.<channel|><|tool_call>call:get_weather{city:<|"|>Rome, "I"<|"|>,'
        "days:3,exact:true,hours:[1,2],where:{lat:-1.5}}<tool_call|>",
        "",
        "The user wants Rome.",
        [("get_weather", {"city": 'Rome, "I"', "days": 3, "exact": True, "hours": [1, 2], "where": {"lat": -1.5}})],
    ),
    ("gemma4", "<|channel>thought\n<channel|>It is 5.", "It is 5.", "", []),
    (
        "gemma4",
        "<|tool_call>call:now{}<tool_call|><|tool_call>call:get_weather{city:Rome,days:null}<tool_call|>",
        "",
        "",
        [("now", {}), ("get_weather", {"city": "Rome", "days": None})],
    ),
    (
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        "",
        [("get_weather", ROME), ("now", {})],
    ),
    (
        "phi",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]<|/tool_call|>',
        "",
        "",
        [("get_weather", ROME)],
    ),
    ("phi", '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|>', "", "", [("now", {})]),
    (
        "mistral-args",
        '[THINK]Rome.[/THINK]Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 3}',
        "Sure.",
        "Rome.",
        [("get_weather", ROME)],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]',
        "",
        "",
        [("get_weather", ROME)],
    ),
    # the model card of LFM2-1.2B and the template of LFM2.5; Olmo-3.1-32B-Instruct's template
    (
        "lfm2",
        '<think>Rome.</think>I look.<|tool_call_start|>[get_weather(city="Rome", days=3, exact=True, hours=[1, 2,], '
        "where={'lat': 1.5, 'up': None}), now()]<|tool_call_end|>It rains.",
        "I look.It rains.",
        "Rome.",
        [
            ("get_weather", ROME | {"exact": True, "hours": [1, 2], "where": {"lat": 1.5, "up": None}}),
            ("now", {}),
        ],
    ),
    (
        "lfm2",
        r"<|tool_call_start|>[get_weather(city='it\'s \x41\u00e9\U0001f600 \"\d\n', hours=(1, -2))]<|tool_call_end|>",
        "",
        "",
        [("get_weather", {"city": "it's A\u00e9\U0001f600 \"\\d\n", "hours": [1, -2]})],
    ),
    (
        "olmo",
        'Sure.<function_calls>get_weather(city="New\\nYork)", days=3, exact=true)\nnow()</function_calls>',
        "Sure.",
        "",
        [("get_weather", {"city": "New\nYork)", "days": 3, "exact": True}), ("now", {})],
    ),
    (
        "olmo",
        "<function_calls>\n  get_weather(\n  city = '</function_calls>',\n  hours=null\n)\n</function_calls>",
        "",
        "",
        [("get_weather", {"city": "</function_calls>", "hours": None})],
    ),
    (  # a tag within a line, texts without lines of their own
        "qwen-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n<parameter=a>\nb</parameter> c\n\n</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\n</parameter>\n<parameter=days>\n4</parameter>\n</parameter>\n</function>\n</tool_call>",
        "",
        "",
        [
            ("get_weather", {"city": "<parameter=a>\nb</parameter> c\n", "days": 3}),
            ("get_weather", {"city": "", "days": "4</parameter>"}),
        ],
    ),
    # calls of DeepSeek-V4, Kimi K2 and Seed-OSS, in the form of their chat templates
    (
        "deepseek-v4",
        "<think>hm</think>I look.\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "I look.",
        "hm",
        [("get_weather", ROME), ("now", {})],
    ),
    (
        "kimi",
        "<think>hm</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Rome", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "I look.",
        "hm",
        [("get_weather", ROME), ("now", {})],
    ),
    (  # with spaces, without the kind, with a mark in a text
        "kimi",
        "<|tool_calls_section_begin|>\n<|tool_call_begin|> get_weather <|tool_call_argument_begin|> "
        '{"city": "<|tool_call_end|>"} <|tool_call_end|>\n<|tool_calls_section_end|>',
        "",
        "",
        [("get_weather", {"city": "<|tool_call_end|>"})],
    ),
    (  # without the marks of a section
        "kimi",
        'I look. <|tool_call_begin|>functions.get_weather:12<|tool_call_argument_begin|>{"city": "Rome"}'
        "<|tool_call_begin|>functions.now:13<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "I look.",
        "",
        [("get_weather", {"city": "Rome"}), ("now", {})],
    ),
    (
        "seed",
        "<seed:think>Rome.</seed:think>\nI look.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>New\nYork\n"
        "</parameter>\n<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n"
        "</function>\n</seed:tool_call>",
        "I look.",
        "Rome.",
        [("get_weather", {"city": "New\nYork\n", "days": 3}), ("now", {})],
    ),
    ("granite", "<think>a\nb</think> <response>It <response> is\n</response>\n", "It <response> is\n", "a\nb", []),
    ("granite", "<think>a</think><response>b</response>c</resp", "b</response>c</resp", "a", []),
    ("granite", "Write <response>a</response>", "Write <response>a</response>", "", []),
    (
        "granite",
        '<think>a</think><response>b\n<|tool_call|>[{"name": "now", "arguments": {}}]</response>',
        "b",
        "a",
        [("now", {})],
    ),
    (
        "hermes",
        '<think>\nRome?\n\nYes.\n</think>\n\nSure.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Sure.",
        "Rome?\n\nYes.",
        [("now", {})],
    ),
]


def thinking(chat: ChatFormat, text: str) -> ChatFormat:
    """The format as its reasoning models have it."""
    marks = Reasoning("[THINK]", "[/THINK]") if "[THINK]" in text else THINK
    return chat if chat.reasons else replace(chat, reasoning=marks)


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), TRANSCRIPTS)
def test_transcripts_however_they_are_cut(
    name: str, text: str, content: str, reasoning: str, calls: list[tuple[str, Any]]
) -> None:
    chat = thinking(BY_NAME[name], text)
    for size in (1, 2, 3, 7, 31, len(text)):
        found = read(chat, [text[i : i + size] for i in range(0, len(text), size)])
        assert (found.content, found.reasoning) == (content, reasoning)
        assert [(called, json.loads(arguments)) for called, arguments in found.calls] == calls
        assert not found.in_call


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "calls"), TRANSCRIPTS)
def test_wherever_an_answer_is_cut_off_no_mark_is_content(
    name: str, text: str, content: str, reasoning: str, calls: list[tuple[str, Any]]
) -> None:
    chat = thinking(BY_NAME[name], text)
    for end in range(len(text)):
        found = read(chat, [text[:end]], followed_by="")
        assert content.startswith(found.content.strip()), text[:end]
        assert reasoning.startswith(found.reasoning.strip())
        assert [called for called, _ in found.calls] == [called for called, _ in calls][: found.num_calls]


def test_reasoning_that_the_prompt_opened() -> None:
    chat = replace(BY_NAME["minimax"], reasoning=THINK)
    for pieces in (["So.\n</think>\n\nYes"], list("So.\n</think>\n\nYes")):
        found = read(chat, pieces, in_reasoning=True)
        assert (found.reasoning, found.content) == ("So.", "Yes")
    assert read(chat, ["never ends"], in_reasoning=True).reasoning == "never ends"
    assert read(chat, ["a <think>b</think>"]).content == "a <think>b</think>", "reasoning begins an answer"
    assert chat.opens_reasoning("]~b]ai\n<think>\n")
    assert not chat.opens_reasoning("<think>\n</think>\n")


def test_reasoning_that_the_prompt_opened_with_its_label() -> None:
    """Gemma 4's template opens the reasoning after the result of a tool."""
    chat = BY_NAME["gemma4"]
    for prompt in ("<|tool_response>x<tool_response|><|channel>thought\n", "<|turn>model\n<|channel>"):
        assert chat.opens_reasoning(prompt)
    assert not chat.opens_reasoning("<|turn>model\n<|channel>thought\n<channel|>")
    for pieces in (["So.\n<channel|>Yes"], list("So.\n<channel|>Yes")):
        found = read(chat, pieces, in_reasoning=True)
        assert (found.reasoning, found.content) == ("So.", "Yes")


@pytest.mark.parametrize(
    ("template", "name", "opening"),
    [
        ('<|START_THINKING|> {"tool_name": f, "parameters": p} <|START_ACTION|>', "cohere", "<|START_THINKING|>"),
        ("<think> <TOOLCALL>[ <TOOL_RESPONSE>", "nemotron-2", "<think>"),
        ("<tools> <tool_call> <function=f>", "qwen-coder", None),
    ],
)
def test_a_template_s_marks_name_its_format(template: str, name: str, opening: str | None) -> None:
    chat = detect_format(template)
    assert (chat.name, chat.reasoning and chat.reasoning.opening) == (name, opening)


def test_content_between_marks_is_shown_without_them_whether_or_not_there_are_functions() -> None:
    text = "<|START_RESPONSE|>Hi <|START_ACTION|> you.<|END_RESPONSE|>"
    for pieces in ([text], list(text)):
        assert read(BY_NAME["cohere"], pieces, functions={}).content == "Hi <|START_ACTION|> you."
    assert set(BY_NAME["cohere"].marks) <= set(TOOL_MARKS)


def test_without_functions_marks_of_calls_are_text() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    found = read(replace(BY_NAME["hermes"], reasoning=THINK), ["<think>a</think>" + text], functions={})
    assert (found.content, found.reasoning, found.calls) == (text, "a", ())
    header = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    assert read(BY_NAME["harmony"], [header], functions={}).content == "{}"


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("glm", "<tool_call>what?</tool_call>", None),
        ("glm", "<tool_call>unknown\n</tool_call>", None),
        ("qwen-coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>", None),
        ("qwen-coder", "a <tool_call> b", None),
        ("qwen-coder", "a <function=unknown> b <function=", None),
        ("nemotron-2", "<TOOLCALL>oh", None),
        ("cohere", "<|START_ACTION|>oh", None),
        ("kimi", "<|tool_calls_section_begin|>oh", None),
        ("kimi", "<|tool_call_begin|>oh<|tool_call_begin|>", None),
        ("kimi", "<|tool_call_begin|>functions.unknown:0<|tool_call_argument_begin|>{}<|tool_call_end|>", None),
        ("seed", "<seed:tool_call>\n<function=unknown>\n</function>\n</seed:tool_call>", None),
        ("minimax", "<minimax:tool_call> no", None),
        ("gemma4", "<|tool_call>call:unknown{a:1}<tool_call|>", None),
        ("deepseek-v3.1", "<｜tool▁calls▁begin｜>oh", None),
        ("granite", "<|tool_call|>oh", None),
        ("lfm2", "<|tool_call_start|>[unknown(a=1)]<|tool_call_end|>", None),
        ("lfm2", '<|tool_call_start|>[get_weather("Rome")]<|tool_call_end|>', None),
        ("olmo", "<function_calls>now</function_calls>", None),
        ("harmony", "plain text", None),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>not JSON<|call|>", "not JSON"),
        ("harmony", "<|channel|>analysis to=browser.search<|message|>{}<|call|>", ""),
    ],
)
def test_malformed_calls_are_text(name: str, text: str, content: str | None) -> None:
    for size in (1, 5, len(text)):
        found = read(BY_NAME[name], [text[i : i + size] for i in range(0, len(text), size)])
        assert found.calls == ()
        assert found.content == (text if content is None else content)


TEXTS = st.text(st.characters(exclude_characters="<>[]`{}", exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), inner),
    max_leaves=5,
)
ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "city": TEXTS,
    "days": st.integers(-(10**9), 10**9),
    "units": st.sampled_from(["C", "F"]),
    "where": st.dictionaries(st.from_regex(r"[a-z]{1,3}", fullmatch=True), VALUES, max_size=3),
    "hours": st.none() | st.lists(st.integers(), max_size=3),
    "exact": st.booleans(),
}
CALLS = st.lists(
    st.one_of(
        st.builds(Call, st.just("get_weather"), st.fixed_dictionaries({}, optional=ARGUMENTS)),
        st.builds(Call, st.just("now"), st.just(dict[str, Any]())),
    ),
    min_size=1,
    max_size=3,
)


@given(chat=st.sampled_from(FORMATS), calls=CALLS, size=st.integers(1, 40))
def test_any_calls_of_a_format_are_read_back(chat: ChatFormat, calls: list[Call], size: int) -> None:
    text = chat.write(calls)
    found = read(chat, [text[i : i + size] for i in range(0, len(text), size)])
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [
        (call.name, call.arguments) for call in calls
    ]
    assert found.content == ""


LITERALS = ["a=", "b", "1", "-2.5", "True", ", ", " ", "'x'", '"', "'", "\\", "\\u00", *"{}[](:="]


@given(st.lists(st.sampled_from(LITERALS), max_size=20))
def test_arguments_in_python_always_become_a_json_object(pieces: list[str]) -> None:
    text = "<function_calls>now(first=1," + "".join(pieces) + "')\"))]}})))</function_calls>"
    found = read(BY_NAME["olmo"], [text])
    whole = [json.loads(arguments) for _, arguments in found.calls[: found.num_calls - found.in_call]]
    assert all(each["first"] == 1 for each in whole)


@pytest.mark.parametrize(("value", "kept"), [("date(2024, 1, 2)", "date"), ("x[1, 2]", "x"), ("1 (2, [3, 4], 5)", 1)])
def test_what_is_no_literal_is_dropped_with_all_its_members(value: str, kept: object) -> None:
    text = f"<function_calls>now(first={value}, second=2)</function_calls>"
    ((_, arguments),) = read(BY_NAME["olmo"], [text]).calls
    assert json.loads(arguments) == {"first": kept, "second": 2}


SCRAPS = [
    "<",
    "|",
    ">",
    "{",
    "}",
    '"',
    ":",
    ",",
    "a",
    " ",
    "\n",
    "now",
    "call:now",
    "to=functions.now",
    "city",
    "\\",
    "é",
]


@given(data=st.data())
def test_garbage_never_raises_and_cuts_change_nothing(data: st.DataObject) -> None:
    chat = thinking(data.draw(st.sampled_from(FORMATS)), "")
    call = chat.write([Call("get_weather", ROME), Call("now", {})])
    starts = [call[i : i + 9] for i in range(0, len(call), 9)]
    marks = [*chat.kept_marks(calls=True), *starts, *SCRAPS, "<|call|>", "<function=now>", "</function>", "</invoke>"]
    text = "".join(data.draw(st.lists(st.sampled_from(marks), max_size=25)))
    inside = data.draw(st.booleans()) and not chat.has_channels
    whole = read(chat, [text], in_reasoning=inside)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(chat, pieces, in_reasoning=inside) == whole
    assert read(chat, list(text), in_reasoning=inside) == whole


@pytest.mark.parametrize("piece", ["<", " ", "{", "<|channel|>", "<arg_key>", "a"])
@pytest.mark.parametrize("chat", FORMATS, ids=lambda chat: chat.name)
def test_long_hostile_text_ends_in_time(chat: ChatFormat, piece: str) -> None:
    for start in ("", chat.write([Call("get_weather", ROME)])[:-40]):
        text = start + piece * (10_000 // len(piece))
        read(thinking(chat, ""), [text[i : i + 16] for i in range(0, len(text), 16)])


@pytest.fixture(scope="module")
def vocabulary() -> GrammarTokenizer:
    tokenizer = Tokenizer(byte_level_tokenizer())
    return GrammarTokenizer(
        [tokenizer.token_bytes(token) for token in range(SMALLEST_VOCAB)],
        encode=lambda text: tokenizer.encode(text, add_special=False),
        end_ids=[EOS_TOKEN_ID],
        special_ids=list(tokenizer.special_ids.values()),
    )


def takes(vocabulary: GrammarTokenizer, grammar: GrammarSpec | None, text: str) -> str:
    """``ends``: the whole text and then the end; ``goes on``: the text, but no end yet; else where it is refused.

    Spaces after commas and colons may be left out.
    """
    assert grammar is not None
    state, data = BuiltGrammar(vocabulary, grammar).state(), text.encode()
    for place, byte in enumerate(data):
        allowed = np.unpackbits(state.mask().view(np.uint8), bitorder="little")[byte]
        if not allowed and data[max(0, place - 1) : place + 1] in (b", ", b": "):
            continue
        if not allowed:
            return f"refused after {text.encode()[:place].decode(errors='replace')!r}"
        state.take(byte)
    return "ends" if np.unpackbits(state.mask().view(np.uint8), bitorder="little")[EOS_TOKEN_ID] else "goes on"


TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


NO_FORM: Mapping[str, Any] = {}


async def grammar_of(
    chat: ChatFormat, *, in_reasoning: bool = False, form: Mapping[str, Any] = NO_FORM, **fields: Any
) -> GrammarSpec | None:
    async def check(grammar: GrammarSpec, owner: str) -> None:
        check_grammar(grammar)

    choice = choose_tools(TOOLS, **fields)
    plan = await plan_output(
        form=answer_form(CompletionBody(prompt=["x"], **form)),
        choice=choice,
        chat=chat,
        in_reasoning=in_reasoning,
        compiler=GrammarCompiler(check),
    )
    return plan.grammar


def ended(text: str) -> str:
    """The text without the token that ends an answer."""
    return text.removesuffix("<|call|>")


@pytest.mark.parametrize("chat", FORMATS, ids=lambda chat: chat.name)
async def test_grammars_take_what_models_write(vocabulary: GrammarTokenizer, chat: ChatFormat) -> None:
    call = Call("get_weather", {"city": "Rome", "days": 3, "units": "C", "exact": True})
    if chat.name == "gemma4":
        call = Call(call.name, dict(sorted(call.arguments.items())))
    text, other = ended(chat.write([call])), ended(chat.write([Call("now", {})]))
    unknown = ended(chat.write([Call("never", {})]))
    mistyped = ended(chat.write([Call("get_weather", {"city": "Rome", "days": "many"})]))
    foreign = ended(chat.write([Call("get_weather", {"town": "Rome"})]))
    auto, forced = await grammar_of(chat), await grammar_of(chat, tool_choice="required")
    named = await grammar_of(chat, tool_choice={"type": "function", "function": {"name": "now"}})
    for grammar in (auto, forced):
        assert takes(vocabulary, grammar, text) == "ends"
        assert takes(vocabulary, grammar, other) == "ends"
        for bad in (unknown, mistyped, foreign):
            assert takes(vocabulary, grammar, bad).startswith("refused"), bad
    assert takes(vocabulary, named, other) == "ends"
    assert takes(vocabulary, named, text).startswith("refused")
    said = "<|channel|>final<|message|>Hello" if chat.has_channels else "Hello"
    assert takes(vocabulary, auto, said) == "ends"
    assert takes(vocabulary, forced, said).startswith("refused")
    several = ended(chat.write([call, Call("now", {})]))
    if not chat.has_channels:  # an answer of harmony ends with its call
        assert [takes(vocabulary, grammar, several) for grammar in (auto, forced)] == ["ends", "ends"]
        single = await grammar_of(chat, parallel_tool_calls=False)
        assert takes(vocabulary, single, text) == "ends"
        assert takes(vocabulary, single, several).startswith("refused")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen-coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>\n" * 2),
        ("seed", "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>\n" * 2),
        ("glm", "<tool_call>now</tool_call>" * 2),
        ("glm", "<tool_call>now\n</tool_call>\n" * 2),
        (
            "deepseek-v4",
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        ),
        ("harmony", " to=functions.now<|channel|>commentary json<|message|>{}"),
        ("harmony", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"),
    ],
)
async def test_required_calls_may_have_the_layout_of_templates(
    vocabulary: GrammarTokenizer, name: str, text: str
) -> None:
    assert takes(vocabulary, await grammar_of(BY_NAME[name], tool_choice="required"), text.rstrip("\n")) == "ends"


async def test_a_function_s_name_ends_where_the_header_goes_on(vocabulary: GrammarTokenizer) -> None:
    text = "<|channel|>commentary to=functions.nowjson<|message|>{}"
    assert takes(vocabulary, await grammar_of(BY_NAME["harmony"]), text).startswith("refused")


async def test_calls_in_python_may_have_json_s_words_and_either_quotes(vocabulary: GrammarTokenizer) -> None:
    grammar = await grammar_of(BY_NAME["lfm2"], tool_choice="required")
    for arguments in (
        """city='Rome', units='C', where={'lat': 1.5}, exact=true""",
        r"""city="\"",hours=null,exact=False""",
    ):
        assert takes(vocabulary, grammar, f"<|tool_call_start|>[get_weather({arguments})]<|tool_call_end|>") == "ends"
    for bad in (
        "city=Rome",
        "city='R', units='K'",
        "city='R', where={'lon': 1}",
        "'Rome'",
        "days=3",
        "city='R',, days=1",
    ):
        text = f"<|tool_call_start|>[get_weather({bad})]<|tool_call_end|>"
        assert takes(vocabulary, grammar, text).startswith("refused"), bad


@pytest.mark.parametrize("chat", [known for known in FORMATS if known.name != "llama"], ids=lambda chat: chat.name)
async def test_reasoning_comes_before_what_is_bound(vocabulary: GrammarTokenizer, chat: ChatFormat) -> None:
    chat = thinking(chat, "")
    call = ended(chat.write([Call("now", {})]))
    marks = chat.reasoning or Reasoning("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
    thought = f"{marks.opening}I could write {chat.marks[0] if chat.reasoning else 'so'} x.{marks.closing}"
    for grammar in (await grammar_of(chat), await grammar_of(chat, tool_choice="required")):
        assert takes(vocabulary, grammar, thought + call) == "ends"
        assert takes(vocabulary, grammar, call) == "ends"
        assert takes(vocabulary, grammar, thought + call.replace("now", "never")).startswith("refused")
    if chat.reasoning is not None:
        for choice in ("auto", "required"):
            opened = await grammar_of(chat, in_reasoning=True, tool_choice=choice)
            assert takes(vocabulary, opened, thought.removeprefix(marks.opening) + call) == "ends"
            assert takes(vocabulary, opened, call) != "ends", "the prompt has opened the reasoning"


@pytest.mark.parametrize("name", ["harmony", "hermes", "gemma4"])
async def test_a_bound_answer_may_follow_reasoning(vocabulary: GrammarTokenizer, name: str) -> None:
    async def check(grammar: GrammarSpec, owner: str) -> None:
        check_grammar(grammar)

    chat = thinking(BY_NAME[name], "")
    form = answer_form(CompletionBody(prompt=["x"], guided_choice=["yes", "no"]))
    bound = (await plan_output(form=form, chat=chat, compiler=GrammarCompiler(check))).grammar
    last = "<|channel|>final<|message|>" if name == "harmony" else ""
    thoughts = {
        "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
        "hermes": "<think>\nHm.\n</think>\n\n",
        "gemma4": "<|channel>thought\nHm.<channel|>",
    }
    for thought in ("", thoughts[name]):
        assert takes(vocabulary, bound, thought + last + "yes") == "ends"
        assert takes(vocabulary, bound, thought + last + "maybe").startswith("refused")
    raw = (await plan_output(form=form, compiler=GrammarCompiler(check))).grammar
    assert takes(vocabulary, raw, "no") == "ends"


@pytest.mark.parametrize("chat", FORMATS, ids=lambda chat: chat.name)
async def test_an_answer_may_be_a_call_or_of_a_form(vocabulary: GrammarTokenizer, chat: ChatFormat) -> None:
    """Agents send their tools and the schema of the last answer together."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    last = "<|channel|>final<|message|>" if chat.has_channels else ""
    call, bound = ended(chat.write([Call("now", {})])), last + '{"name": "Rome"}'
    auto = await grammar_of(chat, form=form)
    assert takes(vocabulary, auto, call) == "ends"
    assert takes(vocabulary, auto, bound) == "ends"
    for bad in (f"{last}Hello", bound.replace("name", "town"), call.replace("now", "never")):
        assert takes(vocabulary, auto, bad).startswith("refused"), bad
    forced = await grammar_of(chat, form=form, tool_choice="required")
    assert takes(vocabulary, forced, call) == "ends"
    assert takes(vocabulary, forced, bound).startswith("refused")
    none = await grammar_of(chat, form=form, tool_choice="none")
    assert takes(vocabulary, none, bound) == "ends"
    assert takes(vocabulary, none, call).startswith("refused")


@pytest.mark.parametrize("size", [1, 5, 100])
@pytest.mark.parametrize("chat", FORMATS, ids=lambda chat: chat.name)
def test_an_answer_of_a_form_is_content_beside_tools(chat: ChatFormat, size: int) -> None:
    """Llama's calls are JSON without marks, too."""
    for text in ('{"name": "Rome"}', '{"type": "town", "name": "Rome"}', '{"name": "Rome", "arguments": {}}'):
        shown = f"<|channel|>final<|message|>{text}" if chat.has_channels else text
        found = read(chat, [shown[i : i + size] for i in range(0, len(shown), size)])
        assert (found.content, found.calls) == (text, ())
