"""Tool calls in text: found in every family's way of writing them, however the text is cut, in linear time."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.gateway.answer_reader import AnswerFormat, AnswerReader
from edgepipe.gateway.formats.chat_format import ChatFormat
from edgepipe.gateway.formats.hermes import HERMES as HERMES_FORMAT
from edgepipe.gateway.formats.llama import LLAMA as LLAMA_FORMAT
from edgepipe.gateway.formats.mistral import MISTRAL as MISTRAL_FORMAT
from edgepipe.gateway.formats.mistral import MISTRAL_ARGS
from edgepipe.gateway.tool_calls import CallDelta, Scanned, call_id

HERMES = 'Sure.\n<tool_call>\n{"name": "sum", "arguments": {"a": [1, 2], "s": "}\\" ]"}}\n</tool_call>\n'
LLAMA = '{"name": "sum", "parameters": {"a": [1, 2], "s": "}\\" ]"}}'
MISTRAL = '[TOOL_CALLS] [{"name": "sum", "arguments": {"a": [1, 2], "s": "}\\" ]"}}]'
NAMED = '[TOOL_CALLS]sum[ARGS]{"a": [1, 2], "s": "}\\" ]"}'
ARGUMENTS = {"a": [1, 2], "s": '}" ]'}


def scan(kind: ChatFormat, pieces: list[str], *, followed_by: str | None = None) -> Scanned:
    """All that the pieces give, with every call's parts joined."""
    reader = AnswerReader(AnswerFormat(chat=kind, functions={"sum": {}}), new_id=lambda index: f"id{index}")
    content, parts = "", list[CallDelta]()
    for result in map(reader.push, pieces):
        content += result.content
        parts += result.calls
        indices = [call.index for call in result.calls]
        assert len(set(indices)) == len(indices), "clients take one entry of an index"
    content += reader.finish(followed_by=followed_by).content
    joined: list[CallDelta] = []
    for part in parts:
        if part.name:
            assert part.index == len(joined)
            assert part.call_id == f"id{part.index}"
            joined.append(part)
        else:
            assert part.index == len(joined) - 1
            old = joined[-1]
            joined[-1] = CallDelta(
                index=old.index, call_id=old.call_id, name=old.name, arguments=old.arguments + part.arguments
            )
    assert reader.num_calls == len(joined)
    return Scanned(content, tuple(joined))


@pytest.mark.parametrize(
    ("kind", "text", "content"),
    [
        (HERMES_FORMAT, HERMES, "Sure."),
        (LLAMA_FORMAT, LLAMA, ""),
        (LLAMA_FORMAT, "Well: <|python_tag|>" + LLAMA, "Well:"),
        (MISTRAL_FORMAT, MISTRAL, ""),
        (MISTRAL_ARGS, "Sure. " + NAMED, "Sure."),
        (MISTRAL_ARGS, NAMED.replace("[ARGS]", "[CALL_ID]a1B2c3D4e[ARGS] "), ""),
        (MISTRAL_FORMAT, NAMED, ""),
        (MISTRAL_ARGS, MISTRAL, ""),
    ],
)
def test_each_family_and_every_cut_gives_the_same_call(kind: ChatFormat, text: str, content: str) -> None:
    for size in (1, 2, 3, 7, len(text)):
        found = scan(kind, [text[i : i + size] for i in range(0, len(text), size)])
        assert found.content == content
        assert [call.name for call in found.calls] == ["sum"]
        assert json.loads(found.calls[0].arguments) == ARGUMENTS


def test_several_calls_and_the_text_between_them() -> None:
    twice = HERMES + "and" + HERMES.removeprefix("Sure.") + "bye"
    found = scan(HERMES_FORMAT, [twice])
    assert found.content == "Sure.\nand\nbye"
    assert [call.index for call in found.calls] == [0, 1]
    array = '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]'
    found = scan(MISTRAL_FORMAT, [array])
    assert [(call.name, call.arguments) for call in found.calls] == [("a", "{}"), ("b", '{"x": 1}')]
    found = scan(LLAMA_FORMAT, [LLAMA + "; " + LLAMA])
    assert len(found.calls) == 2
    found = scan(MISTRAL_ARGS, ['[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{"x": 1} bye'])
    assert [(call.name, call.arguments) for call in found.calls] == [("a", "{}"), ("b", '{"x": 1}')]
    assert found.content == " bye"


