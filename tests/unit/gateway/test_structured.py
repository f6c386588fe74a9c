"""``response_format`` and ``tools`` to grammars: what they let through, and what is refused with which field."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from edgepipe.children.forked_job import JobCost
from edgepipe.errors import RequestInvalid
from edgepipe.gateway.answer_form import answer_form
from edgepipe.gateway.closed_schema import closed_schema
from edgepipe.gateway.conversation import tool_instructions
from edgepipe.gateway.formats.chat_format import ChatFormat
from edgepipe.gateway.formats.hermes import HERMES
from edgepipe.gateway.formats.llama import LLAMA
from edgepipe.gateway.formats.mistral import MISTRAL, MISTRAL_ARGS
from edgepipe.gateway.problems import HttpProblem
from edgepipe.gateway.schema import CompletionBody
from edgepipe.gateway.structured import BoundOutput, GrammarCompiler, plan_output
from edgepipe.gateway.tool_choice import choose_tools
from edgepipe.sampling import GrammarSpec
from edgepipe.sampling.grammar import BuiltGrammar, GrammarState, GrammarTokenizer, check_grammar
from edgepipe.sampling.grammar_trial import GrammarTooHard
from edgepipe.text.tokenizer import Tokenizer
from edgepipe.weights.emulated_folder import EOS_TOKEN_ID, SMALLEST_VOCAB, byte_level_tokenizer

CITY = {"$ref": "#/$defs/city"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": CITY},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"city": {"type": "string", "maxLength": 20}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALLS = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS] [{"name": "now", "arguments": {}}]',
    "mistral-args": "[TOOL_CALLS]now[ARGS]{}",
}


@pytest.fixture(scope="module")
def vocabulary() -> GrammarTokenizer:
    tokenizer = Tokenizer(byte_level_tokenizer())
    return GrammarTokenizer(
        [tokenizer.token_bytes(token) for token in range(SMALLEST_VOCAB)],
        encode=lambda text: tokenizer.encode(text, add_special=False),
        end_ids=[EOS_TOKEN_ID],
        special_ids=list(tokenizer.special_ids.values()),
    )


def takes(vocabulary: GrammarTokenizer, grammar: GrammarSpec | None, text: str, *, exactly: bool = False) -> str:
    """``ends``: the whole text and then the end; ``goes on``: the text, but no end yet; ``refuses`` otherwise.

    Spaces after commas and colons may be left out, unless it is to take the text ``exactly``.
    """
    assert grammar is not None
    state, before = BuiltGrammar(vocabulary, grammar).state(), 0
    for byte in text.encode():
        before, last = byte, before
        if not exactly and byte == ord(" ") and last in b",:" and not _allowed(state)[byte]:
            continue
        if not _allowed(state)[byte]:
            return "refuses"
        state.take(byte)
    return "ends" if _allowed(state)[EOS_TOKEN_ID] else "goes on"


def _allowed(state: GrammarState) -> np.ndarray[Any, Any]:
    return np.unpackbits(state.mask().view(np.uint8), bitorder="little")


async def plan(**fields: Any) -> BoundOutput:
    tools = {name: fields.pop(name) for name in ("tools", "tool_choice", "parallel_tool_calls") if name in fields}
    kind = fields.pop("kind", HERMES)
    form = answer_form(CompletionBody(prompt=["x"], **fields))
    choice = choose_tools(**tools)
    return await plan_output(chat=kind, compiler=GrammarCompiler(_checked_here), form=form, choice=choice)


async def _checked_here(grammar: GrammarSpec, owner: str) -> None:
    check_grammar(grammar)


async def test_nothing_asked_is_nothing_bound() -> None:
    assert await plan() == BoundOutput()
    assert await plan(response_format={"type": "text"}, tools=[]) == BoundOutput()
    assert await plan(tools=TOOLS, tool_choice="none") == BoundOutput()


async def test_json_object_and_schema(vocabulary: GrammarTokenizer) -> None:
    anything = (await plan(response_format={"type": "json_object"})).grammar
    assert takes(vocabulary, anything, '{"a": [1, null]}') == "ends"
    assert takes(vocabulary, anything, "[1]") == "refuses"
    assert takes(vocabulary, anything, '{"a":') == "goes on"
    assert takes(vocabulary, anything, "{" + " " * 40) == "refuses", "spaces without end would never be JSON"
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    bound = (
        await plan(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    ).grammar
    assert takes(vocabulary, bound, '{"n": 12}') == "ends"
    assert takes(vocabulary, bound, '{"n":12}', exactly=True) == "ends"
    for spaced in ('{"n": 12}', '{ "n":12}', '{\n  "n":12\n}'):
        assert takes(vocabulary, bound, spaced, exactly=True) == "refuses", "spaces and lines cost tokens"
    assert takes(vocabulary, bound, '{"n": "') == "refuses"
    assert takes(vocabulary, bound, "{}") == "refuses"


@pytest.mark.parametrize("kind", [HERMES, LLAMA, MISTRAL, MISTRAL_ARGS], ids=lambda kind: kind.name)
async def test_tools_in_every_familys_format(vocabulary: GrammarTokenizer, kind: ChatFormat) -> None:
    call = CALLS[kind.name]
    other = call.replace("now", "weather").replace("{}", '{"city": "Rome"}')
    auto = await plan(kind=kind, tools=TOOLS, tool_choice="auto")
    assert auto.answer is not None
    assert auto.answer.chat is kind
    assert len(auto.answer.functions) == 2
    for text in (call, other, "Hello", ""):
        assert takes(vocabulary, auto.grammar, text) == "ends"
    assert takes(vocabulary, auto.grammar, call.replace("now", "never")) == "refuses"
    assert takes(vocabulary, auto.grammar, other.replace("city", "town")) == "refuses"
    forced = (await plan(kind=kind, tools=TOOLS, tool_choice="required")).grammar
    assert [takes(vocabulary, forced, text) for text in (call, other, "Hello")] == ["ends", "ends", "refuses"]
    named = await plan(kind=kind, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert [takes(vocabulary, named.grammar, text) for text in (call, other)] == ["refuses", "ends"]
    assert named.answer is not None
    assert list(named.answer.functions) == ["weather"]


async def test_parallel_calls_only_where_wanted(vocabulary: GrammarTokenizer) -> None:
    twice = CALLS["hermes"] + "\n" + CALLS["hermes"]
    for several, result in ((True, "ends"), (None, "ends"), (False, "refuses")):
        grammar = (await plan(tools=TOOLS, tool_choice="required", parallel_tool_calls=several)).grammar
        assert takes(vocabulary, grammar, twice) == result


@pytest.mark.parametrize("kind", [HERMES, LLAMA, MISTRAL, MISTRAL_ARGS], ids=lambda kind: kind.name)
async def test_a_named_function_is_called_once(vocabulary: GrammarTokenizer, kind: ChatFormat) -> None:
    call = CALLS[kind.name]
    named = (await plan(kind=kind, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})).grammar
    assert takes(vocabulary, named, call) == "ends"
    several = {
        "hermes": f"{call}\n{call}",
        "llama": f"{call}; {call}",
        "mistral": call.replace("}]", '}, {"name": "now", "arguments": {}}]'),
        "mistral-args": call + call,
    }[kind.name]
    required = (await plan(kind=kind, tools=TOOLS, tool_choice="required")).grammar
    assert [takes(vocabulary, grammar, several) for grammar in (required, named)] == ["ends", "refuses"]


@pytest.mark.parametrize("kind", [HERMES, LLAMA, MISTRAL, MISTRAL_ARGS], ids=lambda kind: kind.name)
async def test_an_automatic_choice_ends_with_its_one_call(vocabulary: GrammarTokenizer, kind: ChatFormat) -> None:
    call = CALLS[kind.name]
    mark = "<|python_tag|>" if kind is LLAMA else ""
    grammar = (await plan(kind=kind, tools=TOOLS, parallel_tool_calls=False)).grammar
    for text in (call, f"Let me see. {mark}{call}", "Hello", ""):
        assert takes(vocabulary, grammar, text) == "ends", text
    between = {"llama": "; ", "hermes": "\n"}.get(kind.name, "")
    for text in (call + between + call, call + " bye"):
        assert takes(vocabulary, grammar, text) == "refuses", text


def _schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def _named(name: str, parameters: object, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, SCHEMA),
        (_schema({"type": "nothing"}), SCHEMA),
        (_schema({"$ref": "http://127.0.0.1/x"}), SCHEMA),
        (_schema({"$ref": "#/$defs/gone"}), SCHEMA),
        (_schema({"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(1400)}}), SCHEMA),
        (_schema({"$ref": "#"}), SCHEMA),
        (_schema({"allOf": [{"$ref": "#"}]}), SCHEMA),
        (_schema({"anyOf": [{"oneOf": [{"$ref": "#"}]}]}), SCHEMA),
        (_schema({"$ref": "#/$defs/%61", "$defs": {"a": {"$ref": "#/$defs/%61"}}}), SCHEMA),
        (_schema({"type": "object", "properties": []}), SCHEMA),
        (_schema({"type": "object", "properties": None}), SCHEMA),
        (_schema({"allOf": [{"properties": {"a": {}}}, {}], "properties": []}), SCHEMA),
        (_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b~1"}, "b/": {"$ref": "#/$defs/a"}}}), SCHEMA),
        (_schema({"type": "string", "pattern": "(("}), SCHEMA),
        (_schema({"type": "string", "pattern": "(?=a)a"}), SCHEMA),
        (_schema({"type": "string", "minLength": 3, "maxLength": 2}), SCHEMA),
        (_schema({"enum": ["x" * 1000] * 100}), SCHEMA),
        (_schema({"x-guidance": 7}), SCHEMA),
        ({"tools": TOOLS * 257}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        ({"tools": [TOOLS[0], TOOLS[1], _named("now", {})]}, "tools.2.function.name"),
        ({"tools": [_named("a", [1])]}, "tools.0.function.parameters"),
        ({"tools": [TOOLS[0], _named("a", {"type": "nothing"}, strict=True)]}, "tools.1.function.parameters"),
        *(
            ({"tools": [_named("a", {"type": kind})]}, "tools.0.function.parameters")
            for kind in ("string", "array", ["array", "null"])
        ),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_what_cannot_be_is_a_400_that_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpProblem) as caught:
        await plan(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "%llguidance" not in caught.value.message


A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
DEFS: dict[str, Any] = {"$defs": {"A": A}}
TO_A = {"$ref": "#/$defs/A"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, ['{"a": 1}'], ['{"a": 1, "x": 2}']),
        (A | {"additionalProperties": True}, ['{"a": 1, "x": 2}'], ['{"a": "1"}']),
        (A | {"additionalProperties": {"type": "null"}}, ['{"a": 1, "x": null}'], ['{"a": 1, "x": 2}']),
        ({"type": "object"}, ['{"x": {"y": 1}}'], []),
        ({"properties": {"a": A}, "type": "object"}, ['{"a": {"a": 1}}'], ['{"a": {"a": 1, "x": 2}}']),
        ({"properties": {"properties": {}}, "type": "object"}, ['{"properties": {"x": 1}}'], ['{"x": 1}']),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, ['{"b": 1}'], ['{"b": 1, "x": 2}']),
        ({"type": "array", "items": A}, ['[{"a": 1}]'], ['[{"a": 1, "x": 2}]']),
        ({"anyOf": [A, B]}, ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 2}', '{"x": 1}']),
        ({"allOf": [TO_A, B]} | DEFS, ['{"a": 1, "b": 2}'], ['{"a": 1, "b": 2, "x": 3}', '{"a": "1"}']),
        ({"allOf": [TO_A], "description": "one"} | DEFS, ['{"a": 1}'], ['{"a": 1, "x": 2}']),
        (TO_A | DEFS, ['{"a": 1}'], ['{"a": 1, "x": 2}']),
        (
            {"type": "array", "items": {"anyOf": [{"allOf": [TO_A, B]}, TO_A]}} | DEFS,
            ['[{"a": 1, "b": 2}, {"a": 1}]'],
            ['[{"a": 1, "x": 2}]'],
        ),
        (A | {"anyOf": [B, {"properties": {"c": {}}, "required": ["c"]}]}, ['{"a": 1, "b": 2}'], ['{"a": 1, "x": 2}']),
        ({"allOf": [A | {"additionalProperties": True}, B]}, ['{"a": 1, "b": 2, "x": 3}'], []),
        ({"enum": [{"properties": {}, "x": 1}]}, ['{"properties": {}, "x": 1}'], []),
        (
            {"allOf": [{"$ref": "#/$defs/A%3CB%3E"}, B], "$defs": {"A<B>": A}},
            ['{"a": 1, "b": 2}'],
            ['{"a": 1, "b": 2, "x": 3}'],
        ),
        (
            {"properties": {"p": {"anyOf": [A, B]}, "q": {"allOf": [{"$ref": "#/properties/p/anyOf/0"}, B]}}},
            ['{"q": {"a": 1, "b": 2}}'],
            ['{"q": {"a": 1, "b": 2, "x": 3}}'],
        ),
        (A | {"$defs": {"s": {"$anchor": "s", "allOf": [{"$ref": "#s"}, B]}}}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        (
            {"type": "object", "properties": {}, "patternProperties": {"^x": {"type": "integer"}}},
            ['{"x1": 1}'],
            ['{"y": 1}'],
        ),
    ],
    ids=str,
)
async def test_objects_that_name_their_keys_have_no_others(
    vocabulary: GrammarTokenizer, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    bound = [((await plan(**_schema(schema))).grammar, "{}")]
    if schema.get("type") != "array" and schema != {"type": "object"}:  # parameters are objects, of keys that are named
        tools = [{"type": "function", "function": {"name": "f", "parameters": {**schema}}}]
        called = await plan(tools=tools, tool_choice="required", kind=MISTRAL_ARGS)
        bound.append((called.grammar, "[TOOL_CALLS]f[ARGS]{}"))
    for grammar, around in bound:
        assert {takes(vocabulary, grammar, around.replace("{}", text)) for text in good} == {"ends"}
        assert {takes(vocabulary, grammar, around.replace("{}", text)) for text in bad} <= {"refuses"}


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": "object"}, {"type": "object", "properties": {}}, {"type": ["object", "null"]}],
)
async def test_a_function_that_names_no_parameters_takes_none(
    vocabulary: GrammarTokenizer, parameters: dict[str, Any] | None
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    grammar = (await plan(tools=tools, tool_choice="required", kind=MISTRAL_ARGS)).grammar
    assert takes(vocabulary, grammar, "[TOOL_CALLS]f[ARGS]{}") == "ends"
    assert takes(vocabulary, grammar, '[TOOL_CALLS]f[ARGS]{"argument"') == "refuses"
    assert takes(vocabulary, grammar, "[TOOL_CALLS]f[ARGS]null") == "refuses"


CITY_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ROME, LIE = '{"city": "Rome"}', '{"town": "Rome"}'


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"guided_json": CITY_SCHEMA}, ROME, LIE),
        ({"guided_json": json.dumps(CITY_SCHEMA)}, ROME, LIE),
        ({"json_schema": CITY_SCHEMA}, ROME, LIE),
        ({"structured_outputs": {"json": CITY_SCHEMA}}, ROME, LIE),
        ({"response_format": {"type": "json_object", "schema": CITY_SCHEMA}}, ROME, LIE),
        ({"response_format": {"type": "json_object", "schema": None}}, LIE, "[1]"),
        ({"structured_outputs": {"json_object": True}}, LIE, "[1]"),
        ({"guided_choice": ["yes", 'no "é"\n/']}, 'no "é"\n/', "yesno"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "maybe"),
        ({"guided_regex": "^[0-9]{3}/[a-f]+$"}, "123/beef", "123"),
        ({"guided_regex": r"a\/b\n?"}, "a/b", "a-b"),
        ({"guided_regex": "x\ny|z"}, "x\ny", "xy"),
        ({"structured_outputs": {"regex": "a|bc", "json": None, "disable_fallback": True}}, "bc", "ac"),
    ],
    ids=str,
)
async def test_every_way_to_ask_for_a_form(
    vocabulary: GrammarTokenizer, fields: dict[str, Any], good: str, bad: str
) -> None:
    grammar = (await plan(**fields)).grammar
    assert takes(vocabulary, grammar, good) == "ends"
    assert takes(vocabulary, grammar, bad) != "ends"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": '{"items": ' * 40 + "{}" + "}" * 40}, "guided_json"),
        ({"guided_json": '{"type": "string", "type": "null"}'}, "guided_json"),
        ({"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"response_format": {"type": "json_object", "schema": {"type": "nothing"}}}, "response_format.schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"guided_regex": "a(?=b)"}, "guided_regex"),
        ({"guided_regex": "a\\"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "(?=a)", "tools": TOOLS}, "guided_regex"),
    ],
    ids=str,
)
async def test_a_form_that_cannot_be_is_a_400_that_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpProblem) as caught:
        await plan(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def _one_tool(schema: Mapping[str, Any], *, strict: bool | None = None) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": schema}}
    function = {"name": "f", "parameters": parameters, "strict": strict}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "kind": MISTRAL_ARGS}


EMAIL = {"type": "string", "format": "email", "pattern": r"^(?!\.)([A-Za-z0-9]+)@[a-z.]+$"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,1]", '["1"]'),
        (
            {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "null"}},
            '{"y":null}',
            "1",
        ),
        ({"anyOf": [{"not": {"const": 1}}, {"type": "integer"}]}, "1", None),
        ({"type": "string", "format": "password"}, '"x"', "1"),
        (EMAIL, '"x@y.z"', '"x"'),
        ({"type": "string", "pattern": r"(?:\bx)"}, '"y"', "1"),
        ({"type": "string", "pattern": r"^(?<name>\\b)$"}, r'"\\b"', '"x"'),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}]}, '"xy"', "1"),
        (
            {"oneOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/properties/a/oneOf/0"}}]},
            "[null]",
            "[1]",
        ),
        ({"type": "object", "patternProperties": {"^(?=x)": {}}, "additionalProperties": False}, '{"x":1}', "1"),
        ({"type": "object", "properties": {"b": {}}, "unevaluatedProperties": {}}, '{"x":1}', "1"),
        ({"$ref": "https://example.org/x.json", "type": "integer"}, "1", '"1"'),
        ({"type": "integer", "enum": None, "minimum": None, "description": None}, "1", '"1"'),
        ({"type": "string", "enum": []}, '"x"', "1"),
        ({"const": None}, "null", "1"),
        ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}}, "9", '"9"'),
    ],
    ids=str,
)
async def test_what_no_grammar_can_express_binds_no_tool_that_is_not_strict(
    vocabulary: GrammarTokenizer, schema: dict[str, Any], good: str, bad: str | None
) -> None:
    grammar = (await plan(**_one_tool(schema))).grammar
    assert takes(vocabulary, grammar, f'[TOOL_CALLS]f[ARGS]{{"a":{good}}}') == "ends"
    assert bad is None or takes(vocabulary, grammar, f'[TOOL_CALLS]f[ARGS]{{"a":{bad}}}') == "refuses"


@pytest.mark.parametrize(
    "schema", [{"type": "array", "uniqueItems": True}, {"type": "string", "format": "password"}, EMAIL], ids=str
)
async def test_a_strict_tool_is_bound_by_all_of_its_schema_or_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(HttpProblem) as caught:
        await plan(**_one_tool(schema, strict=True))
    assert (caught.value.status, caught.value.param) == (400, "tools.0.function.parameters")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        {"type": "object", "additionalProperties": {"type": "integer", "uniqueItems": False}},
    ],
    ids=str,
)
async def test_keywords_that_say_nothing_may_stand_everywhere(
    vocabulary: GrammarTokenizer, schema: dict[str, Any]
) -> None:
    assert takes(vocabulary, (await plan(**_schema(schema))).grammar, '{"x": 1}') == "ends"
    assert (await plan(**_one_tool(schema, strict=True))).grammar is not None


async def test_a_strict_tool_that_is_too_hard_to_compile_is_named() -> None:
    """Another tool's mistake was found first, and then each tool by itself is tried."""

    async def check(grammar: GrammarSpec, owner: str) -> None:
        if "city" in grammar.text and "bad" not in grammar.text:
            raise GrammarTooHard(JobCost(cpu_s=1.0, peak_bytes=1 << 20))
        check_grammar(grammar)

    bad = _named("bad", {"properties": {"a": {"pattern": "["}}})
    hard = TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}
    with pytest.raises(HttpProblem) as caught:
        await plan_output(choice=choose_tools([hard, bad]), chat=HERMES, compiler=GrammarCompiler(check))
    assert (caught.value.status, caught.value.param) == (400, "tools.0.function.parameters")
    free = await plan_output(choice=choose_tools([TOOLS[0], bad]), chat=HERMES, compiler=GrammarCompiler(check))
    assert free.grammar is not None
    assert {note.kind for note in free.notes} >= {"free arguments"}


