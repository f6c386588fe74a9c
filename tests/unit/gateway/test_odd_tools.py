"""One odd tool among others: the others stay usable, and what cannot be taken is refused by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgepipe.gateway.formats.detect import FORMATS
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.shown_tools import complete_tool
from edgepipe.gateway.structured import BoundOutput, GrammarCompiler, plan_output
from edgepipe.gateway.tool_choice import choose_tools
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import check_grammar
from tests.support.gateways.fake_engine import FakeEngine
from tests.support.gateways.server import serving

GOOD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "good", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ODD: list[Any] = [
    *({"type": kind} for kind in ("any", "float", "str", "datetime", "int", "dict", "list", "STRING", "null", "file")),
    *({"type": kind} for kind in (["string", "any"], ["STRING", None], [], 5, None, {"type": "string"})),
    {"type": "string", "format": "int32"},
    {"type": "string", "format": 5},
    {"type": "string", "nullable": True},
    {"type": "string", "enum": None},
    {"type": "string", "pattern": "["},
    {"type": "string", "pattern": "(?<=a)b"},
    {"type": "string", "minLength": -1},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "integer", "minimum": "0"},
    {"type": "number", "multipleOf": 0},
    {"type": "array", "items": None},
    {"type": "array", "minItems": "1"},
    {"type": "object", "properties": None},
    {"type": "object", "properties": []},
    {"type": "object", "properties": {"a": None, "b": "string", "c": True}},
    {"type": "object", "properties": {"a": {}}, "required": "a"},
    {"type": "object", "properties": {"a": {}}, "required": ["gone", 5], "additionalProperties": False},
    {"required": True, "type": "string"},
    {"additionalProperties": "string"},
    {"anyOf": []},
    {"anyOf": [{"type": "any"}, None, 5, "string"]},
    {"oneOf": [{"type": "STRING"}, {"type": "int"}]},
    {"$ref": "#/$defs/gone"},
    {"$ref": 5},
    {"$schema": "draft-9", "$defs": []},
    {"$id": "OBJECT", "properties": {"a": {"$id": "b c"}}},
    {"type": "null", "const": [1]},
    *(True, False, None, "string"),
]


def tool(schema: object, **fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return {"type": "function", "function": {"name": "odd", "parameters": parameters, **fields}}


async def _checked_here(grammar: GrammarSpec, owner: str) -> None:
    check_grammar(grammar)


async def plan(*tools: Any, chat: Any = FORMATS[0], **fields: Any) -> BoundOutput:
    return await plan_output(choice=choose_tools(tools, **fields), chat=chat, compiler=GrammarCompiler(_checked_here))


@pytest.mark.parametrize("schema", ODD, ids=str)
async def test_an_odd_schema_leaves_the_other_tools_as_they_are(schema: object) -> None:
    planned = await plan(tool(schema), GOOD)
    assert planned.answer is not None
    assert planned.answer.functions.keys() == {"odd", "good"}
    assert planned.answer.functions["good"]["properties"] == {"city": {"type": "string"}}


@pytest.mark.parametrize("chat", FORMATS, ids=lambda chat: chat.name)
async def test_odd_schemas_in_every_format(chat: Any) -> None:
    tools = [tool(schema, name=f"odd {place}") for place, schema in enumerate(ODD)]
    planned = await plan(*tools, GOOD, chat=chat, tool_choice="required")
    assert planned.answer is not None
    assert len(planned.answer.functions) == len(tools) + 1


WORDS = (
    "type properties required items anyOf oneOf allOf enum const additionalProperties $ref $defs format pattern "
    "minimum minLength maxItems nullable prefixItems patternProperties not $id multipleOf description x"
).split()
PLAIN = st.sampled_from([None, True, False, 0, -1, 1.5, 1e300, "", "string", "any", "OBJECT", "#/$defs/x", "^a", "("])
ANYTHING = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(schema=ANYTHING, chat=st.sampled_from(FORMATS))
async def test_any_value_where_a_schema_belongs_leaves_the_other_tool_usable(schema: object, chat: Any) -> None:
    planned = await plan(tool(schema), GOOD, chat=chat)
    assert planned.answer is not None
    assert "good" in planned.answer.functions
    assert complete_tool(choose_tools([tool(schema)]).tools[0])


@pytest.mark.parametrize("chat", FORMATS, ids=lambda chat: chat.name)
@pytest.mark.parametrize("strict", [True, False])
async def test_a_property_that_is_true_in_every_format(chat: Any, strict: bool) -> None:
    assert (await plan(tool(True, strict=strict), chat=chat, tool_choice="required")).grammar is not None


@pytest.mark.parametrize(
    ("schema", "bound"),
    [
        ({"type": "float"}, {"type": "number"}),
        ({"type": "STRING"}, {"type": "string"}),
        ({"type": ["int", "NULL"]}, {"type": ["integer", "null"]}),
        ({"type": "datetime"}, {}),
        ({"type": ["string", "any"]}, {}),
        ({"type": "bool", "nullable": True}, {"type": ["boolean", "null"], "nullable": True}),
        ({"items": "str", "type": "list"}, {"items": {"type": "string"}, "type": "array"}),
    ],
)
def test_types_of_other_languages_bind_as_what_they_mean(schema: dict[str, Any], bound: dict[str, Any]) -> None:
    assert choose_tools([tool(schema)]).functions["odd"]["properties"]["x"] == bound


@pytest.mark.parametrize("parameters", [None, {}, [], {"type": "OBJECT"}, {"type": "dict"}, {"type": None}])
async def test_parameters_may_be_missing_or_empty(parameters: object) -> None:
    given = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
    bare = {"type": "function", "function": {"name": "bare"}}
    choice = choose_tools([given, bare])
    assert choice.functions["odd"] == choice.functions["bare"]
    shown = choice.tools[0]["function"].get("parameters")
    assert shown["type"] in ("object", "OBJECT", "dict") if shown.get("type") else shown in ({}, {"type": "object"})


def test_the_prompt_shows_a_tool_as_the_client_sent_it() -> None:
    schema = {"type": "datetime", "description": "When", "default": None, "not": {"const": 1}}
    assert choose_tools([tool(schema), GOOD]).tools == (tool(schema), GOOD)


async def test_a_tool_whose_schema_no_grammar_takes_has_free_arguments() -> None:
    planned = await plan(tool({"type": "string", "pattern": "["}), GOOD)
    assert planned.answer is not None
    assert planned.answer.functions["odd"] == {"type": "object"}
    assert "'odd' takes any arguments" in planned.notes[-1].text


async def test_an_odd_schema_is_tried_once_however_often_it_comes() -> None:
    tried: list[str] = []

    async def counted(grammar: GrammarSpec, owner: str) -> None:
        tried.append(grammar.text)
        check_grammar(grammar)

    compiler = GrammarCompiler(counted)
    tools = [tool({"type": "string", "pattern": "["}), GOOD]
    for _ in range(3):
        await plan_output(choice=choose_tools(tools), chat=FORMATS[0], compiler=compiler)
    assert len(tried) == len(set(tried)) == 4  # all tools, each of the two, all with free arguments


@pytest.mark.parametrize(
    ("tools", "param", "named"),
    [
        ([GOOD, tool({"type": "datetime"}, strict=True)], "tools.1.function.parameters", "odd"),
        ([GOOD, tool({"enum": ["x" * 70_000]})], "tools.1.function.parameters", "odd"),
        ([GOOD, tool({}, parameters={"type": "string"})], "tools.1.function.parameters", "odd"),
        ([GOOD, tool({}, parameters="{}")], "tools.1.function.parameters", "odd"),
        ([GOOD, {"type": "custom", "custom": {"name": "odd"}}], "tools.1.type", "odd"),
        ([GOOD, tool({}, name="good")], "tools.1.function.name", "good"),
    ],
)
async def test_what_cannot_be_taken_is_refused_by_name(tools: list[Any], param: str, named: str) -> None:
    with pytest.raises(HttpProblem) as caught:
        await plan(*tools)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert f"'{named}'" in caught.value.message


async def test_equal_tools_count_once() -> None:
    assert list(choose_tools([GOOD, GOOD, tool({})]).functions) == ["good", "odd"]


@pytest.mark.parametrize("kind", ["web_search", "web_search_preview", "code_interpreter", "mcp", "file_search"])
async def test_tools_that_other_servers_run_are_left_out(kind: str) -> None:
    choice = choose_tools([{"type": kind, "server_label": "x"}, GOOD], "required")
    assert list(choice.functions) == ["good"]
    with pytest.raises(HttpProblem) as caught:
        choose_tools([{"type": kind}], "required")
    assert caught.value.param == "tool_choice"


def test_a_tool_in_the_flat_form() -> None:
    flat = {"type": "function", **GOOD["function"]}
    named = {"type": "function", "name": "good"}
    choice, other = (
        choose_tools([flat], named),
        choose_tools([GOOD], {"type": "function", "function": {"name": "good"}}),
    )
    assert (choice.tools, choice.functions, choice.form) == (other.tools, other.functions, other.form)


async def test_the_log_has_one_line_of_a_kind_for_a_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="edgepipe.gateway.leniency")
    odd = [tool({"type": "any"}), tool({}, name="a.b"), tool({}, name="a.c"), {"type": "web_search"}]
    async with serving(FakeEngine(), names=("tiny", "other")) as served:
        for model in ("tiny", "tiny", "other"):
            assert (await served.chat(tools=odd, model=model)).status_code == 200
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert sorted(line for line in lines if line.endswith("model=tiny")) == [
        "a tool of type 'web_search' was left out: no server runs it model=tiny",
        "the model sees the tool 'a.b' as 'a_b' model=tiny",
        "the tool 'odd': its schema was repaired for a grammar model=tiny",
    ]
    assert len(lines) == 6


async def test_large_tools_get_a_clear_answer_and_harm_nobody() -> None:
    large = tool({"description": "x" * (1 << 20)})
    deep: Any = {"type": "any"}
    for _ in range(12):
        deep = {"anyOf": [deep, {"type": "any"}]}
    wide = [tool({"type": "any", "description": "x" * 1900}, name=f"tool/{place}") for place in range(120)]
    async with serving(FakeEngine()) as served:
        answer = await served.chat(tools=[GOOD, large])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        assert "at most 1048576" in answer.json()["error"]["message"]
        assert (await served.chat(tools=[GOOD, tool(deep)])).status_code == 200
        assert (await served.chat(tools=wide)).status_code in (200, 400)
        assert (await served.chat(tools=[GOOD])).status_code == 200