def test_arguments_stream_before_the_call_ends() -> None:
    reader = AnswerReader(AnswerFormat(chat=HERMES_FORMAT, functions={"f": {}}), new_id=str)
    first = reader.push('<tool_call>{"name": "f", "arguments": {"x": "lon')
    assert first.calls == (CallDelta(index=0, call_id="0", name="f", arguments='{"x": "lon'),)


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ('{"arguments": {"x": 1}, "name": "f"}', "f", '{"x": 1}'),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', "f", '{"x": 1}'),
        ('{"name": "f"}', "f", "{}"),
        ('{"name": "f", "arguments":   {"x" :1} , "id": "7"}', "f", '{"x" :1}'),
    ],
)
def test_odd_but_clear_calls(body: str, name: str, arguments: str) -> None:
    found = scan(HERMES_FORMAT, list(f"<tool_call>{body}</tool_call>"))
    assert [(call.name, call.arguments) for call in found.calls] == [(name, arguments)]
    assert found.content == ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (HERMES_FORMAT, "no call < at <tool all"),
        (HERMES_FORMAT, "<tool_call>what?</tool_call> "),
        (HERMES_FORMAT, '<tool_call>{"answer": 42}</tool_call>'),
        (HERMES_FORMAT, '<tool_call>{"name": ""}'),
        (LLAMA_FORMAT, '{"answer": {"deep": "}"}}\n'),
        (LLAMA_FORMAT, " 1 < 2 "),
        (MISTRAL_FORMAT, "[TOOL_CALLS] (none)"),
        (MISTRAL_ARGS, "[TOOL_CALLS]a b[ARGS]{}"),
        (MISTRAL_ARGS, "[TOOL_CALLS]f[ARGS] 3 {}"),
        (MISTRAL_ARGS, "[TOOL_CALLS]" + "f" * 300 + "[ARGS]{}"),
    ],
)
def test_what_is_no_call_stays_content(kind: ChatFormat, text: str) -> None:
    for size in (1, 3, len(text)):
        found = scan(kind, [text[i : i + size] for i in range(0, len(text), size)])
        assert found == Scanned(text, ())


def test_a_call_cut_off_keeps_what_came() -> None:
    found = scan(HERMES_FORMAT, ['<tool_call>\n{"name": "f", "arguments": {"x": "unfin'])
    assert [(call.name, call.arguments) for call in found.calls] == [("f", '{"x": "unfin')]
    assert found.content == ""
    found = scan(MISTRAL_ARGS, ['[TOOL_CALLS]f[ARGS]{"x": "unfin'])
    assert [(call.name, call.arguments) for call in found.calls] == [("f", '{"x": "unfin')]
    assert found.content == ""


@pytest.mark.parametrize(
    ("kind", "text", "content"),
    [
        (HERMES_FORMAT, HERMES, "Sure."),
        (HERMES_FORMAT, "\n" + HERMES.removeprefix("Sure."), ""),
        (LLAMA_FORMAT, LLAMA, ""),
        (LLAMA_FORMAT, "Well: <|python_tag|>" + LLAMA, "Well:"),
        (MISTRAL_FORMAT, "Sure. " + MISTRAL, "Sure."),
        (MISTRAL_ARGS, "Sure. " + NAMED, "Sure."),
    ],
)
def test_wherever_a_call_is_cut_off_its_markup_is_no_content(kind: ChatFormat, text: str, content: str) -> None:
    for end in range(len(content) + 1, len(text)):
        found = scan(kind, list(text[:end]), followed_by="")
        assert found.content.rstrip() == content, text[:end]
        assert all(call.name == "sum" for call in found.calls)


def test_an_opening_that_a_whole_text_ends_with_is_text() -> None:
    assert scan(HERMES_FORMAT, ["1 <"]).content == "1 <"
    assert scan(HERMES_FORMAT, ["1 <tool"], followed_by="").content == "1"


@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ("x <tool_", "call", "x"),
        ("x <", "tool_call>{", "x"),
        ("x <", "b>", "x <"),
        ("x <tool", "box>", "x <tool"),
        ("x", "<tool_call>", "x"),
    ],
)
def test_a_stop_string_inside_an_opening_leaves_none_of_it(text: str, stop: str, content: str) -> None:
    assert scan(HERMES_FORMAT, list(text), followed_by=stop).content.rstrip() == content


PIECES = ["{", "}", '"', '"name": "f"', ",", ":", " ", "\\", "a"]


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", *PIECES])))
def test_any_text_cut_anyhow_gives_the_same(parts: list[str]) -> None:
    text = "".join(parts)
    assert scan(HERMES_FORMAT, list(text)) == scan(HERMES_FORMAT, [text])


@given(st.lists(st.sampled_from(["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[", "]", *PIECES])))
def test_any_text_of_mistrals_cut_anyhow_gives_the_same(parts: list[str]) -> None:
    text = "".join(parts)
    assert scan(MISTRAL_ARGS, list(text)) == scan(MISTRAL_ARGS, [text])


@pytest.mark.parametrize("piece", ["[", "{", ",", '"', "<tool_call>", "<", '{"name":', "\\", " ", "{}"])
@pytest.mark.parametrize("kind", [HERMES_FORMAT, LLAMA_FORMAT, MISTRAL_FORMAT, MISTRAL_ARGS])
def test_hostile_text_ends_in_time_and_is_no_call(kind: ChatFormat, piece: str) -> None:
    """A reader that looks twice at what it has seen would not be done with this within the test's time."""
    opening = {"hermes": "<tool_call>", "llama": ""}.get(kind.name, "[TOOL_CALLS]")
    text = opening + piece * 40_000
    found = scan(kind, [text[i : i + 16] for i in range(0, len(text), 16)])
    assert found.calls == ()
    assert text.startswith(found.content)


def test_ids_belong_to_the_request() -> None:
    assert call_id("r", 0, 1) == call_id("r", 0, 1) != call_id("r", 1, 1)