async def _too_hard(grammar: GrammarSpec, owner: str) -> None:
    raise GrammarTooHard(JobCost(cpu_s=1.0, peak_bytes=1 << 20))


async def test_calls_that_no_grammar_can_bind_are_read_without_it() -> None:
    plain = await plan_output(choice=choose_tools(TOOLS), chat=HERMES, compiler=GrammarCompiler(_too_hard))
    assert plain.grammar is None
    assert plain.answer is not None
    assert set(plain.answer.functions) == {"weather", "now"}
    assert [note.kind for note in plain.notes] == ["unbound calls"]
    wide = {"type": "object", "properties": {f"p{place}": {"enum": ["x" * 500]} for place in range(100)}}
    large = [_named(f"tool_{place}", wide) for place in range(10)]
    many = await plan_output(choice=choose_tools(large), chat=HERMES, compiler=GrammarCompiler(_too_hard))
    assert many.grammar is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_a_call_that_must_be_made_needs_its_grammar(choice: Any) -> None:
    with pytest.raises(HttpProblem) as caught:
        await plan_output(choice=choose_tools(TOOLS, choice), chat=HERMES, compiler=GrammarCompiler(_too_hard))
    assert (caught.value.status, caught.value.code) == (400, "invalid_schema")


async def test_some_of_the_tools_may_be_allowed(vocabulary: GrammarTokenizer) -> None:
    def allowed(mode: str, *names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    call = CALLS["hermes"]
    other = call.replace("now", "weather").replace("{}", '{"city": "Rome"}')
    for mode, said in (("auto", "ends"), ("required", "refuses")):
        some = await plan(tools=TOOLS, tool_choice=allowed(mode, "weather"))
        assert [takes(vocabulary, some.grammar, text) for text in (other, call, "Hello")] == ["ends", "refuses", said]
        assert some.answer is not None
        assert list(some.answer.functions) == ["weather"]
    twice = (await plan(tools=TOOLS, tool_choice=allowed("required", "weather", "now"))).grammar
    assert takes(vocabulary, twice, f"{call}\n{other}") == "ends"
    for bad, param in (
        (allowed("maybe", "now"), "tool_choice.allowed_tools.mode"),
        (allowed("auto", "gone"), "tool_choice"),
        (allowed("auto"), "tool_choice.allowed_tools.tools"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools.tools"),
    ):
        with pytest.raises(HttpProblem) as caught:
            await plan(tools=TOOLS, tool_choice=bad)
        assert caught.value.param == param


async def test_a_schema_may_hold_itself(vocabulary: GrammarTokenizer) -> None:
    tree = {
        "type": "object",
        "properties": {"below": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["below"],
        "additionalProperties": False,
    }
    grammar = (await plan(**_schema(tree))).grammar
    assert takes(vocabulary, grammar, '{"below": [{"below": []}]}') == "ends"
    assert takes(vocabulary, grammar, '{"below": [3') == "refuses"


def test_the_work_of_closing_a_schema_is_bounded() -> None:
    """Both hold up a gateway for seconds otherwise: a long pointer that is followed often, and many keys of many."""
    definitions = {f"d{i}": {"properties": {}, "allOf": [{"$ref": "#/$defs/D"}]} for i in range(700)}
    keys = {f"{i:x}": {} for i in range(1800)}
    with pytest.raises(RequestInvalid):
        closed_schema({"$defs": {"D": {"properties": keys}, **definitions}})
    target = CountedText("#" + "/a" * 10_000)
    closed_schema({"$defs": {"D": {"$ref": target}, **definitions}})
    assert target.num_read == 1


class CountedText(str):
    """Counts how often it is read as a pointer."""

    num_read = 0

    def startswith(self, *args: Any) -> bool:
        self.num_read += 1
        return super().startswith(*args)


async def test_patterns_that_explode_elsewhere_compile(vocabulary: GrammarTokenizer) -> None:
    grammar = (await plan(**_schema({"type": "string", "pattern": "^(a+)+$"}))).grammar
    assert takes(vocabulary, grammar, '"' + "a" * 5000 + '"') == "ends"


def test_instructions_name_every_tool() -> None:
    text = tool_instructions(TOOLS)
    assert '"weather"' in text
    assert '"now"' in text
